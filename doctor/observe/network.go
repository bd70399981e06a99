// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"encoding/binary"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Routing is the state of a namespace's routes.
type Routing struct {
	// Default6 is set if there is an IPv6 default route. Learned6 are the interfaces with a default
	// route from router advertisements.
	Default6 bool
	Learned6 []string
	// Marked counts the rules that choose a table by a packet's mark.
	Marked int
	// Gateways are the routers that routes lead to.
	Gateways []Gateway
	// Detached are routes for parts of a link's network by other interfaces.
	Detached []Detached
	// Refusals are the routes and rules that refuse packets.
	Refusals []Refusal
	// Policies are the IPsec policies for packets that leave.
	Policies []netdev.IPsecPolicy
	// Advertised counts the router advertisements that an interface has ever received.
	Advertised map[string]uint64
}

// STPState is the state of a bridge's port (BR_STATE_DISABLED and on).
type STPState uint8

// The states. STPNone applies to interfaces without a bridge.
const (
	STPNone STPState = iota
	STPDisabled
	STPListening
	STPLearning
	STPForwarding
	STPBlocking
)

var stpStates = [...]string{"none", "disabled", "listening", "learning", "forwarding", "blocking"}

// String returns the state in lower case.
func (s STPState) String() string { return stpStates[min(int(s), len(stpStates)-1)] }

// nowhere is an address for which there is no route but a default one: no block of 2000::/16
// is assigned.
var nowhere = net.ParseIP("2000::1")

// readRouting reads the routes of the calling thread's namespace.
func readRouting(root fs.FS, links []Link) (r Routing) {
	names := map[int]string{}
	r.Advertised = map[string]uint64{}
	for _, l := range links {
		names[l.Index] = l.Name
		for line := range strings.Lines(text(root, threadNet+"dev_snmp6/"+l.Name)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "Icmp6InRouterAdvertisements" {
				r.Advertised[l.Name], _ = strconv.ParseUint(f[1], 10, 64)
			}
		}
	}
	// A lookup, because a table may hold all routes of the Internet.
	routes, _ := netlink.RouteGetWithOptions(nowhere, &netlink.RouteGetOptions{FIBMatch: true})
	for _, route := range routes {
		if route.Type != unix.RTN_UNICAST {
			continue
		}
		r.Default6 = true
		if route.Protocol == unix.RTPROT_RA {
			r.Learned6 = append(r.Learned6, names[route.LinkIndex])
		}
	}
	rules, _ := netdev.Whole(func() ([]netlink.Rule, error) { return netlink.RuleList(unix.AF_UNSPEC) })
	for _, rule := range rules {
		if rule.Mark > 0 {
			r.Marked++
		}
	}
	r.Refusals = ruleRefusals()
	r.Policies, _ = netdev.IPsecPolicies()
	return r
}

// wayTo is the interface by which the calling thread's namespace sends to an address; "" when
// there is none.
func wayTo(to netip.Addr, mark uint32) string {
	routes, err := netlink.RouteGetWithOptions(net.IP(to.AsSlice()), &netlink.RouteGetOptions{Mark: mark})
	if err != nil || len(routes) == 0 {
		return ""
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return ""
	}
	return link.Attrs().Name
}

// gatewayOn finds a router on a link: the next hop of a route by it, in any table, or else the
// only neighbour there.
func gatewayOn(link *Link) netip.Addr {
	index := link.Index
	routes, _ := netdev.Whole(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(unix.AF_INET, &netlink.Route{Table: unix.RT_TABLE_UNSPEC, LinkIndex: index}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
	})
	for _, r := range routes {
		if addr, ok := netip.AddrFromSlice(r.Gw); ok {
			return addr.Unmap()
		}
	}
	neighbours, _ := netdev.Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(index, unix.AF_INET) })
	if len(neighbours) != 1 {
		return netip.Addr{}
	}
	addr, _ := netip.AddrFromSlice(neighbours[0].IP)
	addr = addr.Unmap()
	if !slices.ContainsFunc(link.Addresses, func(p netip.Prefix) bool { return p.Contains(addr) }) {
		return netip.Addr{}
	}
	return addr
}

// readAddresses adds the addresses of the interfaces.
func readAddresses(links []Link) {
	byIndex := map[int]*Link{}
	for i := range links {
		byIndex[links[i].Index] = &links[i]
	}
	list, _ := netdev.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, unix.AF_UNSPEC) })
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		l := byIndex[a.LinkIndex]
		if !ok || a.IPNet == nil || l == nil {
			continue
		}
		bits, _ := a.Mask.Size()
		l.Addresses = append(l.Addresses, netip.PrefixFrom(addr.Unmap(), bits))
		switch {
		case a.Flags&unix.IFA_F_DADFAILED != 0:
			l.Duplicates = append(l.Duplicates, addr)
		case a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0:
			l.Tentative = append(l.Tentative, addr)
		}
	}
}

// Attributes of links that the library does not read (linux/if_link.h).
const (
	iflaInfoSlaveKind = 4
	iflaInfoSlaveData = 5
	iflaBrportState   = 1
	iflaForwardDelay  = 1 // of a bridge, in hundredths of a second (USER_HZ)
)

// readPorts adds the states of bridge ports, and the MTUs of the other ends of veth, which
// may be in other namespaces.
func readPorts(links []Link, peers map[int]peer) {
	conn, err := mdnetlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return
	}
	defer conn.Close()
	for i := range links {
		l := &links[i]
		if l.Master != 0 {
			l.STP = portState(linkMessage(conn, l.Index, -1))
		}
		if l.Kind == "bridge" {
			data := attribute(attribute(linkMessage(conn, l.Index, -1), unix.IFLA_LINKINFO), unix.IFLA_INFO_DATA)
			if delay := attribute(data, iflaForwardDelay); len(delay) == 4 {
				l.ForwardDelay = time.Duration(binary.NativeEndian.Uint32(delay)) * 10 * time.Millisecond
			}
		}
		if p, there := peers[l.Index]; there && l.Kind == "veth" {
			l.PeerMTU = mtuOf(linkMessage(conn, p.index, p.netns))
		}
	}
}

// peer is the other end of a veth; netns is the number of its namespace here, -1: this one.
type peer struct{ index, netns int }

// linkMessage asks for one link, of another namespace where netns is not negative.
func linkMessage(conn *mdnetlink.Conn, index, netns int) []byte {
	data := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(data[4:], uint32(index))
	if netns >= 0 {
		a := mdnetlink.NewAttributeEncoder()
		a.Int32(unix.IFLA_TARGET_NETNSID, int32(netns))
		attributes, err := a.Encode()
		if err != nil {
			return nil
		}
		data = append(data, attributes...)
	}
	messages, err := conn.Execute(mdnetlink.Message{
		Header: mdnetlink.Header{Type: unix.RTM_GETLINK, Flags: mdnetlink.Request}, Data: data})
	if err != nil || len(messages) == 0 || len(messages[0].Data) < unix.SizeofIfInfomsg {
		return nil
	}
	return messages[0].Data[unix.SizeofIfInfomsg:]
}

// attribute finds one among others; nil: it is not there.
func attribute(b []byte, kind uint16) []byte {
	a, err := mdnetlink.NewAttributeDecoder(b)
	if err != nil {
		return nil
	}
	for a.Next() {
		if a.Type() == kind {
			return a.Bytes()
		}
	}
	return nil
}

func portState(message []byte) STPState {
	info := attribute(message, unix.IFLA_LINKINFO)
	if strings.TrimRight(string(attribute(info, iflaInfoSlaveKind)), "\x00") != "bridge" {
		return STPNone
	}
	if state := attribute(attribute(info, iflaInfoSlaveData), iflaBrportState); len(state) == 1 {
		return STPState(state[0]) + STPDisabled
	}
	return STPNone
}

func mtuOf(message []byte) int {
	if mtu := attribute(message, unix.IFLA_MTU); len(mtu) == 4 {
		return int(binary.NativeEndian.Uint32(mtu))
	}
	return 0
}
