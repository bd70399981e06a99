// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// nftlb imports one document.
type nftlb struct {
	d         *draft.Draft
	addresses map[string]*draft.Value
	policies  map[string]*draft.Value
}

// NFTLB imports the JSON of nftlb: its configuration file, or the answer of its API to GET /farms.
func NFTLB(text string, _ Options) (*draft.Result, error) {
	list, err := draft.JSON(text)
	if err != nil {
		return nil, err
	}
	n := &nftlb{d: draft.New("nftlb", text), addresses: map[string]*draft.Value{}, policies: map[string]*draft.Value{}}
	for i := range n.d.Lines() {
		n.d.Structure(i + 1) // keys have notes of their own
	}
	var farms []*draft.Value
	for _, v := range list {
		for _, a := range v.Get("addresses").List() {
			n.addresses[a.Get("name").Str()] = a
		}
		for _, p := range v.Get("policies").List() {
			n.policies[p.Get("name").Str()] = p
		}
		farms = append(farms, v.Get("farms").List()...)
		for _, f := range v.Fields {
			if !slices.Contains([]string{"farms", "addresses", "policies"}, f.Key) {
				n.d.Lost(f.Value.Line, f.Key, "not understood", "write the equivalent by hand")
			}
		}
	}
	if len(farms) == 0 {
		return nil, errors.New("no farm in it: pass nftlb's configuration, or the answer of its API: curl -H 'Key: KEY' http://localhost:5555/farms")
	}
	for _, f := range farms {
		n.farm(f)
	}
	return n.d.Finish()
}

// farm is a service under construction.
type farm struct {
	object
	n     *nftlb
	value *draft.Value
	local bool // intra-connect
	log   config.Log
	logs  bool
	ports string
	param string // sched-param
}

var farmModes = map[string]config.Mode{"snat": config.ModeFullNAT, "dnat": config.ModeDNAT, "dsr": config.ModeDSR, "stlsdnat": config.ModeStateless}

var farmKeys = map[string]config.PersistenceKey{
	"srcip": config.KeySourceAddress, "dstip": config.KeyDestAddress, "srcport": config.KeySourcePort, "dstport": config.KeyDestPort,
	"srcmac": config.KeySourceMAC, "dstmac": config.KeyDestMAC,
}

func (n *nftlb) farm(v *draft.Value) {
	f := &farm{object: object{d: n.d}, n: n, value: v}
	f.addLines(v.Line)
	s := &f.service
	s.Name, s.Protocol, s.Mode, s.Backends = v.Get("name").Str(), flow.TCP, config.ModeFullNAT, []config.Backend{}
	for _, field := range v.Fields { // listeners first, because the ports of backends depend on them
		f.listenKey(field)
	}
	f.listeners()
	for _, field := range v.Fields {
		f.key(field)
	}
	if f.logs {
		s.Log = &f.log
	}
	if f.local {
		s.Datapath = config.DatapathNftables
	}
	f.balance()
	if len(s.Listen) == 0 && f.lost == "" {
		f.lost, f.next = "the farm has no address", "write listen:"
	}
	f.add()
}

// listenKey parses the keys of the listeners.
func (f *farm) listenKey(field draft.Field) {
	value := field.Value.Str()
	switch field.Key {
	case "protocol":
		if value == "all" {
			value = "any"
		}
		if err := f.service.Protocol.UnmarshalText([]byte(value)); err != nil {
			f.lost, f.next = "protocol "+value+" has no equivalent", "write protocol: tcp, udp, sctp or any"
		}
	case "virtual-ports":
		f.ports = value
	}
}

// listeners reads the addresses of a farm, from the farm or from address objects.
func (f *farm) listeners() {
	add := func(line int, address, ports string) {
		if address == "" {
			return
		}
		a, err := netip.ParseAddr(address)
		list, perr := portList(ports)
		if err != nil || perr != nil {
			f.noteMissing(line, address+" "+ports, "the address or its ports are not understood", "write listen:")
			return
		}
		if f.service.Protocol == flow.Any {
			list = nil
		}
		f.service.Listen = append(f.service.Listen, config.Listen{Address: a.Unmap(), Ports: list})
	}
	v := f.value
	add(v.Line, v.Get("virtual-addr").Str(), f.ports)
	for _, a := range v.Get("addresses").List() {
		of := a
		if known := f.n.addresses[a.Get("name").Str()]; known != nil && a.Get("ip-addr") == nil {
			of = known
		}
		f.addLines(a.Line)
		if p := of.Get("protocol").Str(); p != "" && p != f.service.Protocol.String() && !(p == "all" && f.service.Protocol == flow.Any) {
			if len(f.service.Listen) > 0 {
				f.noteMissing(a.Line, "address "+of.Get("name").Str(), "a service has one protocol, "+f.service.Protocol.String(), "make another service for protocol "+p)
				continue
			}
			f.listenKey(draft.Field{Key: "protocol", Value: of.Get("protocol")})
		}
		add(a.Line, of.Get("ip-addr").Str(), of.Get("ports").Str())
	}
}

// portList reads "80,443,8000-8010"; an empty list is all ports.
func portList(s string) (list []flow.Ports, err error) {
	if s == "" || s == "*" || s == "0" {
		return nil, nil
	}
	for _, part := range strings.Split(s, ",") {
		low, high, ranged := strings.Cut(strings.TrimSpace(part), "-")
		if !ranged {
			high = low
		}
		first, err1 := strconv.ParseUint(low, 10, 16)
		last, err2 := strconv.ParseUint(high, 10, 16)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		list = append(list, flow.Ports{First: uint16(first), Last: uint16(last)})
	}
	return list, nil
}

// key reads one key of a farm.
func (f *farm) key(field draft.Field) {
	s, v := &f.service, field.Value
	value, line, text := v.Str(), v.Line, field.Key+": "+v.Str()
	if value == "" && !v.IsArray() && !v.IsObject() || value == "none" {
		return // not set
	}
	switch field.Key {
	case "name", "family", "virtual-addr", "virtual-ports", "protocol", "addresses", "scheduler", "persist-ttl", "log-prefix", "priority", "new-rtlimit-burst",
		"rst-rtlimit-burst", "sched-param":
		f.dependentKey(field.Key, value, line, text)
	case "mode":
		if s.Mode = farmModes[value]; s.Mode == "" {
			f.lost, f.next = "no equivalent for mode "+value, "let the host's own program listen, without a service"
		}
	case "state":
		if value != "up" {
			f.lost, f.next = "the farm is "+value, "add the service when it is needed"
		}
	case "source-addr":
		if a, err := netip.ParseAddr(value); err == nil {
			s.SourcePool = append(s.SourcePool, config.AddressRange{First: a, Last: a})
		}
	case "persistence":
		f.persistence(value, line)
	case "helper":
		s.Helper = config.Helper(value)
	case "mark":
		s.Mark = mark(value)
	case "new-rtlimit":
		f.rate(&s.Limits.NewConnectionsPerClient, value, line, text)
	case "rst-rtlimit":
		f.rate(&s.Limits.ResetRate, value, line, text)
		if value != "0" && !s.Limits.ResetRate.IsZero() {
			f.noteChanged(line, text, "reset-rate limits the resets of all clients together", "")
		}
	case "est-connlimit":
		s.Limits.ConnectionsPerClient, _ = number(value)
	case "tcp-strict":
		s.Limits.StrictTCP = value == "on"
	case "log":
		f.logs = true
		if value != "input" {
			f.noteChanged(line, text, "new connections are logged on arrival", "")
		}
	case "intra-connect":
		f.local = value == "on"
	case "flow-offload":
		if value == "on" {
			f.d.Remark("flowtable: auto, the default, offloads flows of the nftables datapath.")
		}
	case "backends":
		for _, b := range v.List() {
			f.backend(b)
		}
	case "policies":
		for _, p := range v.List() {
			f.policy(p)
		}
	case "sessions":
		for _, session := range v.List() {
			f.session(session)
		}
	default:
		f.noteUnsupported(field.Key, value, line, text)
	}
}

// dependentKey handles keys that belong to another key.
func (f *farm) dependentKey(key, value string, line int, text string) {
	switch key {
	case "sched-param":
		f.param = value
	case "log-prefix":
		f.log.Prefix = value
	case "new-rtlimit-burst", "rst-rtlimit-burst":
		if value != "0" {
			f.noteMissing(line, text, "no equivalent for the burst of a limit: it is five above the rate", "write a higher rate if bursts are refused")
		}
	}
}

// noteUnsupported adds notes about keys without an equivalent, if they are set.
func (f *farm) noteUnsupported(key, value string, line int, text string) {
	switch key {
	case "queue":
		if value != "-1" {
			f.noteMissing(line, text, "no equivalent for queues to programs", "")
		}
	case "verdict", "limits-ttl", "log-rtlimit", "responsettl":
		if value != "0" && value != "120" && value != "log" && value != "" && value != "0/second" {
			f.noteMissing(line, text, "no equivalent", "")
		}
	case "ether-addr", "oface", "iface", "iface-idx", "virtual-ether-addr", "nports", "bcks_available", "bcks_usable", "total_weight", "total_bcks", "used":
	default:
		if !strings.HasSuffix(key, "log-prefix") {
			f.noteMissing(line, text, "not understood", "write the equivalent by hand")
		}
	}
}

func mark(s string) uint32 {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		n, _ = strconv.ParseUint(s, 16, 32)
	}
	return uint32(n)
}

func (f *farm) rate(to *config.Rate, value string, line int, text string) {
	count, unit, _ := strings.Cut(value, "/")
	if count == "0" || count == "" {
		return
	}
	if unit == "" {
		unit = "second"
	}
	if err := to.UnmarshalText([]byte(count + "/" + unit)); err != nil {
		f.noteMissing(line, text, err.Error(), "")
	}
}

func (f *farm) persistence(value string, line int) {
	p := &config.Persistence{Timeout: config.Duration(60e9)}
	for _, word := range strings.Fields(value) {
		key, known := farmKeys[word]
		if !known {
			f.noteMissing(line, "persistence: "+word, "no equivalent for this part of the key", "write persistence: {key: [...]}")
			continue
		}
		p.Key = append(p.Key, key)
	}
	if t, ok := seconds(f.value.Get("persist-ttl").Str()); ok {
		p.Timeout = t
	}
	f.service.Persistence = p
}

// balance sets the scheduler. nftlb selects at random by weight.
func (f *farm) balance() {
	v := f.value.Get("scheduler")
	s := &f.service
	param := strings.Join(strings.Fields(f.param), " ")
	switch v.Str() {
	case "", "rr":
		s.Scheduler = config.SchedulerRR
		if f.hasWeights() {
			s.Scheduler = config.SchedulerWRR
		}
	case "weight":
		s.Scheduler = config.SchedulerRandom
	case "symhash":
		s.Scheduler = config.SchedulerSymmetricHash
	case "hash":
		s.Scheduler = config.SchedulerSourceHash
		if param != "" && param != "srcip" && param != "none" {
			s.Scheduler = config.SchedulerMaglev
		}
		f.noteChanged(v.Line, strings.TrimSpace("scheduler: hash "+param), "clients are spread by another hash, of the addresses and ports alone, and move once", "")
	default:
		f.noteChanged(v.Line, "scheduler: "+v.Str(), "not understood, replaced by rr", "write another scheduler")
	}
	if s.Mode == config.ModeStateless && !s.Scheduler.Hashes() {
		s.Scheduler = config.SchedulerSourceHash
		line := f.value.Line
		if v != nil {
			line = v.Line
		}
		f.noteChanged(line, "scheduler: "+v.Str(), "without state only a hash keeps a client on its backend: source-hash", "")
	}
}

// backend adds a backend.
func (f *farm) backend(v *draft.Value) {
	a, err := netip.ParseAddr(v.Get("ip-addr").Str())
	if err != nil {
		f.d.Lost(v.Line, "backend "+v.Get("name").Str(), "its address is not understood", "write a backend")
		return
	}
	b := config.Backend{Name: v.Get("name").Str(), Address: a.Unmap()}
	for _, field := range v.Fields {
		value, text := field.Value.Str(), field.Key+": "+field.Value.Str()
		switch field.Key {
		case "name", "ip-addr", "ether-addr", "counter", "packets", "bytes":
		case "port":
			port, _ := strconv.ParseUint(value, 10, 16)
			if b.Port = uint16(port); b.Port != 0 {
				b.Port = portFor(&f.service, b.Port)
			}
			if f.service.Protocol == flow.Any {
				b.Port = 0
			}
		case "weight":
			if n, ok := number(value); ok && n > 1 {
				b.Weight = n
			}
		case "priority":
			if n, ok := number(value); ok && n > 1 {
				b.Priority = min(n, 9)
			}
		case "mark":
			b.Mark = mark(value)
		case "est-connlimit":
			b.MaxConnections, _ = number(value)
		case "source-addr":
			if value != "" {
				f.noteMissing(field.Value.Line, text, "no equivalent for the source address of one backend", "make another service with source-pool")
			}
		case "state":
			if value != "up" && value != "available" {
				b.Drain = true
				f.noteChanged(field.Value.Line, text, "a backend that is not up becomes one that drains", "write check:, or sluice backend SERVICE NAME down")
			}
		default:
			if !strings.HasSuffix(field.Key, "log-prefix") {
				f.noteMissing(field.Value.Line, text, "not understood", "write the equivalent by hand")
			}
		}
	}
	f.addLines(v.Line)
	f.service.Backends = append(f.service.Backends, b)
}

// policy adds a list of clients as a denied set.
func (f *farm) policy(v *draft.Value) {
	name := v.Get("name").Str()
	of := f.n.policies[name]
	if of == nil {
		f.noteMissing(v.Line, "policy "+name, "the policy is not in the file", "append the answer of the API to GET /policies, or write firewall: sets:")
		return
	}
	prefixes := []netip.Prefix{}
	for _, e := range of.Get("elements").List() {
		data := e.Get("data").Str()
		if p, err := netip.ParsePrefix(data); err == nil {
			prefixes = append(prefixes, p)
		} else if a, err := netip.ParseAddr(data); err == nil {
			prefixes = append(prefixes, netip.PrefixFrom(a, a.BitLen()))
		} else {
			f.noteMissing(e.Line, data, "the element is not an address or a network", "write it in the set")
		}
	}
	if of.Get("type").Str() == "whitelist" {
		f.noteMissing(v.Line, "policy "+name, "a whitelist of nftlb exempts its clients from later blacklists; allow: would refuse all other clients", "take its addresses out of the sets in deny:")
		return
	}
	f.service.Deny = append(f.service.Deny, f.d.Set(name, prefixes))
}

// session pins a client to a backend.
func (f *farm) session(v *draft.Value) {
	client, backend := v.Get("client").Str(), v.Get("backend").Str()
	if v.Get("expiration").Str() != "" {
		f.d.Implied(v.Line, "session of "+client, "expires")
		return
	}
	p, err := netip.ParsePrefix(client)
	if a, aerr := netip.ParseAddr(client); aerr == nil {
		p, err = netip.PrefixFrom(a, a.BitLen()), nil
	}
	if err != nil {
		f.noteMissing(v.Line, "session of "+client, "a session is for an address or a network", "write sessions:")
		return
	}
	f.service.Sessions = append(f.service.Sessions, config.Session{Client: p, Backend: backend})
}
