// SPDX-License-Identifier: Apache-2.0

package uplink

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// Rules and tables of Sluice. Number identifies both: other programs leave routes and rules of an unknown protocol
// alone, and Sluice removes only its own.
const (
	Number = 77 // protocol of the routes and rules (RTPROT)
	// FirstTable is the table of the first uplink of the configuration.
	FirstTable = 5201
	maxUplinks = 16
	// The rules precede the rule for the main table, 32766, and follow rules of other programs, such as VPNs.
	specificRule = 32500 // main table without its default routes
	markRule     = 32501 // packets that nftables has assigned to an uplink
	sourceRule   = 32502 // packets with an address of an uplink
	otherRule    = 32503 // packets of the host itself without an address
	// lastMetric is the metric of the route that ends each table. Without it, packets for an uplink without a next hop
	// would take the default route of the main table.
	lastMetric = 1 << 30
)

// families in the order of datapath.FamilyIndex.
var families = [2]int{unix.AF_INET, unix.AF_INET6}

// rule is a routing rule of Sluice.
type rule struct {
	family   int // index in families
	priority int
	mark     uint32
	from     netip.Prefix
	table    int
}

func (r rule) String() string {
	text := fmt.Sprintf("rule %d:", r.priority)
	if r.family == 1 {
		text = fmt.Sprintf("IPv6 rule %d:", r.priority)
	}
	switch {
	case r.mark != 0:
		text += fmt.Sprintf(" fwmark %#x/%#x", r.mark, config.UplinkMarks)
	case r.from.IsValid():
		text += fmt.Sprintf(" from %s", r.from)
	}
	if r.table == unix.RT_TABLE_MAIN {
		return text + " lookup main suppress_prefixlength 0"
	}
	return text + fmt.Sprintf(" lookup %d", r.table)
}

func (r rule) kernel() *netlink.Rule {
	k := netlink.NewRule()
	k.Family, k.Priority, k.Table, k.Protocol, k.Mark = families[r.family], r.priority, r.table, Number, r.mark
	if r.mark != 0 {
		mask := uint32(config.UplinkMarks)
		k.Mask = &mask
	}
	if r.from.IsValid() {
		k.Src = ipNet(r.from)
	}
	if r.priority == specificRule {
		k.SuppressPrefixlen = 0
	}
	return k
}

// hop is the next hop of an uplink in one family.
type hop struct {
	gateway netip.Addr // invalid on a point-to-point link
	source  netip.Addr // source address in the route; invalid if the kernel chooses it
	onlink  bool       // The gateway is outside the networks of the interface.
}

// route is a default route in the table of an uplink. ifindex 0 means the route that ends the table.
type route struct {
	family  int
	table   int
	ifindex int
	hop
}

func (r route) String() string {
	to := "default"
	if r.family == 1 {
		to = "IPv6 default"
	}
	switch {
	case r.ifindex == 0:
		return fmt.Sprintf("unreachable %s in table %d", to, r.table)
	case r.gateway.IsValid():
		to += " via " + r.gateway.String()
	}
	return fmt.Sprintf("%s dev %s in table %d", to, interfaceName(r.ifindex), r.table)
}

// interfaceName returns the name of an interface, or its index if it is gone.
func interfaceName(index int) string {
	if l, err := netlink.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("index %d", index)
}

func (r route) kernel() *netlink.Route {
	k := &netlink.Route{Family: families[r.family], Table: r.table, Protocol: Number, LinkIndex: r.ifindex}
	k.Dst = ipNet(unspecified(r.family))
	if r.ifindex == 0 {
		k.Type, k.Priority = unix.RTN_UNREACHABLE, lastMetric
		return k
	}
	if r.family == 1 {
		k.Priority = 1 // the kernel replaces metric 0 by 1024
	}
	if r.source.IsValid() {
		k.Src = r.source.AsSlice()
	}
	if !r.gateway.IsValid() {
		k.Scope = unix.RT_SCOPE_LINK
		return k
	}
	k.Gw = r.gateway.AsSlice()
	if r.onlink {
		k.Flags = int(netlink.FLAG_ONLINK)
	}
	return k
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// hostState is the part of the host that concerns uplinks.
type hostState struct {
	rules    map[rule]bool
	routes   map[route]bool
	defaults map[int][2]*defaultRoute // by interface; nil without a default route
}

// defaultRoute is the best default route by an interface in the main table.
type defaultRoute struct {
	hop
	metric int
}

// readHost reads the rules, and the routes of all tables in one dump for each family.
func readHost() (*hostState, error) {
	h := &hostState{rules: map[rule]bool{}, routes: map[route]bool{}, defaults: map[int][2]*defaultRoute{}}
	for f, family := range families {
		rules, err := netdev.Whole(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
			return nil, fmt.Errorf("routing rules: %w", err)
		}
		for _, k := range rules {
			if k.Protocol == Number && k.Priority >= specificRule && k.Priority <= otherRule {
				r := rule{family: f, priority: k.Priority, mark: k.Mark, table: k.Table}
				if k.Src != nil {
					r.from = prefixOf(*k.Src)
				}
				h.rules[r] = true
			}
		}
		routes, err := netdev.Whole(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Dst: ipNet(unspecified(f))}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		})
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
			return nil, fmt.Errorf("routes: %w", err)
		}
		for i := range routes {
			h.note(f, &routes[i])
		}
	}
	return h, nil
}

func unspecified(family int) netip.Prefix {
	if family == 1 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func prefixOf(n net.IPNet) netip.Prefix {
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), bits)
}

// note records a default route.
func (h *hostState) note(family int, k *netlink.Route) {
	var at hop
	if a, ok := netip.AddrFromSlice(k.Gw); ok && !k.Gw.IsUnspecified() {
		at.gateway = a.Unmap()
	}
	if a, ok := netip.AddrFromSlice(k.Src); ok {
		at.source = a.Unmap()
	}
	at.onlink = k.Flags&int(netlink.FLAG_ONLINK) != 0
	switch {
	case k.Protocol == Number && k.Table >= FirstTable && k.Table < FirstTable+maxUplinks:
		r := route{family: family, table: k.Table, ifindex: k.LinkIndex, hop: at}
		if k.Type == unix.RTN_UNREACHABLE {
			r.ifindex = 0 // IPv6 names the loopback
		}
		h.routes[r] = true
	case k.Table == unix.RT_TABLE_MAIN && k.Type == unix.RTN_UNICAST && k.LinkIndex > 0:
		best := h.defaults[k.LinkIndex]
		if best[family] == nil || k.Priority < best[family].metric {
			best[family] = &defaultRoute{at, k.Priority}
			h.defaults[k.LinkIndex] = best
		}
	}
}

// addressed is an address of an uplink's interface with its network.
type addressed struct {
	address netip.Addr
	network netip.Prefix
}

// link is the interface of an uplink.
type link struct {
	index        int
	down         string // why it is unusable; "" if it is up
	pointToPoint bool
	addresses    []addressed
}

// readLink reads an interface with the addresses that other hosts can reply to.
func readLink(name string) (l link, err error) {
	k, err := netlink.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return link{down: fmt.Sprintf("interface %s does not exist", name)}, nil
	}
	if err != nil {
		return l, fmt.Errorf("interface %s: %w", name, err)
	}
	a := k.Attrs()
	l.index, l.pointToPoint = a.Index, a.RawFlags&unix.IFF_POINTOPOINT != 0
	switch {
	case a.RawFlags&unix.IFF_UP == 0:
		l.down = fmt.Sprintf("interface %s is down", name)
	case a.RawFlags&unix.IFF_RUNNING == 0:
		l.down = fmt.Sprintf("interface %s has no carrier", name)
	}
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(k, netlink.FAMILY_ALL) })
	if err != nil {
		return l, fmt.Errorf("addresses of %s: %w", name, err)
	}
	for _, at := range list {
		own, ok := netip.AddrFromSlice(at.IP)
		if own = own.Unmap(); !ok || at.Scope >= unix.RT_SCOPE_LINK || own.IsLinkLocalUnicast() || at.Flags&unix.IFA_F_DADFAILED != 0 ||
			at.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC) == unix.IFA_F_TENTATIVE {
			continue
		}
		network, ok := netdev.Network(at)
		if !ok || !network.Contains(own) { // the network of the peer of a point-to-point link
			network = netip.PrefixFrom(own, own.BitLen())
		}
		l.addresses = append(l.addresses, addressed{own, network})
	}
	return l, nil
}

// difference is a change of the host's rules and routes.
type difference struct {
	addRoutes, delRoutes []route
	addRules, delRules   []rule
}

// compare returns the change from the present state to the wanted rules and routes.
func (h *hostState) compare(rules []rule, routes []route) (d difference) {
	for _, r := range rules {
		if !h.rules[r] {
			d.addRules = append(d.addRules, r)
		}
	}
	for _, r := range routes {
		if !h.routes[r] {
			d.addRoutes = append(d.addRoutes, r)
		}
	}
	for r := range h.rules {
		if !slices.Contains(rules, r) {
			d.delRules = append(d.delRules, r)
		}
	}
	for r := range h.routes {
		if !slices.Contains(routes, r) {
			d.delRoutes = append(d.delRoutes, r)
		}
	}
	slices.SortFunc(d.delRules, func(a, b rule) int { return cmp.Compare(a.String(), b.String()) })
	slices.SortFunc(d.delRoutes, func(a, b route) int { return cmp.Compare(a.String(), b.String()) })
	return d
}

// write makes the change. Routes precede the rules that select them.
func (d *difference) write() error {
	var errs []error
	for _, r := range d.addRoutes {
		if err := netlink.RouteReplace(r.kernel()); err != nil {
			errs = append(errs, fmt.Errorf("route %s: %w", r, err))
		}
	}
	for _, r := range d.addRules {
		if err := netlink.RuleAdd(r.kernel()); err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("%s: %w", r, err))
		}
	}
	for _, r := range d.delRules {
		if err := netlink.RuleDel(r.kernel()); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove %s: %w", r, err))
		}
	}
	for _, r := range d.delRoutes {
		if err := netlink.RouteDel(r.kernel()); err != nil && !errors.Is(err, unix.ESRCH) { // a replaced route is gone
			errs = append(errs, fmt.Errorf("remove route %s: %w", r, err))
		}
	}
	return errors.Join(errs...)
}

// Left reports whether an earlier process has left rules or routes.
func Left() (bool, error) {
	h, err := readHost()
	return err == nil && len(h.rules)+len(h.routes) > 0, err
}

// Remove removes the rules and routes of an earlier process.
func Remove() error {
	h, err := readHost()
	if err != nil {
		return err
	}
	d := h.compare(nil, nil)
	return d.write()
}
