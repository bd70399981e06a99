// SPDX-License-Identifier: Apache-2.0

// Package compile turns a snapshot into the nf_tables ruleset that implements it. It is pure: the
// state of the host is the argument Env.
//
// The cost of a packet does not depend on the number of services. A base chain looks up the
// destination in a verdict map: @services for single ports, @services-ranges for ranges and whole
// addresses. The verdict leads to the service's chain, which picks a slot by a counter, a random
// number or a hash. A map from slots to backends then gives the backend. A change of a backend's
// state edits elements of that map.
package compile

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Env is the state of the host that the compiler depends on.
type Env struct {
	// Interfaces are the host's interfaces without the loopback.
	Interfaces []Interface
	// Route returns the interface of a directly connected address. Only dsr services use it.
	Route func(netip.Addr) (Interface, error)
	// Networks are the directly connected networks of the host.
	Networks []netip.Prefix
	// Sources are the source addresses in default routes (src) that differ from the address of the
	// kernel's masquerade.
	Sources []RouteSource
	// Address returns the first global address of an interface in a family.
	Address func(iface string, v6 bool) (netip.Addr, bool)
	// Flowtable is true if established flows are offloaded to a flowtable.
	Flowtable bool
	// Defragments is true if the kernel reassembles fragments without connection tracking where a
	// rule requests it (tproxy).
	Defragments bool
	// FIB is true if rules can look up the type of an address.
	FIB bool
	// Timeouts is true if the kernel supports timeouts per connection.
	Timeouts bool
}

// Interface is an interface of the host.
type Interface struct {
	Name  string
	Index int
	MAC   config.MAC
	// Bare4 and Bare6 are true if the interface has no address of the family that other hosts can
	// reply to.
	Bare4, Bare6 bool
}

// RouteSource is the source address in a default route. Packets to the networks of the interface
// use its own address there.
type RouteSource struct {
	Interface string
	Address   netip.Addr
	Networks  []netip.Prefix
}

// Result is a compiled snapshot. The next Compile takes it and reuses the fragments of unchanged
// services.
type Result struct {
	Ruleset *rs.Ruleset
	// Services in the order of the snapshot.
	Services []*Service
	at       map[string]int // index in Services by name
	base     *base
	peers    *peers
	ids      *numbers
	from     source
}

// Service returns the compiled service with a name, or nil.
func (r *Result) Service(name string) *Service {
	if i, ok := r.at[name]; ok {
		return r.Services[i]
	}
	return nil
}

// Service is a compiled service.
type Service struct {
	Name     string
	Fragment *rs.Fragment
	// Slots has the key of the backend of each slot, by family.
	Slots     map[rs.Family][]string
	SlotCount int // slots of all families

	source config.Service // a copy, so that the whole configuration can be freed
	state  []datapath.State
	weight []int // by backend index of datapath.Service
	id     uint32
	uses   []rs.ID // Shared sets that the fragment has elements in.
	routed bool    // Depends on routes, and is compiled each time.
	marks  []uint32
	// unreached lists the backends without a route, as messages.
	unreached []string
	reply     []replyKey
	// members of shared sets
	members []rs.Element
}

// isCurrent reports whether the compiled service still matches the snapshot.
func (s *Service) isCurrent(svc *datapath.Service) bool {
	return !s.routed && slices.Equal(s.state, svc.State) && slices.Equal(s.weight, svc.Weights) && s.source.Equal(svc.Service)
}

// Unreached returns a message for each backend of mode dsr that gets no connections because it has
// no route.
func (r *Result) Unreached() (out []string) {
	for _, s := range r.Services {
		out = append(out, s.unreached...)
	}
	return out
}

// Compile returns the ruleset of a snapshot. The previous result saves work and does not change the
// outcome; it may be nil.
func Compile(s *datapath.Snapshot, env Env, previous *Result) (*Result, error) {
	configured := s
	if env.Address != nil {
		s = datapath.Resolve(s, env.Address)
	}
	c := &compiler{configured: configured, snapshot: s, resolved: s != configured, env: env, sets: s.Config.Firewall.Sets}
	if r, err := c.amend(previous); r != nil || err != nil {
		return r, err
	}
	r := &Result{Services: make([]*Service, len(s.Services)), at: make(map[string]int, len(s.Services)), from: c.source()}
	ids := numbersAfter(previous, s.Services)
	fragments := make([]*rs.Fragment, firstService, firstService+len(s.Services)+len(s.NAT))
	b := newBase()
	setsChanged := previous == nil || !sameSets(previous.base.lists, c.sets)
	for i := range s.Services {
		svc := s.Services[i]
		var compiled *Service
		if previous != nil {
			compiled = previous.Service(svc.Name)
		}
		if compiled == nil || compiled.id != ids.of[svc.Name] || setsChanged && len(svc.Allow)+len(svc.Deny) > 0 || !compiled.isCurrent(&s.Services[i]) {
			var err error
			if compiled, err = c.service(i, ids.of[svc.Name]); err != nil {
				return nil, fmt.Errorf("service %s: %w", svc.Name, err)
			}
		}
		r.Services[i], r.at[svc.Name] = compiled, i
		fragments = append(fragments, compiled.Fragment)
		if err := b.add(compiled); err != nil {
			return nil, err
		}
	}
	rules := slices.Clone(s.NAT)
	slices.SortStableFunc(rules, staticFirst)
	for _, rule := range rules {
		compiled, err := c.nat(rule, b)
		if err != nil {
			return nil, fmt.Errorf("nat %s: %w", rule.Name, err)
		}
		fragments = append(fragments, compiled.Fragment)
		if err := b.add(compiled); err != nil {
			return nil, err
		}
	}
	if err := c.firewall(b); err != nil {
		return nil, err
	}
	if err := c.checkReplies(b); err != nil {
		return nil, err
	}
	c.flowtable(b)
	c.timeouts(b)
	p := c.listenersAndServers(previous, b)
	fragments[0], fragments[1], fragments[2] = c.sharedBase(b, p), p.fragment, p.servers
	if previous != nil && sameFragment(previous.Ruleset.Fragments[0], fragments[0]) {
		fragments[0] = previous.Ruleset.Fragments[0]
	}
	b.lists = c.sets
	r.Ruleset, r.base, r.peers, r.ids = &rs.Ruleset{Fragments: fragments}, b, p, ids
	return r, nil
}

type compiler struct {
	configured *datapath.Snapshot // Listeners as configured.
	snapshot   *datapath.Snapshot // Listeners with resolved addresses.
	resolved   bool               // The two differ.
	env        Env
	sets       map[string][]netip.Prefix
}

func sameSets(a, b map[string][]netip.Prefix) bool {
	if len(a) != len(b) {
		return false
	}
	for name, list := range a {
		other, ok := b[name]
		if !ok || !slices.Equal(list, other) {
			return false
		}
	}
	return true
}

// sameFragment reports whether two shared fragments are equal.
func sameFragment(a, b *rs.Fragment) bool {
	return slices.Equal(a.Elements, b.Elements) &&
		slices.EqualFunc(a.Sets, b.Sets, func(x, y *rs.Set) bool { return x.Equal(y) }) &&
		slices.EqualFunc(a.Objects, b.Objects, (*rs.Object).Equal) &&
		slices.EqualFunc(a.Chains, b.Chains, func(x, y *rs.Chain) bool {
			return x.ID == y.ID && (x.Hook == nil) == (y.Hook == nil) && (x.Hook == nil || *x.Hook == *y.Hook) &&
				slices.EqualFunc(x.Rules, y.Rules, rs.Rule.Equal)
		})
}

// numbers assigns a first slot number to each service.
type numbers struct {
	of    map[string]uint32
	order []claim // ordered by their first number
}

// claim is the number that a service would have without other services.
type claim struct {
	name  string
	first uint32
}

func (c claim) compare(o claim) int {
	return cmp.Or(cmp.Compare(c.first, o.first), cmp.Compare(c.name, o.name))
}

// numbersAfter returns the numbers of the services. The previous numbers are kept if the services
// are the same and all slots fit.
func numbersAfter(previous *Result, services []datapath.Service) *numbers {
	if previous == nil || len(previous.ids.of) != len(services) {
		return newNumbers(services)
	}
	for _, s := range services {
		if was := previous.Service(s.Name); was == nil || !was.source.Is(s.Service) && !previous.ids.keepsNumbers(&was.source, s.Service) {
			return newNumbers(services)
		}
	}
	return previous.ids
}

// newNumbers assigns the first slot number of each service: a hash of the name, so that it does not
// depend on other services. If the slots of two services would overlap, the later one by hash and
// name moves up.
func newNumbers(services []datapath.Service) *numbers {
	n := &numbers{make(map[string]uint32, len(services)), make([]claim, len(services))}
	counts := make(map[string]int, len(services))
	for i, s := range services {
		// Half of the range is left free, so that no service moves up past the end.
		n.order[i] = claim{s.Name, number(s.Name)>>1 + 1}
		counts[s.Name] = capacity(s.Service)
	}
	slices.SortFunc(n.order, claim.compare)
	free := uint32(0)
	for _, c := range n.order {
		first := max(c.first, free)
		n.of[c.name], free = first, first+uint32(counts[c.name])
	}
	return n
}

// keepsNumbers reports whether all services keep their numbers if one service changes. The service must
// have an unchanged number of slots, or its slots must end before the next service. The next
// service must also have its preferred number.
func (n *numbers) keepsNumbers(was, is *config.Service) bool {
	count := capacity(is)
	if capacity(was) == count {
		return true
	}
	i, _ := slices.BinarySearchFunc(n.order, claim{is.Name, number(is.Name)>>1 + 1}, claim.compare)
	if i+1 >= len(n.order) {
		return true
	}
	next := n.order[i+1]
	return n.of[next.name] == next.first && n.of[is.Name]+uint32(count) <= next.first
}

// number hashes a name to 32 bits.
func number(name string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(name))
	return h.Sum32()
}

// identifier converts a name to nft's grammar: letters, digits, "-", "_", "." and "/". A hash keeps
// names distinct if characters were replaced.
func identifier(name string) string {
	ok := true
	clean := []byte(name)
	for i, b := range clean {
		if b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '-' || b == '_' || b == '.' {
			continue
		}
		clean[i], ok = '_', false
	}
	if len(clean) > 48 {
		clean, ok = clean[:48], false
	}
	if ok {
		return name
	}
	return fmt.Sprintf("%s-%08x", clean, number(name))
}

func familyOf(a netip.Addr) rs.Family {
	if a.Is4() {
		return rs.IP
	}
	return rs.IP6
}

func addrType(f rs.Family) rs.Type {
	if f == rs.IP6 {
		return rs.IPv6Addr
	}
	return rs.IPv4Addr
}
