// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// parsePacketLine parses one line of the packets section.
func (c *Case) parsePacketLine(line int, s string) error {
	word, rest, _ := strings.Cut(s, " ")
	rest = strings.TrimSpace(rest)
	last := func() (*Step, error) {
		if n := len(c.Steps); n > 0 && c.Steps[n-1].Kind == StepPacket {
			return &c.Steps[n-1], nil
		}
		return nil, fmt.Errorf("%s does not follow a packet", word)
	}
	next := Step{Line: line, Words: strings.Fields(rest)}
	switch word {
	case "in":
		return c.packet(line, rest)
	case "forward", "drop", "pass":
		p, err := last()
		if err != nil {
			return err
		}
		p.Action, p.Reason = model.Action(word), model.Reason(rest)
		return nil
	case "out":
		p, err := last()
		if err != nil {
			return err
		}
		iface, text, ok := strings.Cut(rest, ":")
		if !ok {
			return fmt.Errorf("out INTERFACE: PACKET")
		}
		p.Out = append(p.Out, Expected{Interface: iface, Text: strings.TrimSpace(text)})
		return nil
	case "wait":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return err
		}
		next.Kind, next.Wait = StepWait, d
	case "flows":
		n, err := strconv.Atoi(rest)
		if err != nil {
			return err
		}
		next.Kind, next.Count = StepFlows, n
	case "count":
		next.Kind = StepCount
	case "map":
		next.Kind = StepMap
	case "unmap":
		next.Kind = StepUnmap
	case "backend":
		next.Kind = StepBackend
	case "where":
		next.Kind = StepWhere
	case "apply":
		next.Kind = StepApply
	case "host":
		next.Kind = StepHost
	default:
		return fmt.Errorf("%q: lines begin with in, forward, drop, pass, out, wait, flows, count, map, unmap, backend, host, apply or where", word)
	}
	c.Steps = append(c.Steps, next)
	return nil
}

// packet parses "IFACE: TEXT" or "IFACE fragment N of SIZE id ID: TEXT".
func (c *Case) packet(line int, s string) error {
	head, text, ok := strings.Cut(s, ":")
	words := strings.Fields(head)
	if !ok || len(words) == 0 {
		return fmt.Errorf("in INTERFACE: PACKET")
	}
	p := Step{Line: line, Kind: StepPacket, Interface: words[0], Text: strings.TrimSpace(text)}
	if len(words) > 1 {
		var n, size, id int
		if _, err := fmt.Sscanf(strings.Join(words[1:], " "), "fragment %d of %d id %d", &n, &size, &id); err != nil {
			return fmt.Errorf("%q: write fragment N of SIZE id ID", head)
		}
		p.Piece = fragmentSelector{n: n, size: size, id: uint32(id)}
	}
	c.Steps = append(c.Steps, p)
	return nil
}

// StandardHost is the default host of a case: wan0 with a default router, lan0 with the inside hosts and backends.
func StandardHost() model.Host {
	h := model.Host{Interfaces: []model.Interface{
		{Name: "wan0", MAC: mac("02:00:00:00:01:01"), MTU: 1500, Addresses: prefixes("198.51.100.1/24", "2001:db8:ff::1/64")},
		{Name: "lan0", MAC: mac("02:00:00:00:02:01"), MTU: 1500, Addresses: prefixes("10.0.2.1/24", "fd00:2::1/64")},
	}}
	neighbour := func(iface, address, hw string) {
		h.Neighbours = append(h.Neighbours, model.Neighbour{Interface: iface, Address: netip.MustParseAddr(address), MAC: mac(hw)})
	}
	neighbour("wan0", "198.51.100.2", "02:00:00:00:01:02")
	neighbour("wan0", "2001:db8:ff::2", "02:00:00:00:01:02")
	for i := 2; i <= 9; i++ {
		hw := fmt.Sprintf("02:00:00:00:02:%02x", i)
		neighbour("lan0", fmt.Sprintf("10.0.2.%d", i), hw)
		neighbour("lan0", fmt.Sprintf("fd00:2::%d", i), hw)
	}
	route := func(to, via, iface string) {
		h.Routes = append(h.Routes, model.Route{To: netip.MustParsePrefix(to), Via: netip.MustParseAddr(via), Interface: iface})
	}
	route("0.0.0.0/0", "198.51.100.2", "wan0")
	route("::/0", "2001:db8:ff::2", "wan0")
	route("10.1.0.0/16", "10.0.2.9", "lan0") // further inside networks behind a router
	route("fd00:a::/32", "fd00:2::9", "lan0")
	route("2001:db8:1::/48", "fd00:2::9", "lan0")
	return h
}

// HostWith returns the standard host changed by lines of the section "host".
func HostWith(lines ...string) (model.Host, error) {
	h := StandardHost()
	for _, l := range lines {
		if err := readHost(&h, l); err != nil {
			return h, err
		}
	}
	return h, nil
}

func mac(s string) packet.MAC {
	m, err := packet.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

func prefixes(ss ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range ss {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// Changed returns a host changed by a line of the section "host".
func Changed(h model.Host, line string) (model.Host, error) {
	h.Interfaces, h.Neighbours, h.Routes = slices.Clone(h.Interfaces), slices.Clone(h.Neighbours), slices.Clone(h.Routes)
	for i := range h.Interfaces {
		h.Interfaces[i].Addresses = slices.Clone(h.Interfaces[i].Addresses)
	}
	err := readHost(&h, line)
	return h, err
}

// readHost changes the host by one line: "mtu IFACE N", "mac IFACE MAC", "address IFACE CIDR", "unaddress IFACE CIDR",
// "rp_filter IFACE N", "accept_local IFACE 1", "unnumbered IFACE" (takes its addresses), "station IFACE MAC" (a macvlan link), "neighbour IFACE ADDRESS MAC", "forget ADDRESS" (a neighbour), "unroute CIDR" or "route CIDR
// via ADDRESS dev IFACE [mtu N]".
func readHost(h *model.Host, s string) error {
	w := strings.Fields(s)
	bad := fmt.Errorf("%q: write mtu IFACE N, mac IFACE MAC, address IFACE CIDR, unaddress IFACE CIDR, rp_filter IFACE N, accept_local IFACE 1, unnumbered IFACE, station IFACE MAC, neighbour IFACE ADDRESS MAC, forget ADDRESS, unroute CIDR or route CIDR via ADDRESS dev IFACE [mtu N]", s)
	switch {
	case len(w) == 3 && slices.Contains([]string{"mtu", "mac", "address", "unaddress", "rp_filter", "accept_local"}, w[0]):
		for i := range h.Interfaces {
			if h.Interfaces[i].Name == w[1] {
				err := changeInterface(&h.Interfaces[i], w[0], w[2])
				if h.Interfaces[i].MTU < 1280 {
					withoutIPv6(h, &h.Interfaces[i])
				}
				return err
			}
		}
	case len(w) == 2 && w[0] == "unnumbered":
		for i := range h.Interfaces {
			if h.Interfaces[i].Name == w[1] {
				h.Interfaces[i].Addresses = nil
				return nil
			}
		}
	case len(w) == 2 && w[0] == "unroute":
		to, err := netip.ParsePrefix(w[1])
		n := len(h.Routes)
		if h.Routes = slices.DeleteFunc(h.Routes, func(r model.Route) bool { return r.To == to }); err == nil && len(h.Routes) == n {
			err = fmt.Errorf("%s: no such route", w[1])
		}
		return err
	case len(w) == 3 && w[0] == "station":
		m, err := packet.ParseMAC(w[2])
		for i := range h.Interfaces {
			if h.Interfaces[i].Name == w[1] {
				h.Interfaces[i].Stations = append(h.Interfaces[i].Stations, m)
				return err
			}
		}
	case len(w) == 4 && w[0] == "neighbour":
		a, err := netip.ParseAddr(w[2])
		if err != nil {
			return err
		}
		m, err := packet.ParseMAC(w[3])
		h.Neighbours = append(h.Neighbours, model.Neighbour{Interface: w[1], Address: a, MAC: m})
		return err
	case len(w) == 2 && w[0] == "forget":
		var kept []model.Neighbour
		for _, n := range h.Neighbours {
			if n.Address.String() != w[1] {
				kept = append(kept, n)
			}
		}
		if len(kept) == len(h.Neighbours) {
			return fmt.Errorf("%s: no such neighbour", w[1])
		}
		h.Neighbours = kept
		return nil
	case len(w) >= 6 && w[0] == "route" && w[2] == "via" && w[4] == "dev":
		r, err := readRoute(w)
		h.Routes = append(h.Routes, r)
		return err
	}
	return bad
}

// readRoute reads "route CIDR via ADDRESS dev IFACE [mtu N]".
func readRoute(w []string) (r model.Route, err error) {
	if r.To, err = netip.ParsePrefix(w[1]); err != nil {
		return r, err
	}
	if r.Via, err = netip.ParseAddr(w[3]); err != nil {
		return r, err
	}
	r.Interface = w[5]
	if len(w) == 6 {
		return r, nil
	}
	if len(w) != 8 || w[6] != "mtu" {
		return r, fmt.Errorf("%q: write mtu N", w[6:])
	}
	r.MTU, err = strconv.Atoi(w[7])
	return r, err
}

// withoutIPv6 takes from an interface what the kernel does: no link with a smaller MTU than 1280
// bytes has IPv6.
func withoutIPv6(h *model.Host, i *model.Interface) {
	i.Addresses = slices.DeleteFunc(slices.Clone(i.Addresses), func(p netip.Prefix) bool { return p.Addr().Is6() })
	h.Neighbours = slices.DeleteFunc(h.Neighbours, func(n model.Neighbour) bool { return n.Interface == i.Name && n.Address.Is6() })
	h.Routes = slices.DeleteFunc(h.Routes, func(r model.Route) bool { return r.Interface == i.Name && r.To.Addr().Is6() })
}

func changeInterface(i *model.Interface, what, value string) (err error) {
	switch what {
	case "mtu":
		i.MTU, err = strconv.Atoi(value)
		return err
	case "rp_filter":
		i.RPFilter, err = strconv.Atoi(value)
		return err
	case "accept_local":
		i.AcceptLocal = value == "1"
		return nil
	case "mac":
		i.MAC, err = packet.ParseMAC(value)
		return err
	}
	p, err := netip.ParsePrefix(value)
	if err != nil {
		return err
	}
	if what == "address" {
		i.AddAddress(p)
		return nil
	}
	if !slices.Contains(i.Addresses, p) {
		return fmt.Errorf("%s: no such address", value)
	}
	i.RemoveAddress(p)
	return nil
}
