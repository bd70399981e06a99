// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// A server behind direct server return answers on the service's address, which it has on a loopback. A probe of its
// own address does not test that. So a probe via the service uses the service's address. An ip rule selects a routing
// table by the probe's mark, and the table contains one route: "service's address via backend".
const (
	// pathMark is the first mark; the marks are also the table numbers.
	pathMark = 0x51ce0000
	// pathRules is the priority of the rules: after the local table (0), before
	// the main one (32766).
	pathRules = 5155
	// maxPaths bounds the backends with probes via their service: the kernel checks the rules for every packet
	// without a cached route.
	maxPaths = 256
)

// paths are the routes of a network namespace to servers behind their service's address. The first probe that needs a
// path creates it in the kernel.
type paths struct {
	mu    sync.Mutex
	marks map[backendKey]uint32
	swept bool // paths of an earlier process were removed
}

// mark returns the mark of a backend and allocates it if necessary.
func (p *paths) mark(k backendKey) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m, ok := p.marks[k]; ok {
		return m, nil
	}
	if p.marks == nil {
		p.marks = map[backendKey]uint32{}
	}
	taken := map[uint32]bool{}
	for _, m := range p.marks {
		taken[m] = true
	}
	for m := uint32(pathMark); m < pathMark+maxPaths; m++ {
		if !taken[m] {
			p.marks[k] = m
			return m, nil
		}
	}
	return 0, fmt.Errorf("more than %d backends are checked via their service; write via: direct", maxPaths)
}

// ensureRoute routes packets with the mark to the address via server, and no other packets. It checks first, because the
// kernel removes the routes of a link that is set down.
func (p *paths) ensureRoute(mark uint32, address, server netip.Addr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.swept {
		if _, err := RemovePaths(); err != nil {
			return inPlainWords(err)
		}
		p.swept = true
	}
	ok, err := isRoutedVia(mark, address, server)
	if ok || err != nil {
		return inPlainWords(err)
	}
	if err := makePath(mark, address, server); err != nil {
		return inPlainWords(err)
	}
	ok, err = isRoutedVia(mark, address, server)
	if err == nil && !ok {
		err = fmt.Errorf("packets to %s with mark %#x do not go to %s", address, mark, server)
	}
	return inPlainWords(err)
}

func inPlainWords(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("check via service: CAP_NET_ADMIN is needed to route its probes: %w", err)
	}
	if err != nil {
		return fmt.Errorf("check via service: %w", err)
	}
	return nil
}

// isRoutedVia reports whether packets with the mark are routed via server. An address of this host is an error, because no
// rule can precede the local table.
func isRoutedVia(mark uint32, address, server netip.Addr) (bool, error) {
	routes, err := netlink.RouteGetWithOptions(address.AsSlice(), &netlink.RouteGetOptions{Mark: mark})
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || len(routes) == 0 {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if routes[0].Type == unix.RTN_LOCAL {
		return false, fmt.Errorf("%s is an address of this host, which its probes cannot leave; write via: direct", address)
	}
	gw, _ := netip.AddrFromSlice(routes[0].Gw)
	return gw.Unmap() == server, nil
}

func makePath(mark uint32, address, server netip.Addr) error {
	on, err := netlink.RouteGet(server.AsSlice())
	if err != nil {
		return fmt.Errorf("route to %s: %w", server, err)
	}
	if len(on) == 0 || on[0].Gw != nil {
		return fmt.Errorf("%s is not on a network of this host, as mode dsr needs it", server)
	}
	if _, err := sweepPaths(func(m uint32) bool { return m == mark }); err != nil {
		return err
	}
	route := &netlink.Route{
		Dst: hostNet(address), Gw: server.AsSlice(), LinkIndex: on[0].LinkIndex,
		Flags: int(netlink.FLAG_ONLINK), Table: int(mark),
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route %s via %s: %w", address, server, err)
	}
	// Without this route a probe would use the main table while the link is down.
	stop := &netlink.Route{Dst: hostNet(address), Type: unix.RTN_UNREACHABLE, Priority: 1 << 20, Table: int(mark)}
	if err := netlink.RouteReplace(stop); err != nil {
		return fmt.Errorf("route unreachable %s: %w", address, err)
	}
	rule := netlink.NewRule()
	rule.Family, rule.Mark, rule.Table, rule.Priority = family(address), mark, int(mark), pathRules
	mask := uint32(0xffffffff)
	rule.Mask = &mask
	if err := netlink.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("rule for mark %#x: %w", mark, err)
	}
	return nil
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// removeUnused removes the paths of backends that are no longer checked.
func (p *paths) removeUnused(wanted func(backendKey) bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var gone []uint32
	for k, m := range p.marks {
		if !wanted(k) {
			gone = append(gone, m)
			delete(p.marks, k)
		}
	}
	if !p.swept || len(gone) == 0 {
		return nil // no path exists in the kernel
	}
	_, err := sweepPaths(func(m uint32) bool { return slices.Contains(gone, m) })
	return err
}

// RemovePaths removes all ip rules and routes of checks via their service from this network namespace, including
// remains of a killed process. It returns the number of removed rules.
func RemovePaths() (rules int, err error) { return sweepPaths(func(uint32) bool { return true }) }

// sweepPaths removes Sluice's rules and tables with chosen marks.
func sweepPaths(chosen func(mark uint32) bool) (n int, err error) {
	var errs []error
	for _, fam := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := netdev.Whole(func() ([]netlink.Rule, error) { return netlink.RuleList(fam) })
		if errors.Is(err, unix.EAFNOSUPPORT) { // ipv6.disable=1
			continue
		}
		if err != nil {
			return n, fmt.Errorf("ip rules: %w", err)
		}
		for i := range rules {
			r := &rules[i]
			if r.Priority != pathRules || r.Mark < pathMark || r.Mark >= pathMark+maxPaths || !chosen(r.Mark) {
				continue
			}
			n++
			if err := netlink.RuleDel(r); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, err)
			}
			errs = append(errs, deleteTableRoutes(fam, int(r.Mark)))
		}
	}
	return n, errors.Join(errs...)
}

func deleteTableRoutes(family, table int) error {
	routes, err := netdev.Whole(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return err
	}
	for i := range routes {
		if err := netlink.RouteDel(&routes[i]); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}
