// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// dsr is a service of mode dsr that is checked via its address.
func dsr(address string, servers ...string) *config.Config {
	s := config.Service{Name: "video", Mode: config.ModeDSR, Protocol: 6,
		Listen: []config.Listen{{Address: netip.MustParseAddr(address)}},
		Check:  &config.Check{Type: config.CheckTCP, Port: 80, Via: "service", Timeout: config.Duration(20 * time.Second), Interval: config.Duration(time.Minute)}}
	for _, a := range servers {
		s.Backends = append(s.Backends, config.Backend{Address: netip.MustParseAddr(a)})
	}
	c := &config.Config{Services: []config.Service{s}}
	c.SetDefaults()
	return c
}

// listenIn listens in a node's namespace until the test ends.
func listenIn(t *testing.T, n *lab.Node, address string) net.Listener {
	t.Helper()
	var l net.Listener
	if err := n.Do(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	return l
}

// TestProbeViaService: a probe via the service detects whether the server answers on the service's address, unlike a
// probe of the server's own address. It leaves neither rules nor routes behind.
func TestProbeViaService(t *testing.T) {
	topology := lab.Balancer()
	topology.Name = "health"
	for i := range topology.Nodes {
		if n := &topology.Nodes[i]; n.Name == "gateway" { // so that the test can take a link down and up
			n.Sysctls = map[string]string{"net.ipv6.conf.all.keep_addr_on_down": "1"}
		}
	}
	l := labtest.New(t, topology)
	gateway := l.Node("gateway")
	for _, c := range []struct{ name, vip, first, second string }{
		{"IPv4", "192.0.2.30", "10.0.2.2", "10.0.2.3"},
		{"IPv6", "2001:db8::30", "fd00:2::2", "fd00:2::3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// s1 serves the service's address, s2 only its own.
			listenIn(t, l.Node("s1"), netip.AddrPortFrom(netip.MustParseAddr(c.vip), 80).String())
			listenIn(t, l.Node("s2"), netip.AddrPortFrom(netip.MustParseAddr(c.second), 80).String())
			m := New(Options{})
			cfg := dsr(c.vip, c.first, c.second)
			ask := func(i int) (err error) {
				target := target(&cfg.Services[0], i)
				ctx, cancel := context.WithTimeout(t.Context(), target.Check.Timeout.D())
				defer cancel()
				if e := gateway.Do(func() error { err = m.runProber(ctx, &target); return nil }); e != nil {
					t.Fatal(e)
				}
				return err
			}
			// At first addresses may still be looked for duplicates of.
			labtest.Eventually(t, time.Minute, "s1, which serves the address, to answer", func() error { return ask(0) })
			if err := ask(1); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("s2 does not serve %s: %v", c.vip, err)
			}
			if got := ourRules(t, gateway); got != 2 {
				t.Errorf("%d rules for two backends", got)
			}
			// The kernel removes the routes of a link that is set down; probes must not use another path.
			setLink(t, gateway, "lan0", netlink.LinkSetDown)
			if err := ask(0); err == nil {
				t.Error("good although the link is down")
			}
			setLink(t, gateway, "lan0", netlink.LinkSetUp)
			labtest.Eventually(t, time.Minute, "the probe to work again", func() error { return ask(0) })
			// An address of the gateway itself cannot be probed so.
			cfg.Services[0].Listen[0].Address = netip.MustParseAddr(map[string]string{"IPv4": "10.0.2.100", "IPv6": "fd00:2::100"}[c.name])
			if err := ask(0); err == nil || !strings.Contains(err.Error(), "is an address of this host") {
				t.Errorf("the gateway's own address: %v", err)
			}
			if err := gateway.Do(func() error { return m.Close() }); err != nil {
				t.Error(err)
			}
			if got := ourRules(t, gateway); got != 0 {
				t.Errorf("%d rules left behind", got)
			}
		})
	}
}

// ourRules counts the rules and routes of probes in n.
func ourRules(t *testing.T, n *lab.Node) (rules int) {
	t.Helper()
	err := n.Do(func() error {
		list, err := netlink.RuleList(netlink.FAMILY_ALL)
		for _, r := range list {
			if r.Priority == pathRules {
				rules++
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

func TestPathMarks(t *testing.T) {
	var p paths
	seen := map[uint32]bool{}
	for i := range maxPaths {
		m, err := p.mark(backendKey{"video", string(rune('a' + i))})
		if err != nil || seen[m] || m < pathMark || m >= pathMark+maxPaths {
			t.Fatal(m, err)
		}
		seen[m] = true
	}
	if _, err := p.mark(backendKey{"video", "one more"}); err == nil {
		t.Error("more marks than there are")
	}
	if err := p.removeUnused(func(k backendKey) bool { return k.backend != "a" }); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if m, err := p.mark(backendKey{"video", "one more"}); err != nil || m != pathMark {
		t.Error("a freed mark is not used again", m, err)
	}
}
