// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const sysctls = "/proc/sys/net/"

// Bounds of the copied state. A route takes some µs. Each interface requires the creation, setup and removal of a
// veth pair.
const (
	maxRoutes = 1 << 16
	maxLinks  = 1 << 10
)

// host is the forwarding state apart from the rules. It is read in the host's namespace and written in the scratch
// namespace. Addresses, rules and routes stay raw kernel messages, so that no attribute is lost.
type host struct {
	links                    []link
	addresses, rules, routes [][]byte
	nextHops                 [][]byte
	sysctl                   []setting
	index                    map[int]int // of interfaces: from the host to the scratch namespace
	omitted                  []string    // State missing in the scratch namespace.
}

type setting struct{ key, value string }

// families of addresses and routes.
var families = []uint8{unix.AF_INET, unix.AF_INET6}

func readHost() (*host, error) {
	h := &host{index: map[int]int{}}
	list, err := netlink.LinkList()
	if err = h.tolerateChange(err, "interfaces"); err != nil {
		return nil, err
	}
	if len(list) > maxLinks {
		return nil, fmt.Errorf("the host has %d interfaces, more than the %d that are copied for a replay", len(list), maxLinks)
	}
	kinds := map[int]string{}
	for _, l := range list {
		kinds[l.Attrs().Index] = l.Type()
	}
	for _, l := range list {
		a := l.Attrs()
		if a.Flags&net.FlagLoopback != 0 {
			h.index[a.Index] = a.Index
			continue
		}
		one := link{name: a.Name, real: a.Index, mac: a.HardwareAddr, mtu: a.MTU, up: a.Flags&net.FlagUp != 0}
		switch kinds[a.MasterIndex] {
		case "":
		case "vrf":
			one.vrf = true
		default:
			one.master = a.MasterIndex
		}
		h.links = append(h.links, one)
	}
	for _, f := range families {
		for _, what := range []struct {
			name      string
			get, kind uint16
			into      *[][]byte
			head      nl.NetlinkRequestData
		}{
			{"addresses", unix.RTM_GETADDR, unix.RTM_NEWADDR, &h.addresses, nl.NewIfAddrmsg(int(f))},
			{"routing rules", unix.RTM_GETRULE, unix.RTM_NEWRULE, &h.rules, &nl.RtMsg{RtMsg: unix.RtMsg{Family: f}}},
			{"routes", unix.RTM_GETROUTE, unix.RTM_NEWROUTE, &h.routes, &nl.RtMsg{RtMsg: unix.RtMsg{Family: f}}},
		} {
			list, err := dump(what.get, what.kind, what.head)
			if err = h.tolerateChange(err, what.name); err != nil {
				return nil, err
			}
			*what.into = append(*what.into, list...)
		}
	}
	if len(h.routes) > maxRoutes {
		return nil, fmt.Errorf("the host has %d routes, more than the %d that are copied for a replay", len(h.routes), maxRoutes)
	}
	if err := h.readNextHops(); err != nil {
		return nil, err
	}
	h.readSysctls()
	return h, nil
}

func dump(get, kind uint16, head nl.NetlinkRequestData) ([][]byte, error) {
	r := nl.NewNetlinkRequest(int(get), unix.NLM_F_DUMP)
	r.AddData(head)
	return r.Execute(unix.NETLINK_ROUTE, kind)
}

// tolerateChange records that a list changed during the read and may be incomplete. It returns every other error with the
// name of the list.
func (h *host) tolerateChange(err error, what string) error {
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		if note := what + " changed while they were copied: some may be left out"; !slices.Contains(h.omitted, note) {
			h.omitted = append(h.omitted, note)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// readSysctls reads the settings for forwarding, in an order in which no value resets an earlier one.
func (h *host) readSysctls() {
	keys := []string{"ipv4/ip_forward", "ipv4/fib_multipath_hash_policy", "ipv6/fib_multipath_hash_policy", "netfilter/nf_conntrack_tcp_loose"}
	names := []string{"all", "lo"}
	for _, l := range h.links {
		names = append(names, l.name)
	}
	for _, n := range names {
		for _, k := range []string{"forwarding", "rp_filter", "accept_local", "route_localnet", "src_valid_mark"} {
			keys = append(keys, "ipv4/conf/"+n+"/"+k)
		}
		for _, k := range []string{"forwarding", "disable_ipv6"} {
			keys = append(keys, "ipv6/conf/"+n+"/"+k)
		}
	}
	for _, k := range keys {
		if v, err := os.ReadFile(sysctls + k); err == nil {
			h.sysctl = append(h.sysctl, setting{k, strings.TrimSpace(string(v))})
		}
	}
}

// quiet are settings that keep the scratch namespace from sending packets by itself.
var quiet = []setting{
	{"ipv6/conf/default/accept_dad", "0"}, {"ipv6/conf/default/router_solicitations", "0"}, {"ipv6/conf/default/accept_ra", "0"},
	{"ipv6/conf/default/addr_gen_mode", "1"}, {"netfilter/nf_conntrack_tcp_be_liberal", "1"},
}

func write(list []setting) error {
	for _, s := range list {
		now, err := os.ReadFile(sysctls + s.key)
		if err != nil || strings.TrimSpace(string(now)) == s.value {
			continue // the interface is not copied, or the kernel lacks the setting
		}
		if err := os.WriteFile(sysctls+s.key, []byte(s.value), 0o644); err != nil {
			return fmt.Errorf("sysctl %s: %w", strings.ReplaceAll("net/"+s.key, "/", "."), err)
		}
	}
	return nil
}

// build configures the scratch namespace like the host.
func (h *host) build(ctx context.Context, far int) error {
	_ = write(quiet[:4]) // a kernel without IPv6 lacks these settings
	if err := h.makeLinks(ctx, far); err != nil {
		return err
	}
	for _, l := range h.links {
		h.index[l.real] = l.index
	}
	if err := write(h.sysctl); err != nil {
		return err
	}
	for _, a := range h.addresses {
		if err := send(unix.RTM_NEWADDR, h.address(a), unix.EEXIST); err != nil {
			return fmt.Errorf("address: %w", err)
		}
	}
	if err := h.copyRules(); err != nil {
		return err
	}
	h.copyNextHops()
	return h.copyRoutes(ctx)
}

func send(kind int, body []byte, tolerated ...unix.Errno) error {
	r := nl.NewNetlinkRequest(kind, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	r.AddRawData(body)
	_, err := r.Execute(unix.NETLINK_ROUTE, 0)
	for _, t := range tolerated {
		if errors.Is(err, t) {
			return nil
		}
	}
	return err
}

var native = binary.NativeEndian

// eachAttribute calls visit for the attributes after the header of a message. visit may modify the value in place.
func eachAttribute(b []byte, head int, visit func(kind uint16, whole, value []byte)) {
	for at := head; at+4 <= len(b); {
		n := int(native.Uint16(b[at:]))
		if n < 4 || at+n > len(b) {
			return
		}
		visit(native.Uint16(b[at+2:])&^unix.NLA_F_NESTED, b[at:min((at+n+3)&^3, len(b))], b[at+4:at+n])
		at += (n + 3) &^ 3
	}
}

// address makes an address of the host usable immediately.
func (h *host) address(b []byte) []byte {
	b[2] |= unix.IFA_F_NODAD
	native.PutUint32(b[4:], uint32(h.index[int(native.Uint32(b[4:]))]))
	eachAttribute(b, unix.SizeofIfAddrmsg, func(kind uint16, _, v []byte) {
		if kind == unix.IFA_FLAGS {
			native.PutUint32(v, native.Uint32(v)&^unix.IFA_F_TENTATIVE|unix.IFA_F_NODAD)
		}
	})
	return b
}

// copyRules replaces the kernel's default routing rules by the host's. A kernel without policy routing
// (CONFIG_IP_MULTIPLE_TABLES) has none to replace.
func (h *host) copyRules() error {
	for _, f := range families {
		own, err := dump(unix.RTM_GETRULE, unix.RTM_NEWRULE, &nl.RtMsg{RtMsg: unix.RtMsg{Family: f}})
		if err != nil {
			return fmt.Errorf("routing rules: %w", err)
		}
		for _, r := range own {
			if err := send(unix.RTM_DELRULE, r, unix.ENOENT, unix.EOPNOTSUPP); err != nil {
				return fmt.Errorf("routing rule: %w", err)
			}
		}
	}
	for _, r := range h.rules {
		if err := send(unix.RTM_NEWRULE, r, unix.EEXIST, unix.EOPNOTSUPP); err != nil {
			return fmt.Errorf("routing rule: %w", err)
		}
	}
	return nil
}

// copyRoutes adds the routes. A route through a router waits for the route to this router. Routes that the kernel
// refuses are recorded as omitted.
func (h *host) copyRoutes(ctx context.Context) error {
	rest := make([][]byte, 0, len(h.routes))
	for _, r := range h.routes {
		if r = h.route(r); r != nil {
			rest = append(rest, r)
		}
	}
	for {
		var refused [][]byte
		var last error
		for _, r := range rest {
			if err := ctx.Err(); err != nil {
				return err
			}
			err := send(unix.RTM_NEWROUTE, r, unix.EEXIST)
			if err != nil && r[5] != unix.RTPROT_KERNEL { // the kernel has created its own routes with the addresses
				refused, last = append(refused, r), err
			}
		}
		if len(refused) == 0 || len(refused) == len(rest) {
			if last != nil {
				h.omitted = append(h.omitted, fmt.Sprintf("left out: %d of %d routes, which the kernel does not take again (%s: %v)",
					len(refused), len(h.routes), destination(refused[len(refused)-1]), last))
			}
			return nil
		}
		rest = refused
	}
}

// destination returns the prefix of a route.
func destination(r []byte) netip.Prefix {
	to := netip.IPv4Unspecified()
	if r[0] == unix.AF_INET6 {
		to = netip.IPv6Unspecified()
	}
	eachAttribute(r, unix.SizeofRtMsg, func(kind uint16, _, v []byte) {
		if a, ok := netip.AddrFromSlice(v); ok && kind == unix.RTA_DST {
			to = a
		}
	})
	return netip.PrefixFrom(to, int(r[1]))
}

// rtaNextHopID is RTA_NH_ID, which golang.org/x/sys/unix does not name.
const rtaNextHopID = 30

// route converts a route of the host, or returns nil if the route is unusable at present.
func (h *host) route(b []byte) []byte {
	flags := native.Uint32(b[8:])
	if flags&(unix.RTNH_F_DEAD|unix.RTM_F_CLONED) != 0 {
		return nil
	}
	out := append([]byte(nil), b[:unix.SizeofRtMsg]...)
	native.PutUint32(out[8:], flags&(unix.RTNH_F_ONLINK|unix.RTNH_F_PERVASIVE))
	dead, expanded := false, false
	var object []byte
	eachAttribute(b, unix.SizeofRtMsg, func(kind uint16, whole, v []byte) {
		switch kind {
		case unix.RTA_CACHEINFO:
			return
		case rtaNextHopID:
			object = whole
			return
		case unix.RTA_OIF, unix.RTA_IIF:
			expanded = expanded || kind == unix.RTA_OIF
			h.translateIndex(v)
		case unix.RTA_MULTIPATH:
			expanded = true
			hops := h.liveHops(v)
			dead = len(hops) == 0
			out = append(native.AppendUint16(out, uint16(4+len(hops))), whole[2:4]...)
			out = append(out, hops...)
			return
		}
		out = append(out, whole...)
	})
	if dead {
		return nil
	}
	if object != nil && !expanded { // the message may contain the next hops of the object instead
		native.PutUint32(out[8:], 0)
		out = append(out, object...)
	}
	return out
}

// translateIndex replaces an interface's index on the host by its index in the scratch namespace.
func (h *host) translateIndex(at []byte) {
	native.PutUint32(at, uint32(h.index[int(native.Uint32(at))]))
}

// liveHops returns the usable next hops of RTA_MULTIPATH. The kernel would refuse the whole route because of an
// unusable one.
func (h *host) liveHops(v []byte) []byte {
	var live []byte
	for at := 0; at+unix.SizeofRtNexthop <= len(v); {
		n := int(native.Uint16(v[at:]))
		end := at + (n+3)&^3
		if n < unix.SizeofRtNexthop || end > len(v) {
			break
		}
		if v[at+2]&unix.RTNH_F_DEAD == 0 {
			v[at+2] &^= unix.RTNH_F_LINKDOWN
			h.translateIndex(v[at+4:])
			live = append(live, v[at:end]...)
		}
		at = end
	}
	return live
}
