// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestBackendsFollowWhileALinkIsDown takes the link to a dsr server down: that must not
// keep the backends of other services in use that fail meanwhile.
func TestBackendsFollowWhileALinkIsDown(t *testing.T) {
	b := newBench(t, lab.Balancer())
	c := one(config.Service{
		Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
		Listen: []config.Listen{listen("192.0.2.30", "80")}, Backends: []config.Backend{backend("a", "10.0.2.2", 0)},
	})
	c.Services = append(c.Services, web(config.ModeDNAT, config.SchedulerMaglev))
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
	other := *c
	if _, err := b.d.Apply(context.Background(), b.snapshot(&other)); err == nil {
		t.Error("a configuration that does not fit the host was taken")
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
