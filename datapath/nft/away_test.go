// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestBackendsFollowWhileALinkIsDown sets the link to a dsr server down. Failed backends of other services must
// still be removed from service.
func TestBackendsFollowWhileALinkIsDown(t *testing.T) {
	b := newBench(t, lab.Balancer())
	c := one(config.Service{
		Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
		Listen: []config.Listen{listen("192.0.2.30", "80")}, Backends: []config.Backend{backend("a", "10.0.2.2", 0)},
	})
	other := web(config.ModeDNAT, config.SchedulerMaglev)
	other.Hairpin = config.SwitchOff // otherwise the rules contain the networks of the link, and its IPv6 addresses disappear with it
	c.Services = append(c.Services, other)
	b.apply(c)
	before := b.ruleset()
	set := func(up func(*netlink.Handle, netlink.Link) error) {
		t.Helper()
		h, err := b.gateway.Handle()
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		lan, err := h.LinkByName("lan0")
		if err := errors.Join(err, up(h, lan)); err != nil {
			t.Fatal(err)
		}
	}
	set((*netlink.Handle).LinkSetDown)
	s := b.snapshot(c)
	s.Services[1].State[0] = datapath.Down
	if change := b.applySnapshot(s); change.Empty() {
		t.Error("the backend that went down is still used")
	}
	said := func(w string) bool { return strings.Contains(w, "backend a") && strings.Contains(w, "10.0.2.2") }
	if w := b.d.Warnings(); !slices.ContainsFunc(w, said) {
		t.Errorf("the warnings %q do not tell that a server is away", w)
	}
	same := *c
	if _, err := b.d.Apply(context.Background(), b.snapshot(&same)); err != nil {
		t.Errorf("a new configuration: %v", err)
	}
	if w := b.d.Warnings(); !slices.ContainsFunc(w, said) {
		t.Errorf("the warnings %q of the new configuration do not tell that a server is away", w)
	}
	set((*netlink.Handle).LinkSetUp)
	b.apply(c)
	if after := b.ruleset(); after != before {
		t.Errorf("the link is back, but the rules are\n%s\nnot\n%s", after, before)
	}
	if w := b.d.Warnings(); slices.ContainsFunc(w, said) {
		t.Errorf("the link is back, but the warnings are %q", w)
	}
}

// TestAServerThatWasNeverThere: a dsr backend that is behind a router does not prevent the apply of changes to
// other services.
func TestAServerThatWasNeverThere(t *testing.T) {
	b := newBench(t, lab.Balancer())
	ip := func(args ...string) {
		t.Helper()
		if out, err := b.gateway.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("route", "replace", "unreachable", "10.77.0.0/24")
	c := one(config.Service{
		Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
		Listen: []config.Listen{listen("192.0.2.30", "80")}, Backends: []config.Backend{backend("far", "10.77.0.2", 0)},
	})
	c.Services = append(c.Services, web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	ip("route", "replace", "10.77.0.0/24", "via", "10.0.2.2")
	for _, state := range []datapath.State{datapath.Down, datapath.Up} {
		s := b.snapshot(c)
		s.Services[1].State[0] = state
		if change := b.applySnapshot(s); change.Empty() {
			t.Error("a change of another service was not applied")
		}
		told := 0
		for _, w := range b.d.Warnings() {
			if strings.Contains(w, "backend far") && strings.Contains(w, "router 10.0.2.2") && strings.Contains(w, "gets no connections") {
				told++
			}
		}
		if told != 1 {
			t.Errorf("the warnings %q", b.d.Warnings())
		}
	}
}

// TestAbsentInterfacesAreTold: the kernel accepts a rule for an interface that does not exist or was renamed,
// and the rule has no effect. A warning reports it.
func TestAbsentInterfacesAreTold(t *testing.T) {
	b := newBench(t, lab.Balancer())
	c := &config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}, Out: "wan0"}}}
	c.Firewall.Rules = []config.FirewallRule{{Name: "local", Action: config.ActionDrop, In: "lo"}}
	told := func(want bool) {
		t.Helper()
		b.applySnapshot(b.snapshot(c))
		w := strings.Join(b.d.Warnings(), "\n")
		if strings.Contains(w, "nat office: there is no interface wan0") != want || strings.Contains(w, "interface lo") {
			t.Errorf("warnings %q, want one of wan0: %v", w, want)
		}
	}
	told(false)
	for _, name := range []string{"ppp0", "wan0"} {
		h, err := b.gateway.Handle()
		if err != nil {
			t.Fatal(err)
		}
		before := map[string]string{"ppp0": "wan0", "wan0": "ppp0"}[name]
		wan, err := h.LinkByName(before)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(h.LinkSetDown(wan), h.LinkSetName(wan, name), h.LinkSetUp(wan)); err != nil {
			t.Fatal(err)
		}
		h.Close()
		told(name == "ppp0")
	}
}

// TestMasqueradeWaitsForItsInterface: a rule with a missing egress interface is accepted with a warning. It
// takes effect when the interface appears, at first without an address.
func TestMasqueradeWaitsForItsInterface(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	c := &config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "later0"}}}
	b.apply(c)
	if w := strings.Join(b.d.Warnings(), "\n"); !strings.Contains(w, "nat office: there is no interface later0") {
		t.Errorf("warnings %q", w)
	}
	h, err := b.gateway.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	wan, err := h.LinkByName("wan0")
	if err != nil {
		t.Fatal(err)
	}
	routes, err := h.RouteList(wan, netlink.FAMILY_V4)
	addresses, err2 := h.AddrList(wan, netlink.FAMILY_V4) // the kernel removes IPv6 addresses itself
	if err := errors.Join(err, err2, h.LinkSetDown(wan), h.LinkSetName(wan, "later0")); err != nil {
		t.Fatal(err)
	}
	for i := range addresses {
		addresses[i].Label = "" // the kernel derives the label from the name
		if err := h.AddrDel(wan, &addresses[i]); err != nil {
			t.Fatal(err)
		}
	}
	b.apply(c)
	if w := strings.Join(b.d.Warnings(), "\n"); !strings.Contains(w, "nat office: interface later0 has no address") {
		t.Errorf("without an address the warnings are %q", w)
	}
	for i := range addresses {
		if err := h.AddrAdd(wan, &addresses[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.LinkSetUp(wan); err != nil {
		t.Fatal(err)
	}
	for i := range routes {
		if err := h.RouteReplace(&routes[i]); err != nil {
			t.Fatal(err)
		}
	}
	b.apply(c)
	if w := strings.Join(b.d.Warnings(), "\n"); strings.Contains(w, "later0") {
		t.Errorf("with an address the warnings are %q", w)
	}
	if a, err := b.tcp("pc", "", "203.0.113.1:80"); err != nil || a.client.Addr() != addr("211.155.226.121") {
		t.Errorf("the server saw %v, %v", a.client, err)
	}
}
