// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// diary is a Prober that writes down what another one answered.
type diary struct {
	Prober
	mu  sync.Mutex
	bad map[string]int // failed probes in a row, by backend
	all map[string]int
}

func (d *diary) Probe(ctx context.Context, t *Target) error {
	err := d.Prober.Probe(ctx, t)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all[t.Backend]++
	if d.bad[t.Backend]++; err == nil {
		d.bad[t.Backend] = 0
	}
	return err
}

// TestWindowInProbes: real servers behind a real network are reported down after
// fall failed probes, neither more nor fewer, whether they refuse or are silent,
// and up again after rise good ones; the other server is not touched.
func TestWindowInProbes(t *testing.T) {
	topology := lab.Balancer()
	topology.Name = "health"
	l := labtest.New(t, topology)
	gateway := l.Node("gateway")
	inside := func(ctx context.Context, network, address string, mark uint32) (conn net.Conn, err error) {
		err = gateway.Do(func() error { conn, err = dial(ctx, network, address, mark); return err })
		return conn, err
	}
	serve := func() net.Listener { return listenIn(t, l.Node("s1"), "10.0.2.2:8080") }
	refusing := serve()
	listenIn(t, l.Node("s2"), "10.0.2.3:8080")
	listenIn(t, l.Node("s3"), "10.0.2.4:8080")

	const rise, fall = 2, 3
	cfg := &config.Config{Services: []config.Service{{Name: "web", Mode: config.ModeDNAT, Protocol: 6,
		Listen: []config.Listen{{Address: netip.MustParseAddr("192.0.2.10")}},
		Check: &config.Check{Type: config.CheckTCP, Interval: config.Duration(300 * time.Millisecond), Timeout: config.Duration(200 * time.Millisecond),
			Rise: rise, Fall: fall},
		Backends: []config.Backend{
			{Name: "refuses", Address: netip.MustParseAddr("10.0.2.2"), Port: 8080},
			{Name: "is-silent", Address: netip.MustParseAddr("10.0.2.3"), Port: 8080},
			{Name: "works", Address: netip.MustParseAddr("10.0.2.4"), Port: 8080},
		}}}}
	cfg.SetDefaults()
	d := &diary{Prober: tcpProber{inside}, bad: map[string]int{}, all: map[string]int{}}
	var mu sync.Mutex
	var events []string
	m := New(Options{Probers: map[config.CheckType]Prober{config.CheckTCP: d}, OnChange: func(e Event) {
		d.mu.Lock()
		bad := d.bad[e.Backend]
		d.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		events = append(events, fmt.Sprintf("%s up=%v after %d bad", e.Backend, e.Up, bad))
	}})
	t.Cleanup(func() { m.Close() })
	m.Configure(cfg)
	waitFor := func(backend string, up bool) {
		t.Helper()
		labtest.Eventually(t, 20*time.Second, fmt.Sprintf("%s up=%v", backend, up), func() error {
			if is, known := m.Healthy("web", backend); !known || is != up {
				return errors.New(m.Why("web", backend))
			}
			return nil
		})
	}
	for _, b := range []string{"refuses", "is-silent", "works"} {
		waitFor(b, true)
	}
	refusing.Close()
	waitFor("refuses", false)
	setLink(t, l.Node("s2"), "eth0", netlink.LinkSetDown)
	waitFor("is-silent", false)
	serve()
	waitFor("refuses", true)
	setLink(t, l.Node("s2"), "eth0", netlink.LinkSetUp)
	waitFor("is-silent", true)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	want := map[string]int{
		"refuses up=true after 0 bad": 2, "is-silent up=true after 0 bad": 2, "works up=true after 0 bad": 1,
		fmt.Sprintf("refuses up=false after %d bad", fall): 1, fmt.Sprintf("is-silent up=false after %d bad", fall): 1,
	}
	got := map[string]int{}
	for _, e := range events {
		got[e]++
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("events %v\nwant   %v", got, want)
	}
}

// setLink takes a node's link down or up.
func setLink(t *testing.T, n *lab.Node, name string, f func(netlink.Link) error) {
	t.Helper()
	err := n.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(l)
	})
	if err != nil {
		t.Fatal(err)
	}
}
