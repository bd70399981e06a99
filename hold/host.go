// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Protocol marks the held addresses in the kernel (IFA_PROTO, Linux 5.18; older kernels ignore it). "ip -d address"
// shows "proto 0x4c".
const Protocol = 76

const ifaProto = 11 // IFA_PROTO of linux/if_addr.h

// address is an address of an interface.
type address struct {
	at     netip.Addr
	bits   int
	index  int
	scope  uint8
	proto  uint8
	failed bool // the kernel's duplicate address detection found another station
}

// key is an address on an interface.
type key struct {
	ifindex int
	at      netip.Addr
}

// probeInterface is an interface that can send probes.
type probeInterface struct {
	ifindex int
	name    string
	mac     net.HardwareAddr
}

// host is the calling thread's network namespace.
type host struct {
	addresses []address
	stations  map[int]probeInterface // Interfaces with ARP and neighbour discovery.
	macs      map[string]bool        // Hardware addresses of all interfaces.
	view
}

// readHost reads the state of the host. Addresses in recorded do not count as the host's own.
func readHost(recorded map[key]bool) (*host, error) {
	h := &host{stations: map[int]probeInterface{}, macs: map[string]bool{}, view: view{own: map[netip.Addr]string{}}}
	links, err := netdev.Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	names, carrier := map[int]string{}, map[int]bool{}
	for _, l := range links {
		a := l.Attrs()
		names[a.Index] = a.Name
		h.macs[string(a.HardwareAddr)] = true
		carrier[a.Index] = a.RawFlags&unix.IFF_RUNNING != 0
		if a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&(unix.IFF_LOOPBACK|unix.IFF_NOARP|unix.IFF_POINTOPOINT) == 0 && len(a.HardwareAddr) == 6 {
			h.stations[a.Index] = probeInterface{a.Index, a.Name, a.HardwareAddr}
		}
	}
	if h.addresses, err = readAddresses(); err != nil {
		return nil, err
	}
	for _, a := range h.addresses {
		if recorded[key{a.index, a.at}] && a.mayBeOurs() {
			continue
		}
		h.own[a.at] = names[a.index]
		s, asks := h.stations[a.index]
		if asks && a.bits < a.at.BitLen() && !a.at.IsLinkLocalUnicast() {
			h.networks = append(h.networks, network{netip.PrefixFrom(a.at, a.bits).Masked(), a.index, s.name, carrier[a.index]})
		}
	}
	return h, h.readRoutes(carrier)
}

// readRoutes adds the networks that are connected by a route only, and the prefixes of local routes.
func (h *host) readRoutes(carrier map[int]bool) error {
	for _, table := range []int{unix.RT_TABLE_MAIN, unix.RT_TABLE_LOCAL} {
		routes, err := netdev.Whole(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(unix.AF_INET, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return fmt.Errorf("routes: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			a, ok := netip.AddrFromSlice(r.Dst.IP)
			ones, _ := r.Dst.Mask.Size()
			p := netip.PrefixFrom(a.Unmap(), ones)
			switch {
			case !ok || a.IsLoopback():
			case table == unix.RT_TABLE_LOCAL && r.Type == unix.RTN_LOCAL && ones < 32:
				h.local = append(h.local, p)
			case table == unix.RT_TABLE_MAIN && r.Type == unix.RTN_UNICAST && r.Scope == netlink.SCOPE_LINK && ones > 0:
				if s, asks := h.stations[r.LinkIndex]; asks {
					h.networks = append(h.networks, network{p, s.ifindex, s.name, carrier[s.ifindex]})
				}
			}
		}
	}
	return nil
}

// mayBeOurs reports whether Sluice may have added the address. It is a host address, and has the mark if the kernel
// supports it.
func (a address) mayBeOurs() bool {
	return a.bits == a.at.BitLen() && (a.proto == Protocol || a.proto == 0)
}

// readAddresses returns the addresses with their marks, which the netlink library does not read.
func readAddresses() ([]address, error) {
	return netdev.Whole(func() ([]address, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("addresses: %w", err)
		}
		var list []address
		for _, m := range messages {
			if a, ok := parseAddress(m); ok {
				list = append(list, a)
			}
		}
		return list, err
	})
}

func parseAddress(m []byte) (a address, ok bool) {
	if len(m) < unix.SizeofIfAddrmsg {
		return a, false
	}
	head := nl.DeserializeIfAddrmsg(m)
	a.bits, a.index, a.scope = int(head.Prefixlen), int(head.Index), head.Scope
	flags := uint32(head.Flags)
	attributes, err := nl.ParseRouteAttr(m[head.Len():])
	if err != nil {
		return a, false
	}
	for _, attribute := range attributes {
		switch attribute.Attr.Type {
		case unix.IFA_LOCAL:
			a.at, _ = netip.AddrFromSlice(attribute.Value)
		case unix.IFA_ADDRESS: // with IFA_LOCAL present, this is the peer's address of a point-to-point link
			if !a.at.IsValid() {
				a.at, _ = netip.AddrFromSlice(attribute.Value)
			}
		case unix.IFA_FLAGS:
			flags = binary.NativeEndian.Uint32(attribute.Value)
		case ifaProto:
			a.proto = attribute.Value[0]
		}
	}
	a.failed = flags&unix.IFA_F_DADFAILED != 0
	return a, a.at.IsValid()
}

// add adds an address to an interface such that the kernel never selects it as a source: IPv4 with link scope, IPv6
// as deprecated (RFC 6724 §5, rule 3). The caller has checked for duplicates.
func add(k key) error {
	family := unix.AF_INET6
	if k.at.Is4() {
		family = unix.AF_INET
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(header(k, family))
	flags := uint32(unix.IFA_F_NOPREFIXROUTE)
	if family == unix.AF_INET6 {
		flags |= unix.IFA_F_NODAD
		life := nl.IfaCacheInfo{IfaCacheinfo: unix.IfaCacheinfo{Valid: math.MaxUint32}}
		request.AddData(nl.NewRtAttr(unix.IFA_CACHEINFO, life.Serialize()))
	}
	request.AddData(nl.NewRtAttr(unix.IFA_LOCAL, k.at.AsSlice()))
	request.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, k.at.AsSlice()))
	request.AddData(nl.NewRtAttr(unix.IFA_FLAGS, binary.NativeEndian.AppendUint32(nil, flags)))
	request.AddData(nl.NewRtAttr(ifaProto, []byte{Protocol}))
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// remove removes an address from an interface. A missing address is not an error.
func remove(k key) error {
	family := unix.AF_INET6
	if k.at.Is4() {
		family = unix.AF_INET
	}
	request := nl.NewNetlinkRequest(unix.RTM_DELADDR, unix.NLM_F_ACK)
	request.AddData(header(k, family))
	request.AddData(nl.NewRtAttr(unix.IFA_LOCAL, k.at.AsSlice()))
	request.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, k.at.AsSlice()))
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

func header(k key, family int) *nl.IfAddrmsg {
	m := nl.NewIfAddrmsg(family)
	m.Index, m.Prefixlen = uint32(k.ifindex), uint8(k.at.BitLen())
	if family == unix.AF_INET {
		m.Scope = unix.RT_SCOPE_LINK
	}
	return m
}
