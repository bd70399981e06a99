// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
)

// TestTrafficControlIsBypassed configures tc on the links of a gateway. Warnings must name the parts that
// forwarded packets bypass: ingress filters at either hook, egress qdiscs and filters with XDP.
func TestTrafficControlIsBypassed(t *testing.T) {
	for hook, want := range map[config.Attach][]string{
		config.AttachTC:         {"wan0: packets that eBPF forwards bypass the tc filters on its ingress (u32 pref 10)"},
		config.AttachXDPGeneric: {"wan0: packets that eBPF forwards bypass the tc filters on its ingress (u32 pref 10)", "lan0: packets that XDP forwards there bypass its queueing discipline and the tc filters on its egress (tbf, u32 pref 20)"},
	} {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			gw := l.Node("gateway")
			d := gateway(t, gw, hook, oneServer)
			bypassed := func() (out []string) {
				for _, w := range d.Warnings() {
					if strings.Contains(w, "bypass") {
						out = append(out, w)
					}
				}
				return out
			}
			if got := bypassed(); len(got) > 0 {
				t.Errorf("without tc: %q", got)
			}
			if err := gw.Do(shape); err != nil {
				t.Fatal(err)
			}
			got := bypassed()
			for _, w := range want {
				if !strings.Contains(strings.Join(got, "\n"), w) {
					t.Errorf("no warning %q", w)
				}
			}
			if len(got) != len(want) {
				t.Errorf("warnings %q", got)
			}
		})
	}
}

// shape adds a filter to the ingress of wan0, and a shaper and a filter to the egress of lan0.
func shape() error {
	wan, err := netlink.LinkByName("wan0")
	if err != nil {
		return err
	}
	lan, err := netlink.LinkByName("lan0")
	if err != nil {
		return err
	}
	filter := func(link netlink.Link, parent uint32, priority uint16) error {
		return netlink.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{LinkIndex: link.Attrs().Index, Parent: parent, Priority: priority, Protocol: unix.ETH_P_ALL}, ClassId: netlink.MakeHandle(1, 1),
			Sel: &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL, Nkeys: 1, Keys: []netlink.TcU32Key{{}}}})
	}
	tbf := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: lan.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, Rate: 1 << 20, Limit: 1 << 16, Buffer: 1 << 14}
	ensure := func(link netlink.Link) error {
		if err := netlink.QdiscAdd(clsact(link.Attrs().Index)); !errors.Is(err, unix.EEXIST) {
			return err
		}
		return nil
	}
	return errors.Join(ensure(wan), ensure(lan), netlink.QdiscAdd(tbf), filter(wan, netlink.HANDLE_MIN_INGRESS, 10), filter(lan, netlink.HANDLE_MIN_EGRESS, 20))
}
