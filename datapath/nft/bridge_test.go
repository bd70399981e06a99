// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestServersOnABridge: if bridged frames traverse the rules, a server on a bridge cannot use its own outside
// address, because a bridge sends no frame back to its ingress port. Warnings and explain report it.
func TestServersOnABridge(t *testing.T) {
	b := newBench(t, lab.Balancer())
	ip := func(args string) {
		t.Helper()
		if out, err := b.gateway.Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
	pass := func(value string) error {
		return b.gateway.Do(func() error { return os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte(value), 0) })
	}
	for _, args := range []string{"link add br9 type bridge", "addr add 10.9.0.1/24 dev br9", "link set br9 up",
		"link add p9 type veth peer name q9", "link set p9 master br9", "link set p9 up", "link set q9 up"} {
		ip(args)
	}
	there := pass("0") == nil // the kernel may have no br_netfilter
	l := listen("10.0.1.1", "80")
	for owner, c := range map[string]*config.Config{
		"service web: backend a": one(config.Service{Name: "web", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
			Listen: []config.Listen{l}, Backends: []config.Backend{backend("a", "10.9.0.2", 8080)}}),
		"nat http: the target": {NAT: []config.NATRule{{Name: "http", Type: config.NATPortForward, Protocol: flow.TCP, Listen: &l,
			To: config.Target{Address: addr("10.9.0.2"), Port: 8080}}}},
	} {
		b.apply(c)
		told := func(when string, want bool) {
			t.Helper()
			if got := slices.ContainsFunc(b.d.Warnings(), func(w string) bool { return strings.HasPrefix(w, owner+" is on the bridge br9") }); got != want {
				t.Errorf("%s: %s is told: %v; %q", when, owner, got, b.d.Warnings())
			}
			e, err := b.d.Explain(t.Context(), datapath.Question{Interface: "br9", Tuple: flow.Tuple{Protocol: flow.TCP,
				Source: netip.MustParseAddrPort("10.9.0.2:4000"), Dest: netip.MustParseAddrPort("10.0.1.1:80")}})
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.ContainsFunc(e.Notes, func(n string) bool { return strings.HasPrefix(n, "the client is on the bridge br9") }); got != want {
				t.Errorf("%s: %s is explained: %v; %q", when, owner, got, e.Notes)
			}
		}
		told("frames do not pass", false)
		if !there {
			continue
		}
		if err := pass("1"); err != nil {
			t.Fatal(err)
		}
		told("frames pass", true)
		ip("link set p9 type bridge_slave hairpin on")
		told("hairpin mode", false)
		ip("link set p9 type bridge_slave hairpin off")
		if err := pass("0"); err != nil {
			t.Fatal(err)
		}
	}
}
