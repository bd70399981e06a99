// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

const remote1, remote2 = "198.51.100.2", "198.51.100.3"

// from expects that the next packets of an inside endpoint leave from a pool address.
func (s *subject) from(want, inside, remote string, sport int, what string) netip.AddrPort {
	s.t.Helper()
	got := s.outsideOf(inside, remote, sport)
	if got.Addr().String() != want {
		s.t.Errorf("%s leaves from %s, want %s", what, got, want)
	}
	return got
}

// TestMasqueradeFollowsItsAddress changes the address of the interface. No packet leaves with the old address
// any more: not for a client with ports there, not for an endpoint with a binding, and, after the next sweep,
// not for an active flow.
func TestMasqueradeFollowsItsAddress(t *testing.T) {
	for _, options := range []string{"", ", ports-per-client: 1000", ", ports: 2000-2999, port-block: 100", ", mapping: address-and-port-dependent"} {
		t.Run(options, func(t *testing.T) {
			yaml := "nat:\n  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0" + options + "}\n"
			s := changing(t, yaml)
			for _, remote := range []string{remote1, remote2} { // the second flow shares the binding
				s.from("198.51.100.1", "10.0.2.2", remote, 4000, "before")
			}
			s.from("198.51.100.1", "10.0.2.2", remote1, 4001, "before")
			if err := s.readdress("wan0", "198.51.100.1/24", "198.51.100.9/24"); err != nil {
				t.Fatal(err)
			}
			s.mustChange(yaml)
			s.from("198.51.100.9", "10.0.2.2", remote1, 4002, "a new flow of a client that has ports")
			fresh := s.from("198.51.100.9", "10.0.2.2", "198.51.100.4", 4000, "a new flow of an endpoint with a shared binding")
			if options != ", mapping: address-and-port-dependent" {
				if again := s.from("198.51.100.9", "10.0.2.2", "198.51.100.5", 4000, "one more"); again != fresh {
					t.Errorf("an endpoint leaves from %s and from %s", fresh, again)
				}
			}
			s.from("198.51.100.9", "10.0.2.2", "198.51.100.4", 4001, "a new flow of an endpoint whose flow held the binding")
			if err := s.sweep(); err != nil {
				t.Fatal(err)
			}
			s.from("198.51.100.9", "10.0.2.2", remote1, 4000, "a flow that sends on")
			s.from("198.51.100.9", "10.0.2.2", remote2, 4000, "a flow that sends on")
			s.from("198.51.100.9", "10.0.2.2", remote1, 4001, "a flow that sends on")
			s.expire()
			held{}.want(t, s, "all flows ended, all ports have rested")
			for n, m := range s.d.t.Blocks.Values {
				for b := range 10 { // number of blocks
					if m.Words[b/64]>>(b%64)&1 != 0 {
						t.Errorf("block %d of pool address %d is not given back", b, n)
					}
				}
			}
		})
	}
}

// TestAddressLeavesItsFlows removes two addresses from a snat pool: one that the host never had, and one that it
// keeps. TCP connections continue with it, UDP senders get another address, and no state remains.
func TestAddressLeavesItsFlows(t *testing.T) {
	yaml := func(pool string) string {
		return "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [" + pool + "]}\n"
	}
	for _, first := range []string{"203.0.113.1", "198.51.100.1"} {
		t.Run(first, func(t *testing.T) {
			s := changing(t, yaml(first))
			connection := func(why string) {
				t.Helper()
				out := send(t, s, "lan0", "ip4(src=10.0.2.3,dst="+remote1+")/tcp(sport=4000,dport=80,flags=A)")
				if len(out.Out) != 1 {
					t.Fatalf("%s: %v %v", why, out.Action, out.Reason)
				}
				if ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame)); ip.Src.String() != first {
					t.Errorf("%s leaves from %s, want %s", why, ip.Src, first)
				}
			}
			was := s.from(first, "10.0.2.2", remote1, 4000, "before")
			connection("before")
			s.mustChange(yaml("203.0.113.7"))
			connection("a connection that was there")
			out := send(t, s, "wan0", fmt.Sprintf("ip4(src=%s,dst=%s)/udp(sport=53,dport=%d)", remote1, was.Addr(), was.Port()))
			if len(out.Out) != 0 {
				t.Errorf("an answer to the address that left: %v %v", out.Action, out.Reason)
			}
			s.from("203.0.113.7", "10.0.2.2", remote1, 4000, "a flow that sends on")
			s.from("203.0.113.7", "10.0.2.2", remote2, 4000, "a new flow of the same endpoint")
			// The address returns: its flows continue.
			s.mustChange(yaml(first + ", 203.0.113.7"))
			s.from("203.0.113.7", "10.0.2.2", remote1, 4000, "the first flow")
			connection("the connection of before")
			s.expire()
			held{}.want(t, s, "all flows ended, all ports have rested")
		})
	}
}

// TestClientsLeaveAnAddress replaces one of two pool addresses. Clients of this address get another one, clients
// with blocks after the hold-down of their ports. All other clients keep theirs.
func TestClientsLeaveAnAddress(t *testing.T) {
	for _, options := range []string{"", ", ports: 2000-2999, port-block: 10"} {
		t.Run(options, func(t *testing.T) {
			yaml := func(pool string) string {
				return "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [" + pool + "]" + options + "}\n"
			}
			s := changing(t, yaml("203.0.113.1, 203.0.113.2"))
			before := map[string]netip.Addr{}
			count := map[string]int{}
			for i := range 30 {
				client := fmt.Sprintf("10.0.2.%d", 20+i)
				before[client] = s.outsideOf(client, remote1, 4000).Addr()
				count[before[client].String()]++
			}
			if len(count) != 2 {
				t.Fatalf("clients have %v", count)
			}
			s.mustChange(yaml("203.0.113.2, 203.0.113.3"))
			for client, was := range before {
				is := s.outsideOf(client, remote1, 4001).Addr()
				if blocks := options != ""; blocks && is != was || !blocks && is.String() == "203.0.113.1" || was.String() == "203.0.113.2" && is != was {
					t.Errorf("%s had %s and has %s", client, was, is)
				}
				if again := s.outsideOf(client, remote2, 4000).Addr(); again != is {
					t.Errorf("%s has %s and %s", client, is, again)
				}
			}
			s.expire()
			held{}.want(t, s, "all flows ended, all ports have rested")
			for client := range before {
				if is := s.outsideOf(client, remote1, 4002).Addr(); is.String() == "203.0.113.1" {
					t.Errorf("%s still has %s", client, is)
				}
			}
		})
	}
}

// TestBlocksKeepOneMapping removes the address of a client's block from the pool. While the client keeps the
// block, an endpoint still has one mapping for all destinations.
func TestBlocksKeepOneMapping(t *testing.T) {
	yaml := func(pool string) string {
		return "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [" + pool + "], ports: 2000-2999, port-block: 10}\n"
	}
	s := changing(t, yaml("203.0.113.1"))
	client := s.outsideOf("10.0.2.2", remote1, 4000).Addr()
	s.mustChange(yaml("203.0.113.7")) // the change ends UDP flows
	before := s.outsideOf("10.0.2.2", remote1, 4000)
	if before.Addr() != client {
		t.Errorf("the client of %s has %s, while its block rests", client, before)
	}
	if got := s.outsideOf("10.0.2.2", remote2, 4000); got != before {
		t.Errorf("an endpoint has %s and %s", before, got)
	}
	fresh := s.outsideOf("10.0.2.2", remote1, 4001)
	for i := range 20 { // more flows than the block has ports
		if got := s.outsideOf("10.0.2.2", fmt.Sprintf("198.18.0.%d", 1+i), 4001); got != fresh {
			t.Fatalf("an endpoint has %s and %s", fresh, got)
		}
	}
	s.expire()
	held{}.want(t, s, "all flows ended, all ports have rested")
	s.from("203.0.113.7", "10.0.2.2", remote1, 4000, "a flow after all")
}

// TestMappingFollowsTheAddress requests a mapping again that was lost with its address, while a flow of the same
// endpoint keeps the old binding alive.
func TestMappingFollowsTheAddress(t *testing.T) {
	const yaml = "nat:\n  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0, pcp: true, ports-per-client: 100}\n"
	s := changing(t, yaml)
	request := datapath.Mapping{Rule: "office", Protocol: flow.UDP, Inside: netip.MustParseAddrPort("10.0.2.2:3000"), Outside: netip.MustParseAddrPort("0.0.0.0:0"), Expires: time.Hour}
	for i, address := range []string{"198.51.100.1", "198.51.100.9"} {
		if i > 0 {
			if err := s.readdress("wan0", "198.51.100.1/24", "198.51.100.9/24"); err != nil {
				t.Fatal(err)
			}
			s.mustChange(yaml)
		}
		m, err := s.d.Map(request, false)
		if err != nil {
			t.Fatal(err)
		}
		if want := address + ":3000"; m.Outside.String() != want {
			t.Errorf("the mapping is %s, want %s", m.Outside, want)
		}
		s.from(address, "10.0.2.2", []string{remote1, remote2}[i], 3000, "a flow of the endpoint")
	}
}
