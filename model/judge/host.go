// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// hostChange returns a random change of the host as a line of a packet case, "" for none.
func (w *generatorState) hostChange(r *rand.Rand) string {
	h, was := &w.host, w.scenario.Host()
	i := pick(r, h.Interfaces)
	switch r.IntN(9) {
	case 0, 1:
		if n := pick(r, was.Neighbours); !slices.Contains(h.Neighbours, n) {
			if strings.Contains(w.scenario.YAML, "mode: dsr") && strings.Contains(w.scenario.YAML, "persistence") {
				return "" // the pinned one of several unresolved backends is not observable
			}
			return fmt.Sprintf("neighbour %s %s %s", n.Interface, n.Address, n.MAC)
		}
		if len(h.Neighbours) > 1 {
			return fmt.Sprintf("forget %s", pick(r, h.Neighbours).Address)
		}
	case 2, 3:
		if i.MTU >= 1280 {
			return fmt.Sprintf("mtu %s %d", i.Name, pick(r, []int{1500, 1500, 1492, 1400, 1280}))
		}
	case 4:
		if gone := missingRoutes(was.Routes, h.Routes); len(gone) > 0 && r.IntN(4) > 0 {
			n := pick(r, gone)
			return fmt.Sprintf("route %s via %s dev %s%s", n.To, n.Via, n.Interface, pick(r, []string{"", "", " mtu 1400", " mtu 1300"}))
		}
		if len(h.Routes) > 0 {
			n := pick(r, h.Routes)
			if n.To.Bits() == 0 && strings.Contains(w.scenario.YAML, "persistence") {
				return "" // user space sends packets of clients without a route: the pinned one of several unresolved backends is not observable
			}
			return fmt.Sprintf("unroute %s", n.To)
		}
	case 5:
		if i.MAC != (packet.MAC{}) {
			return fmt.Sprintf("mac %s %s", i.Name, packet.MAC{2, 0, 0, 0, i.MAC[4], byte(0x41 + r.IntN(4))})
		}
	case 6: // the source address of packets, where another address replaces it
		at := r.IntN(len(h.Interfaces))
		all := was.Interfaces[at].Addresses
		if len(all) == 0 {
			return ""
		}
		own := pick(r, all)
		switch i := h.Interfaces[at]; {
		case strings.Contains(w.scenario.YAML, "interface:"): // the model has no rule yet for the listeners' existing flows
		case !slices.Contains(i.Addresses, own):
			return fmt.Sprintf("address %s %s", i.Name, own)
		case slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p != own && p.Masked() == own.Masked() }):
			return fmt.Sprintf("unaddress %s %s", i.Name, own)
		}
	default:
		more := "address"
		extra := pick(r, extraAddresses[i.Name])
		if strings.Contains(w.scenario.YAML, "masquerade") && strings.Contains(extra, ":") {
			return "" // the model has no rule yet for a source address that remains configured
		}
		if p := netip.MustParsePrefix(extra); slices.Contains(i.Addresses, p) {
			more = "unaddress"
			if !slices.ContainsFunc(i.Addresses, func(o netip.Prefix) bool { return o != p && o.Addr().Is4() == p.Addr().Is4() }) {
				return "" // the kernel removes all routes of the interface with the last address of a family
			}
			inNetwork := func(o netip.Prefix) bool { return o != p && o.Masked() == p.Masked() }
			if own, _ := was.Interface(i.Name); slices.ContainsFunc(own.Addresses, inNetwork) && !slices.ContainsFunc(i.Addresses, inNetwork) {
				return "" // the kernel removes the routes with the last address of a network
			}
		}
		return fmt.Sprintf("%s %s %s", more, i.Name, extra)
	}
	return ""
}

// extraAddresses lists addresses for temporary use on an interface.
var extraAddresses = map[string][]string{"wan0": {"198.51.100.77/24"},
	"lan0": {"10.0.2.77/24", "192.168.9.1/24", "fd00:2::77/64"}}

func missingRoutes(all, some []model.Route) (list []model.Route) {
	for _, r := range all {
		if !slices.ContainsFunc(some, func(s model.Route) bool { return s.To == r.To }) {
			list = append(list, r)
		}
	}
	return list
}

// noRoute reports whether the kernel gets a packet without a route. The kernel drops the packet. A
// datapath may translate and count it or not.
func (w *generatorState) noRoute(o model.Outcome) bool {
	return leftToKernel(o) && !w.host.Routed(destination(packet.Parse(o.Out[0].Frame)))
}

// leftToKernel reports whether the kernel forwards a translated packet.
func leftToKernel(o model.Outcome) bool {
	return o.Action == model.Pass && o.Reason == model.ReasonNotRouted && len(o.Out) == 1
}

// observablePart returns the observable part of an outcome. A packet without a route shows nothing. A
// packet that the kernel forwards unchanged shows nothing either.
func (w *generatorState) observablePart(in []byte, o model.Outcome) model.Outcome {
	if w.noRoute(o) || leftToKernel(o) && bytes.Equal(o.Out[0].Frame, in) {
		o.Out = nil
	}
	return o
}

func destination(p packet.Packet) netip.Addr {
	dst, _, _ := replyAddresses(withoutLink(p))
	return dst
}

// hostChanges applies one change of the host during traffic.
func (t *trace) hostChanges(s golden.Subject, model *model.Model, w *generatorState, r *rand.Rand) error {
	line := w.hostChange(r)
	if line == "" {
		return nil
	}
	h, err := golden.Changed(w.host, line)
	if err != nil {
		return err
	}
	w.dropUncertain()
	w.host = h
	model.SetHost(h)
	t.steps = append(t.steps, judgedStep{change: "host " + line})
	if err := s.SetHost(h); err != nil {
		return fmt.Errorf("%s: host %s: %w", s.Name(), line, err)
	}
	return nil
}
