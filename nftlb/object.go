// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"maps"
	"strconv"
	"strings"
)

// action is the pending operation on the rules of an object. A lower action replaces a higher one.
type action int

// Actions of a farm or backend.
const (
	start action = iota
	stop
	flush
	reload
	remove
	none
)

var actions = map[string]action{"start": start, "stop": stop, "flush": flush, "reload": reload, "delete": remove}

// actionOf parses an action.
func actionOf(text string) action {
	if a, is := actions[text]; is {
		return a
	}
	return none
}

// States of farms and backends.
const (
	up          = "up"
	available   = "available" // backends with a better priority are available
	down        = "down"
	off         = "off" // keeps its connections, gets no new ones
	configError = "config_error"
)

// attributes maps keys to values in their printed form. A missing key was never set.
type attributes map[string]string

// Default log prefixes, which are not shown.
const (
	prefixFarm    = "TYPE-FNAME "
	prefixAddress = "TYPE-ANAME "
	prefixLimit   = "KNAME-FNAME "
	prefixBackend = "KNAME-FNAME-BNAME "
	prefixPolicy  = "KNAME-TYPE-PNAME-FNAME "
)

const everyVerdict = "log drop accept"

// farm is a virtual service.
type farm struct {
	Name       string     `json:"name"`
	Attributes attributes `json:"attributes"`
	State      string     `json:"state"`
	Priority   int        `json:"priority"` // Maximum priority of the backends in use.
	Out        link       `json:"out"`      // Interface towards the backends.
	Backends   []*backend `json:"backends"`
	Sessions   []*session `json:"sessions"`

	addresses      []*farmAddress
	policies       []*farmPolicy
	action         action
	policiesAction action
}

var farmDefaults = attributes{
	"mode": "snat", "responsettl": "60", "scheduler": "rr", "sched-param": "none", "persistence": "none", "persist-ttl": "60",
	"helper": "none", "log": "none", "log-prefix": prefixFarm, "log-rtlimit": "0/second", "mark": "0x0", "limits-ttl": "120",
	"new-rtlimit": "0/second", "new-rtlimit-burst": "0", "new-rtlimit-log-prefix": prefixLimit,
	"rst-rtlimit": "0/second", "rst-rtlimit-burst": "0", "rst-rtlimit-log-prefix": prefixLimit,
	"est-connlimit": "0", "est-connlimit-log-prefix": prefixLimit, "tcp-strict": "off", "tcp-strict-log-prefix": prefixLimit,
	"queue": "-1", "verdict": everyVerdict, "flow-offload": "off", "intra-connect": "off",
}

func newFarm(name string) *farm {
	return &farm{Name: name, Attributes: maps.Clone(farmDefaults), State: up, Priority: 1, Out: link{Index: -1}, action: start, policiesAction: none}
}

// ingress reports whether the farm's mode works at the ingress hook, which requires hardware addresses.
func (f *farm) ingress() bool {
	return f.Attributes["mode"] == "dsr" || f.Attributes["mode"] == "stlsdnat"
}

func (f *farm) flowtable() bool { return f.Attributes["flow-offload"] == "on" }

func (f *farm) needsPolicies() bool { return len(f.policies) > 0 || f.policiesAction != none }

func (f *farm) backend(name string) *backend {
	for _, b := range f.Backends {
		if b.Name == name {
			return b
		}
	}
	return nil
}

func (f *farm) address(name string) *farmAddress {
	for _, a := range f.addresses {
		if a.address.Name == name {
			return a
		}
	}
	return nil
}

func (f *farm) policy(name string) *farmPolicy {
	for _, p := range f.policies {
		if p.policy.Name == name {
			return p
		}
	}
	return nil
}

func (f *farm) session(client string) *session {
	for _, s := range f.Sessions {
		if s.Client == client {
			return s
		}
	}
	return nil
}

// backend is a real server of a farm.
type backend struct {
	Name       string     `json:"name"`
	Attributes attributes `json:"attributes"`
	State      string     `json:"state"`
	Mark       int        `json:"mark"`
	Chosen     bool       `json:"chosen"` // The client chose the mark.
	Ether      string     `json:"ether"`  // Hardware address, if known.

	farm   *farm
	action action
}

var backendDefaults = attributes{
	"port": "", "weight": "1", "priority": "1", "est-connlimit": "0", "est-connlimit-log-prefix": prefixBackend,
}

func newBackend(f *farm, name string, mark int) *backend {
	return &backend{Name: name, Attributes: maps.Clone(backendDefaults), State: configError, Mark: mark, farm: f, action: start}
}

// isComplete reports whether all properties of the backend that the farm's mode requires are known.
func (b *backend) isComplete() bool {
	return (!b.farm.ingress() || b.Ether != "") && b.Attributes["ip-addr"] != ""
}

func (b *backend) priority() int { return integer(b.Attributes["priority"]) }

func (b *backend) belowPriority() bool { return b.priority() <= b.farm.Priority }

func (b *backend) isAvailable() bool { return b.isComplete() && b.State == up && b.belowPriority() }

// masquerade is the mark of connections with a translated source address.
const masquerade = 0x80000000

// fullMark returns the backend's mark combined with the farm's.
func (b *backend) fullMark() uint32 {
	f := b.farm
	mark := uint32(b.Mark) | uint32(leadingNumber(f.Attributes["mark"], 16))
	mode := f.Attributes["mode"]
	if b.Attributes["source-addr"] == "" && f.Attributes["source-addr"] == "" && (mode == "snat" || mode == "local") {
		mark |= masquerade
	}
	return mark
}

// session pins a client to a backend.
type session struct {
	Client  string `json:"client"`
	Backend string `json:"backend"` // "" for none

	backend *backend
}

// address is a virtual address with its ports.
type address struct {
	Name       string     `json:"name"`
	Attributes attributes `json:"attributes"`
	In         link       `json:"in"`   // Interface with the address.
	Used       int        `json:"used"` // Number of farms that use it.

	policies []*addressPolicy
	action   action
}

var addressDefaults = attributes{
	"family": "ipv4", "ip-addr": "", "ports": "", "protocol": "tcp", "verdict": everyVerdict, "log-prefix": prefixAddress, "log-rtlimit": "0/second",
}

func newAddress(name string) *address {
	return &address{Name: name, Attributes: maps.Clone(addressDefaults), In: link{Index: -1}, action: start}
}

// policy is a list of sources.
type policy struct {
	Name       string     `json:"name"`
	Attributes attributes `json:"attributes"`
	Used       int        `json:"used"` // number of farms and addresses that use it
	Elements   ranges     `json:"elements"`

	pending []element
	action  action
}

var policyDefaults = attributes{"family": "ipv4", "type": "blacklist", "route": "in", "timeout": "0", "log-prefix": prefixPolicy}

func newPolicy(name string) *policy {
	return &policy{Name: name, Attributes: maps.Clone(policyDefaults), action: start}
}

// element is a part of a list with its pending operation.
type element struct {
	data   string
	action action
}

// farmAddress is an address of a farm.
type farmAddress struct {
	farm    *farm
	address *address
	action  action
}

// farmPolicy is a list that a farm uses.
type farmPolicy struct {
	farm   *farm
	policy *policy
	action action
}

// addressPolicy is a list that an address uses.
type addressPolicy struct {
	policy *policy
	action action
}

// member is one key of an object with its value.
type member struct {
	key   string
	value any // string or []object
}

type object []member

// print returns the farm as shown to clients.
func (f *farm) print() object {
	o := object{{"name", f.Name}}
	add := func(keys ...string) {
		for _, k := range keys {
			o = append(o, member{k, f.Attributes[k]})
		}
	}
	var first *address
	if len(f.addresses) > 0 {
		first = f.addresses[0].address
		o = append(o, member{"family", first.Attributes["family"]}, member{"virtual-addr", first.Attributes["ip-addr"]}, member{"virtual-ports", first.Attributes["ports"]})
	}
	add("source-addr", "mode")
	if f.Attributes["mode"] == "stlsdnat" {
		add("responsettl")
	}
	if first != nil {
		o = append(o, member{"protocol", first.Attributes["protocol"]})
	}
	add("scheduler", "sched-param", "persistence", "persist-ttl", "helper", "log")
	o = f.logPrefix(o, "log-prefix")
	add("log-rtlimit", "mark")
	o = append(o, member{"priority", strconv.Itoa(f.Priority)}, member{"state", f.State})
	add("limits-ttl", "new-rtlimit", "new-rtlimit-burst")
	o = f.logPrefix(o, "new-rtlimit-log-prefix")
	// nftlb prints this rate with the unit of the other one.
	_, unit, _ := strings.Cut(f.Attributes["new-rtlimit"], "/")
	count, _, _ := strings.Cut(f.Attributes["rst-rtlimit"], "/")
	o = append(o, member{"rst-rtlimit", count + "/" + unit})
	add("rst-rtlimit-burst")
	o = f.logPrefix(o, "rst-rtlimit-log-prefix")
	add("est-connlimit")
	o = f.logPrefix(o, "est-connlimit-log-prefix")
	add("tcp-strict")
	o = f.logPrefix(o, "tcp-strict-log-prefix")
	add("queue", "verdict")
	for _, k := range []string{"flow-offload", "intra-connect"} {
		if f.Attributes[k] == "on" {
			add(k)
		}
	}
	return append(o, f.lists()...)
}

func (f *farm) logPrefix(o object, key string) object {
	if v := f.Attributes[key]; v != farmDefaults[key] {
		o = append(o, member{key, v})
	}
	return o
}

func (f *farm) lists() object {
	addresses, backends, policies := []object{}, []object{}, []object{}
	for _, fa := range f.addresses {
		addresses = append(addresses, fa.address.printShort())
	}
	for _, b := range f.Backends {
		backends = append(backends, b.print())
	}
	for _, p := range f.policies {
		policies = append(policies, object{{"name", p.policy.Name}})
	}
	o := object{{"addresses", addresses}, {"backends", backends}, {"policies", policies}}
	if len(f.Sessions) > 0 {
		o = append(o, member{"sessions", f.printSessions()})
	}
	return o
}

func (f *farm) printSessions() []object {
	list := []object{}
	for _, s := range f.Sessions {
		name := "UNDEFINED"
		if s.backend != nil {
			name = s.backend.Name
		}
		list = append(list, object{{"client", s.Client}, {"backend", name}})
	}
	return list
}

func (b *backend) print() object {
	o := object{{"name", b.Name}}
	for _, k := range []string{"ip-addr", "port", "source-addr", "weight", "priority"} {
		if v, set := b.Attributes[k]; set {
			o = append(o, member{k, v})
		}
	}
	o = append(o, member{"mark", markText(b.Mark)}, member{"est-connlimit", b.Attributes["est-connlimit"]})
	if v := b.Attributes["est-connlimit-log-prefix"]; v != prefixBackend {
		o = append(o, member{"est-connlimit-log-prefix", v})
	}
	return append(o, member{"state", b.State})
}

// printShort returns the address as shown in a farm.
func (a *address) printShort() object {
	o := object{{"name", a.Name}}
	for _, k := range []string{"family", "ip-addr", "ports", "protocol"} {
		o = append(o, member{k, a.Attributes[k]})
	}
	return append(o, member{"used", strconv.Itoa(a.Used)})
}

func (a *address) print() object {
	short := a.printShort()
	used := short[len(short)-1]
	o := append(short[:len(short)-1:len(short)-1], member{"verdict", a.Attributes["verdict"]})
	if v := a.Attributes["log-prefix"]; v != prefixAddress {
		o = append(o, member{"log-prefix", v})
	}
	policies := []object{}
	for _, p := range a.policies {
		policies = append(policies, object{{"name", p.policy.Name}})
	}
	return append(o, member{"log-rtlimit", a.Attributes["log-rtlimit"]}, used, member{"policies", policies})
}

func (p *policy) print() object {
	o := object{{"name", p.Name}}
	for _, k := range []string{"family", "type", "route", "timeout"} {
		o = append(o, member{k, p.Attributes[k]})
	}
	if v := p.Attributes["log-prefix"]; v != prefixPolicy {
		o = append(o, member{"log-prefix", v})
	}
	elements := []object{}
	for _, e := range p.Elements {
		elements = append(elements, object{{"data", e.String()}, {"counter-packets", "0"}, {"counter-bytes", "0"}})
	}
	return append(o, member{"used", strconv.Itoa(p.Used)}, member{"elements", elements})
}
