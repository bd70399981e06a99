// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// diary is a Prober that records the results of another one, one letter per probe.
type diary struct {
	Prober
	mu      sync.Mutex
	answers map[string]string // by backend
}

func (d *diary) Probe(ctx context.Context, t *Target) error {
	err := d.Prober.Probe(ctx, t)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answers[t.Backend] += map[bool]string{true: "+", false: "-"}[err == nil]
	return err
}

// events returns the changes caused by these results. The first probe decides, later fall consecutive bad or rise
// good ones. Each event has the number of probes up to then.
func (d *diary) events(backend string, rise, fall int) (events []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	up, row := false, 0
	for i, a := range d.answers[backend] {
		good := a == '+'
		if i == 0 || good != (d.answers[backend][i-1] == '+') {
			row = 0
		}
		row++
		if i == 0 || good && !up && row == rise || !good && up && row == fall {
			up = good
			events = append(events, fmt.Sprintf("up=%v after %d probes", up, i+1))
		}
	}
	return events
}

// TestWindowInProbes: a real server on a real network is reported down after exactly fall failed probes, if it
// refuses or is silent. It is up again after rise good ones; the other server is unaffected. A late probe on a busy
// machine counts as failed.
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
	d := &diary{Prober: tcpProber{inside}, answers: map[string]string{}}
	var mu sync.Mutex
	events := map[string][]string{}
	m := New(Options{Probers: map[config.CheckType]Prober{config.CheckTCP: d}, OnChange: func(e Transition) {
		d.mu.Lock() // the backend's next probe begins after this
		probes := len(d.answers[e.Backend])
		d.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		events[e.Backend] = append(events[e.Backend], fmt.Sprintf("up=%v after %d probes", e.Up, probes))
	}})
	t.Cleanup(func() { m.Close() })
	m.Configure(cfg)
	waitFor := func(backend string, up bool) {
		t.Helper()
		labtest.Eventually(t, time.Minute, fmt.Sprintf("%s up=%v", backend, up), func() error {
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
	for _, b := range []string{"refuses", "is-silent", "works"} {
		labtest.Eventually(t, time.Minute, "events that suit the answers of "+b, func() error {
			want := d.events(b, rise, fall)
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(events[b], want) {
				return fmt.Errorf("events %v\nwant   %v", events[b], want)
			}
			return nil
		})
	}
	if err := m.Close(); err != nil {
		t.Error(err)
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
