// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// route is a route of Sluice. The kernel identifies a route of a table by these fields.
type route struct {
	to     netip.Prefix
	metric uint32
}

// routes returns the routes of Sluice at a place. The value is false for a route of another type, which the announcer
// replaces.
func (p routeLocation) routes() (map[route]bool, error) {
	list, err := netdev.Table(p.Table)
	if err != nil {
		return nil, err
	}
	found := map[route]bool{}
	for _, r := range list {
		if r.Protocol == p.Protocol {
			found[route{r.To, r.Metric}] = r.Type == unix.RTN_UNREACHABLE
		}
	}
	return found, nil
}

// removeRoutes removes all routes at a place.
func (p routeLocation) removeRoutes() error {
	routes, err := p.routes()
	if err != nil {
		return err
	}
	var errs []error
	for r := range routes {
		errs = append(errs, p.remove(r))
	}
	return errors.Join(errs...)
}

// add writes a route. No packet uses it, because no routing rule selects its table. If a rule did, the host would
// answer packets with ICMP errors instead of forwarding them to itself.
func (p routeLocation) add(r route) error {
	err := p.request(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, r, unix.RTN_UNREACHABLE)
	if err != nil {
		return fmt.Errorf("route to %s in table %d: %w", r.to, p.Table, err)
	}
	return nil
}

// remove removes a route. A missing one is not an error.
func (p routeLocation) remove(r route) error {
	err := p.request(unix.RTM_DELROUTE, 0, r, unix.RTN_UNSPEC)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("remove the route to %s from table %d: %w", r.to, p.Table, err)
	}
	return nil
}

func (p routeLocation) request(kind, flags int, r route, routeType uint8) error {
	family := uint8(unix.AF_INET)
	if r.to.Addr().Is6() {
		family = unix.AF_INET6
	}
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Dst_len: uint8(r.to.Bits()), Protocol: p.Protocol, Type: routeType, Scope: unix.RT_SCOPE_UNIVERSE}})
	number := func(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
	req.AddData(nl.NewRtAttr(unix.RTA_DST, r.to.Addr().AsSlice()))
	req.AddData(nl.NewRtAttr(unix.RTA_TABLE, number(p.Table)))
	req.AddData(nl.NewRtAttr(unix.RTA_PRIORITY, number(r.metric)))
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// interfaceDown returns why the first unusable interface of a list is unusable, or "".
func interfaceDown(names []string) (string, error) {
	for _, name := range names {
		link, err := netlink.LinkByName(name)
		var missing netlink.LinkNotFoundError
		switch {
		case errors.As(err, &missing):
			return fmt.Sprintf("interface %s does not exist", name), nil
		case err != nil:
			return "", fmt.Errorf("interface %s: %w", name, err)
		case link.Attrs().RawFlags&unix.IFF_UP == 0:
			return fmt.Sprintf("interface %s is down", name), nil
		case link.Attrs().RawFlags&unix.IFF_RUNNING == 0:
			return fmt.Sprintf("interface %s has no carrier", name), nil
		}
	}
	return "", nil
}

// Prefixes returns the fewest prefixes that contain exactly the addresses from first to last.
func Prefixes(first, last netip.Addr) (list []netip.Prefix) {
	for first.IsValid() && !last.Less(first) {
		p := netip.PrefixFrom(first, first.BitLen())
		for p.Bits() > 0 {
			wider := netip.PrefixFrom(first, p.Bits()-1)
			if wider.Masked().Addr() != first || last.Less(lastOf(wider)) {
				break
			}
			p = wider
		}
		list = append(list, p)
		first = lastOf(p).Next()
	}
	return list
}

// lastOf returns the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
