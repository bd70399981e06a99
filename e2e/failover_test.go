// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestUplinkFailsOver moves the default route to another uplink and back, and to a link without translation.
// Meanwhile a host sends from one port without a pause, as SIP phones and VPNs do. Its packets must get the
// source address of the new link; no other source gets an answer there.
func TestUplinkFailsOver(t *testing.T) {
	for name, rules := range map[string]string{
		"masquerade": "  - {name: office, type: masquerade, source: [10.1.10.0/24], out: [wan0, wan1]}\n",
		"snat": "  - {name: first, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}\n" +
			"  - {name: second, type: snat, source: [10.1.10.0/24], out: wan1, to: [172.16.100.1]}\n",
	} {
		t.Run(name, func(t *testing.T) {
			onDatapaths(t, func(t *testing.T, force string) { uplinkFailsOver(t, force+"nat:\n"+rules, "") })
		})
	}
	t.Run("masquerade with a source in the route", func(t *testing.T) {
		onDatapaths(t, func(t *testing.T, force string) {
			uplinkFailsOver(t, force+"nat:\n  - {name: office, type: masquerade, source: [10.1.10.0/24], out: [wan0, wan1]}\n", "211.155.226.200")
		})
	})
}

// answerSlowly answers datagrams as host.ServeDatagrams does, after the returned number of nanoseconds.
func answerSlowly(t *testing.T, n *lab.Node, at string) *atomic.Int64 {
	c, err := n.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var after atomic.Int64
	go func() {
		buf := make([]byte, 2048)
		for {
			_, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			time.AfterFunc(time.Duration(after.Load()), func() {
				_, _ = c.WriteTo([]byte(host.Answer{Name: n.Short(), Client: from.String()}.String()), from)
			})
		}
	}()
	return &after
}

func uplinkFailsOver(t *testing.T, config, src string) {
	l := labtest.New(t, lab.Office())
	gateway, outside := l.Node("gateway"), l.Node("outside")
	answerAfter := answerSlowly(t, outside, "203.0.113.10:5060")
	for i, name := range []string{"wan1", "vpn0"} {
		ip(t, gateway, fmt.Sprintf("link add %s type veth peer name far%d netns %s", name, i, outside.Name()))
		ip(t, gateway, fmt.Sprintf("addr add 172.16.%d.1/24 dev %s", 100+i, name))
		ip(t, gateway, "link set "+name+" up")
		ip(t, outside, fmt.Sprintf("addr add 172.16.%d.2/24 dev far%d", 100+i, i))
		ip(t, outside, fmt.Sprintf("link set far%d up", i))
	}
	ip(t, outside, "route replace 10.1.10.0/24 via 172.16.101.1")
	first := "default via 211.155.226.1 dev wan0"
	if src != "" {
		ip(t, gateway, "addr add "+src+"/24 dev wan0")
		first += " src " + src
	} else {
		src = officePublic
	}
	ip(t, gateway, "route replace "+first)
	d := start(t, gateway, config)
	ask := func(timeout time.Duration) (host.Answer, error) {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		return host.AskDatagram(ctx, l.Node("pc"), netip.MustParseAddrPort("10.1.10.20:5060"), netip.MustParseAddrPort("203.0.113.10:5060"))
	}
	seen := func(what, source string) {
		t.Helper()
		labtest.Eventually(t, patience, what, func() error {
			a, err := ask(time.Second)
			if err == nil && !strings.HasPrefix(a.Client, source+":") {
				err = fmt.Errorf("the server sees %s, not %s", a.Client, source)
			}
			return err
		})
	}
	seen("the first uplink", src)
	for _, way := range []struct{ route, source string }{
		{"default via 172.16.100.2 dev wan1", "172.16.100.1"},
		{first, src},
		{"default via 172.16.101.2 dev vpn0", "10.1.10.20"},
		{"default via 172.16.100.2 dev wan1", "172.16.100.1"},
	} {
		ip(t, gateway, "route replace "+way.route)
		seen(way.route, way.source)
	}
	// An answer to the inside address is in transit when the rules apply again.
	ip(t, gateway, "route replace default via 172.16.101.2 dev vpn0")
	seen("vpn0 again", "10.1.10.20")
	answerAfter.Store(int64(2 * time.Second))
	answered := make(chan error, 1)
	go func() {
		_, err := ask(3 * time.Second)
		answered <- err
	}()
	time.Sleep(50 * time.Millisecond) // until the request has left
	ip(t, gateway, "route replace default via 172.16.100.2 dev wan1")
	if err := <-answered; err != nil {
		t.Errorf("what came to the inside address after the failover: %v", err)
	}
	answerAfter.Store(0)
	seen("after an answer that was on its way", "172.16.100.1")
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}
