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
		if !slices.Contains(plainQueues, kind) && !slices.Contains(t.Queues, kind) {
			t.Queues = append(t.Queues, kind)
		}
		if kind == "ingress" || kind == "clsact" {
			t.Ingress = filters(index, netlink.HANDLE_MIN_INGRESS, skip)
		}
		if kind == "clsact" {
			t.Egress = filters(index, netlink.HANDLE_MIN_EGRESS, skip)
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
