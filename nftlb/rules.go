// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// owned is the name prefix of all objects of the API.
const owned = "nftlb-"

// portion is the configuration of one farm, or of one address without a farm.
type portion struct {
	label    string // for warnings: "farm web"
	services []config.Service
	sets     map[string][]netip.Prefix
	rules    []config.FirewallRule
	warnings []string
}

func (p *portion) addWarning(format string, args ...any) {
	p.warnings = append(p.warnings, fmt.Sprintf("nftlb API: %s: ", p.label)+fmt.Sprintf(format, args...))
}

func (p *portion) isEmpty() bool { return len(p.services) == 0 && len(p.rules) == 0 }

// wantedPortions returns the wanted portions.
func (s *store) wantedPortions() []*portion {
	var all []*portion
	for _, f := range s.farms {
		if p := f.portion(); p != nil {
			all = append(all, p)
		}
	}
	for _, a := range s.addresses {
		if a.Used == 0 && len(a.policies) > 0 {
			p := &portion{label: "address " + a.Name}
			var lists []*policy
			for _, ap := range a.policies {
				lists = append(lists, ap.policy)
			}
			p.filter(a.Name, []*address{a}, lists, a.Attributes["verdict"])
			all = append(all, p)
		}
	}
	return all
}

// portion returns nil for a farm that is not up.
func (f *farm) portion() *portion {
	if f.State != up || len(f.addresses) == 0 {
		return nil
	}
	p := &portion{label: "farm " + f.Name}
	var lists []*policy
	for _, fp := range f.policies {
		lists = append(lists, fp.policy)
	}
	p.warnUnsupported(f)
	if f.Attributes["mode"] == "local" {
		p.warnLocal(f)
		var addresses []*address
		for _, fa := range f.addresses {
			addresses = append(addresses, fa.address)
		}
		p.filter(f.Name, addresses, lists, f.Attributes["verdict"])
		return p
	}
	groups := p.groups(f)
	deny := p.deny(f.Name, lists, f.Attributes["verdict"])
	for i := range groups {
		g := &groups[i]
		g.Name = owned + f.Name
		if len(groups) > 1 {
			g.Name += "-" + g.Protocol.String()
			if g.Listen[0].Address.Is6() {
				g.Name += "-6"
			}
		}
		g.Deny = deny
		p.service(f, g)
		p.services = append(p.services, *g)
	}
	return p
}

// groups returns a service with its listeners per protocol and family of the farm's addresses.
func (p *portion) groups(f *farm) []config.Service {
	var groups []config.Service
	for _, fa := range f.addresses {
		for _, l := range p.listeners(fa.address) {
			at := slices.IndexFunc(groups, func(g config.Service) bool {
				return g.Protocol == l.protocol && g.Listen[0].Address.Is4() == l.Address.Is4()
			})
			if at < 0 {
				groups = append(groups, config.Service{Protocol: l.protocol})
				at = len(groups) - 1
			}
			groups[at].Listen = append(groups[at].Listen, l.Listen)
		}
	}
	return groups
}

type listener struct {
	config.Listen
	protocol flow.Protocol
}

// listeners returns one listener per protocol of the address.
func (p *portion) listeners(a *address) []listener {
	text := a.Attributes["ip-addr"]
	ip, err := netip.ParseAddr(text)
	if err != nil {
		if text == "" {
			text = "none"
		}
		p.addWarning("address %s: %s is no address to listen on", a.Name, text)
		return nil
	}
	var ports []flow.Ports
	for one := range strings.SplitSeq(a.Attributes["ports"], ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		r, err := flow.ParsePorts(one)
		if err != nil {
			p.addWarning("address %s: ports %s: %v", a.Name, one, err)
			continue
		}
		ports = append(ports, r)
	}
	l := config.Listen{Address: ip, Ports: ports}
	switch protocol := a.Attributes["protocol"]; {
	case protocol == "udp":
		return []listener{{l, flow.UDP}}
	case protocol == "sctp":
		return []listener{{l, flow.SCTP}}
	case protocol == "tcp":
		return []listener{{l, flow.TCP}}
	case len(ports) == 0:
		return []listener{{l, flow.Any}}
	}
	return []listener{{l, flow.TCP}, {l, flow.UDP}, {l, flow.SCTP}}
}

// service sets the properties common to farms and services.
func (p *portion) service(f *farm, g *config.Service) {
	v := f.Attributes
	g.Mode = map[string]config.Mode{"snat": config.ModeFullNAT, "dnat": config.ModeDNAT, "dsr": config.ModeDSR, "stlsdnat": config.ModeStateless}[v["mode"]]
	p.source(f, g)
	p.backends(f, g)
	p.scheduler(f, g)
	p.persistence(f, g)
	if !f.ingress() {
		p.limits(f, g)
		g.Mark = uint32(leadingNumber(v["mark"], 16))
		if h := v["helper"]; h != "none" {
			g.Helper = config.Helper(h)
		}
	}
	if v["log"] != "none" {
		g.Log = f.log()
	}
}

func (f *farm) log() *config.Log {
	direction := map[string]string{"input": "IN", "forward": "FWD", "output": "OUT"}
	word, _, _ := strings.Cut(f.Attributes["log"], " ")
	l := &config.Log{Prefix: strings.NewReplacer("TYPE", direction[word], "FNAME", f.Name, "KNAME", "log").Replace(f.Attributes["log-prefix"])}
	if r, whole := rateOf(f.Attributes["log-rtlimit"]); whole {
		l.Rate = r
	}
	return l
}

// source sets the source address that backends see.
func (p *portion) source(f *farm, g *config.Service) {
	pool := f.Attributes["source-addr"]
	own := map[string]bool{}
	for _, b := range f.Backends {
		if b.State == up || b.State == off {
			own[b.Attributes["source-addr"]] = true
		}
	}
	switch {
	case len(own) == 1 && !own[""]:
		for pool = range own {
		}
	case len(own) > 1:
		p.addWarning("source-addr of single backends is not in force: a service has one for all")
	}
	if pool == "" || f.ingress() {
		return
	}
	var r config.AddressRange
	if err := r.UnmarshalText([]byte(pool)); err != nil {
		p.addWarning("source-addr: %v", err)
		return
	}
	g.Mode, g.SourcePool = config.ModeFullNAT, []config.AddressRange{r}
}

const maxWeight = 256

func (p *portion) backends(f *farm, g *config.Service) {
	ported, heaviest := true, 1
	for _, b := range f.Backends {
		ported = ported && b.Attributes["port"] != ""
		heaviest = max(heaviest, integer(b.Attributes["weight"]))
	}
	if heaviest > maxWeight {
		p.addWarning("weights are scaled down to %d at most", maxWeight)
	}
	for _, b := range f.Backends {
		ip, err := netip.ParseAddr(b.Attributes["ip-addr"])
		if b.State != up && b.State != off || !b.belowPriority() || err == nil && ip.Is4() != g.Listen[0].Address.Is4() {
			continue
		}
		if err != nil {
			p.addWarning("backend %s: ip-addr: %v", b.Name, err)
			continue
		}
		next := config.Backend{Name: b.Name, Address: ip, Drain: b.State == off, MaxConnections: integer(b.Attributes["est-connlimit"])}
		if next.Weight = integer(b.Attributes["weight"]); heaviest > maxWeight {
			next.Weight = max(1, next.Weight*maxWeight/heaviest)
		}
		if ported && g.Protocol != flow.Any && g.Mode != config.ModeDSR {
			port, err := strconv.ParseUint(b.Attributes["port"], 10, 16)
			if err != nil {
				p.addWarning("backend %s: port %s is no number from 1 to 65535", b.Name, b.Attributes["port"])
				continue
			}
			next.Port = uint16(port)
		}
		if b.Chosen && !f.ingress() {
			next.Mark = uint32(b.Mark) | uint32(leadingNumber(f.Attributes["mark"], 16))
		}
		if f.ingress() {
			next.MaxConnections = 0
		}
		g.Backends = append(g.Backends, next)
	}
}

// hasWord reports whether a list of words, in its printed form, contains one of the words.
func hasWord(list string, words ...string) bool {
	return slices.ContainsFunc(strings.Fields(list), func(w string) bool { return slices.Contains(words, w) })
}

func (p *portion) scheduler(f *farm, g *config.Service) {
	param := f.Attributes["sched-param"]
	switch scheduler := f.Attributes["scheduler"]; {
	case scheduler == "symhash":
		g.Scheduler = config.SchedulerSymmetricHash
	case scheduler == "hash" && hasWord(param, "srcport", "dstport"):
		g.Scheduler = config.SchedulerMaglev
	case scheduler == "hash":
		g.Scheduler = config.SchedulerSourceHash
	case g.Mode == config.ModeStateless:
		g.Scheduler = config.SchedulerSourceHash
		p.addWarning("scheduler %s: a mode without state spreads by the hash of the client's address instead", scheduler)
	case scheduler == "weight":
		g.Scheduler = config.SchedulerRandom
	default:
		g.Scheduler = config.SchedulerWRR
	}
	if hasWord(param, "srcmac", "dstmac") {
		p.addWarning("sched-param: hardware addresses do not count")
	}
}

var persistenceKeys = map[string]config.PersistenceKey{
	"srcip": config.KeySourceAddress, "dstip": config.KeyDestAddress, "srcport": config.KeySourcePort, "dstport": config.KeyDestPort,
	"srcmac": config.KeySourceMAC, "dstmac": config.KeyDestMAC,
}

func (p *portion) persistence(f *farm, g *config.Service) {
	words := strings.Fields(f.Attributes["persistence"])
	if len(words) == 0 || words[0] == "none" {
		return
	}
	if g.Mode == config.ModeStateless {
		p.addWarning("persistence is not in force: a mode without state remembers no clients, and the hash of their address keeps them on their backends")
	} else {
		g.Persistence = &config.Persistence{Timeout: config.Duration(time.Duration(integer(f.Attributes["persist-ttl"])) * time.Second)}
		for _, w := range words {
			g.Persistence.Key = append(g.Persistence.Key, persistenceKeys[w])
		}
	}
	for _, s := range f.Sessions {
		if s.backend == nil || !slices.ContainsFunc(g.Backends, func(b config.Backend) bool { return b.Name == s.backend.Name }) {
			continue
		}
		client, err := netip.ParseAddr(s.Client)
		if err != nil || len(words) > 1 || words[0] != "srcip" {
			p.addWarning("session of %s is not in force: a session has the address of a client", s.Client)
			continue
		}
		g.Sessions = append(g.Sessions, config.Session{Client: netip.PrefixFrom(client, client.BitLen()), Backend: s.backend.Name})
	}
}

// rateOf returns a rate; whole is false for no rate, and for a rate that Sluice cannot express.
func rateOf(text string) (r config.Rate, whole bool) {
	count, unit, _ := strings.Cut(text, "/")
	r.Count = integer(count)
	switch unit {
	case "minute":
		r.Per = time.Minute
	case "hour":
		r.Per = time.Hour
	case "day":
		r.Per = 24 * time.Hour
	case "week":
		r.Count, r.Per = r.Count/7, 24*time.Hour
	default:
		r.Per = time.Second
	}
	return r, r.Count > 0
}

func (p *portion) limits(f *farm, g *config.Service) {
	v, l := f.Attributes, &g.Limits
	rate := func(key string) config.Rate {
		r, whole := rateOf(v[key])
		if !whole {
			if integer(v[key]) > 0 {
				p.addWarning("%s %s is not in force: it is less than one a day", key, v[key])
			}
			return config.Rate{}
		}
		if integer(v[key+"-burst"]) > 0 {
			p.addWarning("%s-burst is not in force", key)
		}
		return r
	}
	l.NewConnectionsPerClient = rate("new-rtlimit")
	l.ConnectionsPerClient = integer(v["est-connlimit"])
	if g.Protocol == flow.TCP || g.Protocol == flow.Any {
		l.StrictTCP = v["tcp-strict"] == "on"
		if l.ResetRate = rate("rst-rtlimit"); !l.ResetRate.IsZero() {
			p.addWarning("rst-rtlimit holds for all clients together, not for each")
		}
	}
}

// warnUnsupported warns about settings that services do not have.
func (p *portion) warnUnsupported(f *farm) {
	if q := f.Attributes["queue"]; q != "-1" {
		p.addWarning("queue %s is not in force: packets are not handed to programs", q)
	}
	if f.Attributes["intra-connect"] == "on" {
		p.addWarning("intra-connect is not in force: connections of this host are not balanced")
	}
	for _, fa := range f.addresses {
		if len(fa.address.policies) > 0 {
			p.addWarning("policies of address %s are not in force: the farm's are", fa.address.Name)
		}
	}
}

// warnLocal warns about settings without effect for a farm with connections to this host.
func (p *portion) warnLocal(f *farm) {
	for _, key := range []string{"new-rtlimit", "rst-rtlimit", "est-connlimit"} {
		if integer(f.Attributes[key]) > 0 {
			p.addWarning("%s is not in force in mode local", key)
		}
	}
	if f.Attributes["tcp-strict"] == "on" {
		p.addWarning("tcp-strict is not in force in mode local")
	}
	if f.Attributes["source-addr"] != "" {
		p.addWarning("source-addr is not in force in mode local")
	}
}
