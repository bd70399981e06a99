// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestExplainNextHopObjects explains packets whose routes use next hop objects, single and in a group. With
// nexthop_compat_mode 0, the kernel does not repeat the gateways in routes.
func TestExplainNextHopObjects(t *testing.T) {
	b := newBench(t, lab.Office())
	const newNextHop, id, group, oif, gateway, routeObject = 104, 1, 2, 5, 6, 30
	number := func(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
	send := func(kind int, head []byte, attributes ...*nl.RtAttr) error {
		r := nl.NewNetlinkRequest(kind, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
		for _, a := range attributes {
			head = append(head, a.Serialize()...)
		}
		r.AddRawData(head)
		_, err := r.Execute(unix.NETLINK_ROUTE, 0)
		return err
	}
	route := func(to net.IP, object uint32) error {
		return send(unix.RTM_NEWROUTE, []byte{unix.AF_INET, 24, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST, 0, 0, 0, 0},
			nl.NewRtAttr(unix.RTA_DST, to.To4()), nl.NewRtAttr(routeObject, number(object)))
	}
	err := b.gateway.Do(func() error {
		wan, err := netlink.LinkByName("wan0")
		if err != nil {
			return err
		}
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/nexthop_compat_mode", []byte("0"), 0),
			send(newNextHop, []byte{unix.AF_INET, 0, unix.RTPROT_STATIC, 0, 0, 0, 0, 0}, nl.NewRtAttr(id, number(5)),
				nl.NewRtAttr(oif, number(uint32(wan.Attrs().Index))), nl.NewRtAttr(gateway, net.IPv4(211, 155, 226, 1).To4())),
			send(newNextHop, []byte{unix.AF_UNSPEC, 0, unix.RTPROT_STATIC, 0, 0, 0, 0, 0}, nl.NewRtAttr(id, number(3)), nl.NewRtAttr(group, append(number(5), 0, 0, 0, 0))),
			route(net.IPv4(198, 18, 1, 0), 5), route(net.IPv4(198, 18, 2, 0), 3))
	})
	if err != nil {
		t.Fatal(err)
	}
	b.apply(&config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0"}}})
	for _, to := range []string{"198.18.1.1:80", "198.18.2.1:80"} {
		e := b.explain(flow.TCP, "lan0", "10.1.10.20:4000", to)
		if e.Out != "wan0" || e.NextHop != addr("211.155.226.1") || e.Action+" "+e.Reason != "forward new-flow" {
			t.Errorf("%s: by %s to %s, %s %s, %q", to, e.Out, e.NextHop, e.Action, e.Reason, e.Notes)
		}
	}
}
