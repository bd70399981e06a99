// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// TestShaping names the queueing disciplines that shape. fq and fq_codel are plain unless they have a rate.
func TestShaping(t *testing.T) {
	for _, c := range []struct {
		q    netlink.Qdisc
		want string
	}{
		{&netlink.Fq{}, ""},
		{&netlink.Fq{FlowMaxRate: 1<<32 - 1}, ""},
		{&netlink.Fq{FlowMaxRate: 1_250_000}, "fq maxrate"},
		{&netlink.Fq{FlowMaxRate: 1_250_000, Pacing: 1}, "fq maxrate"},
		{&netlink.FqCodel{}, ""},
		{&netlink.PfifoFast{}, ""},
		{&netlink.Ingress{}, ""},
		{&netlink.Clsact{}, ""},
		{&netlink.Sfq{}, ""},
		{&netlink.Tbf{}, "tbf"},
		{&netlink.Htb{}, "htb"},
		{&netlink.Hfsc{}, "hfsc"},
		{&netlink.Netem{}, "netem"},
		{&netlink.Prio{}, "prio"},
		{&netlink.GenericQdisc{QdiscType: "noqueue"}, ""},
		{&netlink.GenericQdisc{QdiscType: "mq"}, ""},
		{&netlink.GenericQdisc{QdiscType: "cake"}, "cake"},
		{&netlink.GenericQdisc{QdiscType: "a later one"}, "a later one"},
	} {
		if got := shaping(c.q); got != c.want {
			t.Errorf("%s: %q, want %q", c.q.Type(), got, c.want)
		}
	}
}
