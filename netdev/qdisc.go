// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
)

// TrafficControl lists what tc does with the packets of an interface beyond the kernel's defaults.
type TrafficControl struct {
	Ingress []string // Filters on packets that arrive: policers, redirection to an ifb device.
	Egress  []string // Filters on packets that leave.
	Queues  []string // Queueing disciplines that shape, reorder or drop.
}

// plainQueues are disciplines that set no rate: the kernel's defaults and what sysctl net.core.default_qdisc is set to.
var plainQueues = []string{"noqueue", "noop", "mq", "multiq", "pfifo_fast", "pfifo", "bfifo", "fq_codel", "fq", "fq_pie", "codel", "sfq", "ingress", "clsact"}

// classifying are the plain disciplines with tc filters of their own.
var classifying = []string{"multiq", "fq_codel", "sfq"}

// shaping names a discipline that shapes, reorders or drops; "" for a plain one.
func shaping(q netlink.Qdisc) string {
	const unlimited = 1<<32 - 1
	if fq, ok := q.(*netlink.Fq); ok && fq.FlowMaxRate != 0 && fq.FlowMaxRate != unlimited {
		return "fq maxrate"
	}
	if slices.Contains(plainQueues, q.Type()) {
		return ""
	}
	return q.Type()
}

// TrafficControls reads the tc configuration of the calling thread's network namespace, by interface index. skip
// reports filters that are left out.
func TrafficControls(skip func(netlink.Filter) bool) (map[int]TrafficControl, error) {
	qdiscs, err := Whole(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("queueing disciplines: %w", err)
	}
	out := map[int]TrafficControl{}
	for _, q := range qdiscs {
		index, kind := q.Attrs().LinkIndex, q.Type()
		t := out[index]
		if shaper := shaping(q); shaper != "" && !slices.Contains(t.Queues, shaper) {
			t.Queues = append(t.Queues, shaper)
		}
		if slices.Contains(classifying, kind) && q.Attrs().Handle != 0 {
			t.Egress = append(t.Egress, filters(index, q.Attrs().Handle, skip)...)
		}
		if kind == "ingress" || kind == "clsact" {
			t.Ingress = filters(index, netlink.HANDLE_MIN_INGRESS, skip)
		}
		if kind == "clsact" {
			t.Egress = append(t.Egress, filters(index, netlink.HANDLE_MIN_EGRESS, skip)...)
		}
		out[index] = t
	}
	return out, nil
}

// filters names the filters of an interface in one direction. What cannot be read is none: the interface may be gone.
func filters(index int, parent uint32, skip func(netlink.Filter) bool) (out []string) {
	link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}
	list, err := Whole(func() ([]netlink.Filter, error) { return netlink.FilterList(link, parent) })
	if err != nil {
		return nil
	}
	for _, f := range list {
		name := fmt.Sprintf("%s pref %d", f.Type(), f.Attrs().Priority)
		if !skip(f) && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}
