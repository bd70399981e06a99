// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// trafficControlWarnings returns warnings about tc shapers, policers and filters that forwarded
// packets bypass. They are at the ingress of an interface with a program, or, for packets sent by
// XDP, at the egress.
func (d *Datapath) trafficControlWarnings() (out []string) {
	controls, err := netdev.TrafficControls(ownFilter)
	if err != nil {
		return []string{fmt.Sprintf("whether forwarded packets bypass a traffic shaper is unknown: %v", err)}
	}
	xdp, programmed := false, map[int]bool{}
	for _, a := range d.attached {
		xdp = xdp || a.hook != config.AttachTC
		programmed[a.ifindex] = true
	}
	for _, i := range d.lastHost.Interfaces {
		t := controls[i.Index]
		if len(t.Ingress) > 0 && programmed[i.Index] {
			out = append(out, fmt.Sprintf("interface %s: packets that eBPF forwards bypass the tc filters on its ingress (%s), such as a policer or a shaper on an ifb device: "+
				"shape on the egress of the interface that they leave by, or use datapath nftables", i.Name, strings.Join(t.Ingress, ", ")))
		}
		if bypassed := append(slices.Clone(t.Queues), t.Egress...); len(bypassed) > 0 && xdp {
			out = append(out, fmt.Sprintf("interface %s: packets that XDP forwards there bypass its queueing discipline and the tc filters on its egress (%s): use attach: tc",
				i.Name, strings.Join(bypassed, ", ")))
		}
	}
	return out
}

// ownFilter reports whether a tc filter belongs to Sluice: see bpfFilter.
func ownFilter(f netlink.Filter) bool {
	b, ok := f.(*netlink.BpfFilter)
	return ok && b.Priority == filterPriority && b.Name == "sluice"
}
