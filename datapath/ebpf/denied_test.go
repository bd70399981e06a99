// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/model"
)

// denyYAML returns a configuration that only denies prefixes.
func denyYAML(prefixes []netip.Prefix) string {
	var b strings.Builder
	b.WriteString("firewall:\n  rules: [{name: bad, action: drop, hook: ingress, source: \"@bad\"}]\n  sets:\n    bad:\n")
	for _, p := range prefixes {
		fmt.Fprintf(&b, "      - %q\n", p)
	}
	return b.String() + "nat: [{name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}]\n"
}

// randomAddress returns an address. Few bits differ, so that addresses share prefixes.
func randomAddress(r *rand.Rand, v6 bool) netip.Addr {
	if !v6 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], 198<<24+18<<16+r.Uint32()>>r.IntN(33)&0xffff)
		return netip.AddrFrom4(b)
	}
	b := [16]byte{0x20, 0x01, 0x0d, 0xb8}
	for i := 4 + r.IntN(13); i < 16; i++ {
		b[i] = byte(r.IntN(4))
	}
	return netip.AddrFrom16(b)
}

// TestDeniedPrefixes denies random prefixes of all lengths. A source is denied if and only if a prefix contains
// it, on the short path and for packets that need the full path.
func TestDeniedPrefixes(t *testing.T) {
	for _, hook := range []string{"xdp", "tc"} {
		t.Run(hook, func(t *testing.T) {
			s := changingAt(t, hook, denyYAML([]netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}))
			for seed := range uint64(6) {
				r := rand.New(rand.NewPCG(seed, 0))
				var prefixes []netip.Prefix
				for range []int{1, 40, 400, 4000}[r.IntN(4)] {
					a := randomAddress(r, r.IntN(2) == 0)
					shortest := a.BitLen() * min(int(seed), 4) / 5
					p, _ := a.Prefix(shortest + r.IntN(a.BitLen()-shortest+1))
					prefixes = append(prefixes, p)
				}
				s.mustChange(denyYAML(prefixes))
				for range 1000 {
					from := randomAddress(r, r.IntN(2) == 0)
					if r.IntN(2) == 0 {
						from = prefixes[r.IntN(len(prefixes))].Addr()
					}
					want := slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(from) })
					packet := fmt.Sprintf("ip4(src=%s,dst=198.51.100.1)/udp(sport=1,dport=2)", from)
					if from.Is6() {
						between := []string{"", "/hbh()", "/dstopts()"}[r.IntN(3)]
						packet = fmt.Sprintf("ip6(src=%s,dst=2001:db8:ffff::1)%s/udp(sport=1,dport=2)", from, between)
					}
					if out := send(t, s, "wan0", packet); (out.Reason == model.ReasonDenied) != want {
						t.Fatalf("seed %d, %d prefixes, %s: %s, denied is %v", seed, len(prefixes), packet, out.Reason, want)
					}
				}
			}
		})
	}
}

// deniedBalancer is a balancer with firewall rules.
func deniedBalancer(rules string, sets ...string) string {
	yaml := "services: [{name: names, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: 5353}]}]\n" +
		"tables: {flows: 4096, flows6: 4096}\nfirewall:\n  sets:\n    other: [198.18.0.0/15]\n"
	for _, s := range sets {
		yaml += "    " + s + "\n"
	}
	return yaml + "  rules: [" + rules + "]\n"
}

// TestDeniedStaysDenied changes rules and sets while a denied client sends: the set grows and
// shrinks, and the rule moves from the table of denied sources to the list of rules and back. No
// packet passes before the client is removed from the set.
func TestDeniedStaysDenied(t *testing.T) {
	var many strings.Builder
	for i := range 30000 {
		fmt.Fprintf(&many, ", 172.%d.%d.%d", 16+i>>16, i>>8&0xff, i&0xff)
	}
	const deny, accept, ping, late = "{name: bad, action: drop, hook: ingress, source: \"@bad\"}", "{name: good, action: accept, hook: ingress, source: \"@other\"}",
		"{name: ping, action: drop, hook: ingress, protocol: icmp, source: \"@bad\"}", "{name: late, action: drop, hook: ingress, protocol: tcp, ports: [25]}"
	few, lots := "bad: [10.0.1.2]", "bad: [10.0.1.0/30"+many.String()+"]"
	steps := []string{
		deniedBalancer(deny, few), deniedBalancer(deny, lots), deniedBalancer(deny, few), deniedBalancer(accept+", "+deny, few), deniedBalancer(deny, lots),
		deniedBalancer(ping+", "+accept+", "+deny, few), deniedBalancer(late+", "+deny, few), deniedBalancer(accept+", "+deny+", "+late, lots),
		deniedBalancer(deny+", "+late+", "+accept, few), deniedBalancer(late+", "+accept+", "+deny, few), deniedBalancer(late + ", {action: drop, hook: ingress, source: 10.0.1.2}"),
	}
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			d := gateway(t, l.Node("gateway"), hook, steps[0])
			load := startNumbered(t, l.Node("client"), "192.0.2.10:53", ":5353", l.Node("s1"))
			load.await(5)
			for i, step := range append(steps[1:], steps[0]) {
				apply(t, d, hook, step)
				load.await(2)
				if n := len(load.arrivals()); n > 0 {
					t.Fatalf("%d packets of the denied client passed by the end of change %d\n%.300s", n, i, step)
				}
			}
			apply(t, d, hook, deniedBalancer(late, few))
			load.await(20)
			if err := load.stream.Stop(); err != nil {
				t.Fatal(err)
			}
			if len(load.arrivals()) == 0 {
				t.Error("no packet of the client passes after its rule is removed")
			}
		})
	}
}

// TestDeniedChanges checks that a plan counts the sources by which a set changes, and that applying
// the same sources again writes nothing.
func TestDeniedChanges(t *testing.T) {
	prefixes := func(list ...string) (all []netip.Prefix) {
		for _, p := range list {
			all = append(all, netip.MustParsePrefix(p))
		}
		return all
	}
	s := changing(t, denyYAML(prefixes("192.0.2.1/32", "192.0.2.2/32", "2001:db8::/32")))
	table := func() (id uint32) {
		if err := s.d.t.Maps["denied"].Lookup(uint32(0), &id); err != nil {
			t.Fatal(err)
		}
		return id
	}
	for _, c := range []struct {
		sources        []netip.Prefix
		added, removed int
	}{
		{prefixes("2001:db8::/32", "192.0.2.2/32", "192.0.2.1/32", "192.0.2.1/32"), 0, 0},
		{prefixes("192.0.2.2/32", "192.0.2.3/32", "2001:db8::/32", "2001:db8::/33"), 2, 1},
		{prefixes("0.0.0.0/0", "::/0", "0.0.0.0/32"), 3, 4},
	} {
		next, err := config.Decode("denied", []byte(denyYAML(c.sources)))
		if err != nil {
			t.Fatal(err)
		}
		before, snapshot := table(), *s.snapshot
		snapshot.Config = next
		var change *datapath.Change
		if err := s.inside(func() (err error) { change, err = s.d.Plan(context.Background(), &snapshot); return err }); err != nil {
			t.Fatal(err)
		}
		if change.Elements.Added != c.added || change.Elements.Removed != c.removed {
			t.Errorf("%v: %d sources added and %d removed, want %d and %d", c.sources, change.Elements.Added, change.Elements.Removed, c.added, c.removed)
		}
		s.mustChange(denyYAML(c.sources))
		if same := table() == before; same != (c.added+c.removed == 0) {
			t.Errorf("%v: the table is the same one: %v", c.sources, same)
		}
	}
	for _, from := range []string{"ip4(src=203.0.113.9,dst=198.51.100.1)", "ip6(src=fd00::9,dst=2001:db8:ffff::1)"} {
		if out := send(t, s, "wan0", from+"/udp(sport=1,dport=2)"); out.Reason != model.ReasonDenied {
			t.Errorf("%s: %s, want denied", from, out.Reason)
		}
	}
}
