// SPDX-License-Identifier: Apache-2.0

package uplink

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-lb/sluice/config"
)

// viewOf returns an uplink that is up, with addresses and, with next, a next hop in both families.
func viewOf(name string, priority int, next bool, addresses ...string) view {
	v := view{Uplink: config.Uplink{Name: name, Interface: name, Priority: priority, Weight: 1}}
	for _, a := range addresses {
		p := netip.MustParsePrefix(a)
		v.addresses = append(v.addresses, addressed{p.Addr(), p.Masked()})
	}
	if next {
		v.next = [2]*hop{{}, {}}
	}
	return v
}

// TestPrefixesAreDisjoint: each source address belongs to at most one uplink, and an address of an interface to that
// interface, unless another one has it too.
func TestPrefixesAreDisjoint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var views []view
		owners := map[netip.Addr]int{}
		for i := range rapid.IntRange(1, 4).Draw(t, "uplinks") {
			v := view{Uplink: config.Uplink{Name: string(rune('a' + i))}}
			for range rapid.IntRange(0, 3).Draw(t, "addresses") {
				a := netip.AddrFrom4([4]byte{192, 168, byte(rapid.IntRange(0, 2).Draw(t, "net")), byte(rapid.IntRange(1, 20).Draw(t, "host"))})
				v.addresses = append(v.addresses, addressed{a, netip.PrefixFrom(a, rapid.IntRange(22, 32).Draw(t, "bits")).Masked()})
				owners[a]++
			}
			views = append(views, v)
		}
		assignPrefixes(views)
		for i := range views {
			for j := range views {
				for n, p := range views[i].prefixes {
					for m, q := range views[j].prefixes {
						if (i != j || n != m) && p.Overlaps(q) {
							t.Fatalf("%s of %s overlaps %s of %s", p, views[i].Name, q, views[j].Name)
						}
					}
				}
			}
			for _, a := range views[i].addresses {
				contains := slices.ContainsFunc(views[i].prefixes, func(p netip.Prefix) bool { return p.Contains(a.address) })
				if !contains && owners[a.address] == 1 {
					t.Fatalf("%s does not belong to %s: %v", a.address, views[i].Name, views[i].prefixes)
				}
			}
		}
	})
}

// TestChoice: the usable uplinks with the lowest priority carry new connections of a family.
func TestChoice(t *testing.T) {
	first := viewOf("first", 1, true, "198.51.100.2/24")
	second := viewOf("second", 2, true, "192.0.2.2/24", "2001:db8::2/64")
	for name, c := range map[string]struct {
		change func(views []view)
		want   [2][2]bool // by uplink and family
		why    string     // of the first uplink
	}{
		"both work":  {func([]view) {}, [2][2]bool{{true, false}, {false, true}}, "not for IPv6: interface first has no IPv6 address"},
		"one class":  {func(v []view) { v[1].Priority = 1 }, [2][2]bool{{true, false}, {true, true}}, "not for IPv6: interface first has no IPv6 address"},
		"first down": {func(v []view) { v[0].down = "interface first is down" }, [2][2]bool{{false, false}, {true, true}}, "interface first is down"},
		"no route": {func(v []view) { v[0].next = [2]*hop{} }, [2][2]bool{{false, false}, {true, true}},
			"no next hop: interface first has no IPv4 default route, and the uplink no gateway"},
		"no address": {func(v []view) { v[0].addresses = nil }, [2][2]bool{{false, false}, {true, true}}, "interface first has no IPv4 address"},
		"no IPv4 address": {func(v []view) {
			v[0].addresses, v[1].Priority = v[1].addresses[1:], 1
		}, [2][2]bool{{false, true}, {true, true}}, "not for IPv4: interface first has no IPv4 address"},
		"no IPv6 anywhere": {func(v []view) { v[1].addresses = v[1].addresses[:1] }, [2][2]bool{{true, false}, {false, false}}, ""},
		"no IPv6 address": {func(v []view) {
			v[0].addresses, v[1].addresses = v[1].addresses, v[0].addresses
		}, [2][2]bool{{true, true}, {false, false}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			views := []view{first, second}
			c.change(views)
			for f := range families {
				New(Options{}).choose(views, f)
			}
			for i := range views {
				if views[i].carries != c.want[i] {
					t.Errorf("%s carries %v, want %v", views[i].Name, views[i].carries, c.want[i])
				}
			}
			if got := views[0].status(nil).Why; got != c.why {
				t.Errorf("why %q, want %q", got, c.why)
			}
		})
	}
}

// TestEveryTableEnds: the table of each uplink has a last route, so that no packet of an uplink without a next hop takes
// a route of another table.
func TestEveryTableEnds(t *testing.T) {
	views := []view{viewOf("first", 1, false, "198.51.100.2/24"), viewOf("second", 2, true, "192.0.2.2/24")}
	for i := range views {
		views[i].table, views[i].mark, views[i].index = FirstTable+i, config.Uplink{}.Mark(i), i+1
	}
	New(Options{}).choose(views, 0)
	rules, routes := wanted(views, 0)
	for i := range views {
		if !slices.Contains(routes, route{table: FirstTable + i}) {
			t.Errorf("no last route for %s: %v", views[i].Name, routes)
		}
		if !slices.Contains(rules, rule{priority: markRule, mark: views[i].mark, table: FirstTable + i}) {
			t.Errorf("no rule for the mark of %s: %v", views[i].Name, rules)
		}
	}
}
