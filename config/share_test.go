// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// randomPool returns ranges of count addresses in total, in random order.
func randomPool(r *rand.Rand, count int) (pool []AddressRange) {
	next := netip.AddrFrom4([4]byte{198, 18, byte(r.UintN(200)), byte(r.UintN(256))})
	for left := count; left > 0; {
		n := 1 + r.IntN(left)
		first := next
		for range n - 1 {
			next = next.Next()
		}
		pool = append(pool, AddressRange{first, next})
		next, left = next.Next().Next().Next(), left-n
	}
	r.Shuffle(len(pool), func(i, j int) { pool[i], pool[j] = pool[j], pool[i] })
	return pool
}

func randomNodes(r *rand.Rand, n int) (nodes []Node) {
	for i := range n {
		nodes = append(nodes, Node{Name: fmt.Sprintf("n%d-%d", i, r.Uint32())})
	}
	return nodes
}

// ownersOf returns the owner of each address by the shares of the nodes, and checks that each has one owner and one
// backup.
func ownersOf(t *testing.T, pool []AddressRange, nodes []Node) map[netip.Addr]string {
	t.Helper()
	owner, backup := map[netip.Addr]string{}, map[netip.Addr]string{}
	for i, s := range Divide(pool, nodes) {
		n := nodes[i]
		for _, of := range []struct {
			list []AddressRange
			in   map[netip.Addr]string
		}{{s.Own, owner}, {s.Backup, backup}} {
			for _, a := range expand(of.list, true) {
				if other := of.in[a]; other != "" {
					t.Fatalf("%s belongs to %s and %s", a, other, n.Name)
				}
				of.in[a] = n.Name
			}
		}
	}
	for _, a := range expand(pool, true) {
		if owner[a] == "" || len(nodes) > 1 && (backup[a] == "" || backup[a] == owner[a]) {
			t.Fatalf("%s has owner %q and backup %q", a, owner[a], backup[a])
		}
	}
	if len(owner) != len(expand(pool, true)) {
		t.Fatalf("%d addresses have an owner, the pool has %d", len(owner), len(expand(pool, true)))
	}
	return owner
}

// No address has two owners, all parts differ by at most one address, and the order and the notation of a pool do not
// matter.
func TestDivideIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 40 {
		nodes := randomNodes(r, 1+r.IntN(32))
		pool := randomPool(r, len(nodes)+r.IntN(300))
		owner := ownersOf(t, pool, nodes)
		parts := map[string]int{}
		for _, n := range owner {
			parts[n]++
		}
		for _, n := range nodes {
			if least := len(owner) / len(nodes); parts[n.Name] < least || parts[n.Name] > least+1 {
				t.Fatalf("%d nodes, %d addresses: node %s has %d", len(nodes), len(owner), n.Name, parts[n.Name])
			}
		}
		var single []AddressRange
		for _, a := range expand(pool, true) {
			single = append([]AddressRange{{a, a}}, single...)
		}
		if a, b := fmt.Sprint(Divide(pool, nodes)), fmt.Sprint(Divide(single, nodes)); a != b {
			t.Fatalf("two notations of one pool are divided differently: %v and %v", a, b)
		}
	}
}

// A node at the end of the list takes its part, and no address moves between the others. Its removal returns them.
func TestDivideMovesOneShare(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 40 {
		nodes := randomNodes(r, 2+r.IntN(31))
		pool := randomPool(r, len(nodes)+r.IntN(300))
		last := nodes[len(nodes)-1].Name
		before, after := ownersOf(t, pool, nodes[:len(nodes)-1]), ownersOf(t, pool, nodes)
		moved := 0
		for a, n := range after {
			if n != before[a] {
				moved++
				if n != last {
					t.Fatalf("%s moves from %s to %s when %s is added", a, before[a], n, last)
				}
			}
		}
		if want := len(after) / len(nodes); moved != want {
			t.Fatalf("%d addresses move to the last of %d nodes, its part are %d", moved, len(nodes), want)
		}
	}
}

// The backups of one owner spread over all other nodes.
func TestBackupsSpread(t *testing.T) {
	nodes := randomNodes(rand.New(rand.NewPCG(7, 8)), 5)
	pool := []AddressRange{{netip.MustParseAddr("198.18.0.0"), netip.MustParseAddr("198.18.3.255")}}
	shares := Divide(pool, nodes)
	for i, of := range shares {
		for j, by := range shares {
			both := 0
			for _, a := range expand(of.Own, true) {
				if slices.ContainsFunc(by.Backup, func(r AddressRange) bool { return r.Contains(a) }) {
					both++
				}
			}
			if part := len(expand(of.Own, true)) / (len(nodes) - 1); i != j && (both < part/2 || both > part*3/2) {
				t.Errorf("node %d is the backup for %d addresses of node %d, want about %d", j, both, i, part)
			}
		}
	}
}

// The removal of any node moves at most a part of the other addresses.
func TestDivideAfterRemoval(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	moved, stay := 0, 0
	for range 20 {
		nodes := randomNodes(r, 3+r.IntN(6))
		pool := randomPool(r, 64+r.IntN(200))
		gone := r.IntN(len(nodes))
		before, after := ownersOf(t, pool, nodes), ownersOf(t, pool, slices.Delete(slices.Clone(nodes), gone, gone+1))
		for a, n := range before {
			switch {
			case n == nodes[gone].Name:
			case after[a] == n:
				stay++
			default:
				moved++
			}
		}
	}
	t.Logf("of the addresses of remaining nodes %d %% move", 100*moved/(moved+stay))
	if moved > stay {
		t.Errorf("%d addresses of remaining nodes move, %d stay", moved, stay)
	}
}

// Nodes of different versions must agree: these values may never change.
func TestDivideIsStable(t *testing.T) {
	nodes := []Node{{Name: "n1"}, {Name: "n2"}, {Name: "n3"}}
	pool := []AddressRange{{netip.MustParseAddr("192.0.2.0"), netip.MustParseAddr("192.0.2.7")}, {netip.MustParseAddr("2001:db8::"), netip.MustParseAddr("2001:db8::3")}}
	want := map[string]string{
		"n1": "[192.0.2.2 192.0.2.5-192.0.2.6 2001:db8::2] [192.0.2.1 192.0.2.7 2001:db8::3]",
		"n2": "[192.0.2.1 192.0.2.3 192.0.2.7 2001:db8::1 2001:db8::3] [192.0.2.0 192.0.2.4 192.0.2.6 2001:db8:: 2001:db8::2]",
		"n3": "[192.0.2.0 192.0.2.4 2001:db8::] [192.0.2.2/31 192.0.2.5 2001:db8::1]",
	}
	for i, s := range Divide(pool, nodes) {
		if got := fmt.Sprint(s.Own, s.Backup); got != want[nodes[i].Name] {
			t.Errorf("%s: %s", nodes[i].Name, got)
		}
	}
}

func TestForNode(t *testing.T) {
	c, err := Decode("f.yaml", []byte(`
cluster: {nodes: [{name: n1, address: 10.0.0.1}, {name: n2, address: 10.0.0.2}]}
services:
  - {name: web, listen: [{address: 192.0.2.100, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [192.0.2.20-192.0.2.23], backends: [{name: s1, address: 10.0.2.2}]}
nat:
  - {name: out, type: snat, source: [10.0.0.0/8], to: [192.0.2.0/30], out: wan0}
  - {name: six, type: nat64, prefix: "64:ff9b::/96", pool: [198.51.100.0/31], out: wan0}
  - {name: maps, type: siit, prefix: "2001:db8:64::/96", pool: [198.51.100.8/31], in: lan0, out: wan0}
`))
	if err != nil {
		t.Fatal(err)
	}
	n1, n2 := c.ForNode("n1"), c.ForNode("n2")
	both := func(a, b []AddressRange) int { return len(expand(a, true)) + len(expand(b, true)) }
	for what, got := range map[string][2]int{
		"source-pool": {4, both(n1.Services[0].SourcePool, n2.Services[0].SourcePool)},
		"snat":        {4, both(n1.NAT[0].To.Addresses, n2.NAT[0].To.Addresses)},
		"nat64":       {2, both(n1.NAT[1].Pool, n2.NAT[1].Pool)},
		"siit":        {4, both(n1.NAT[2].Pool, n2.NAT[2].Pool)}, // allocates no ports: not divided
	} {
		if got[0] != got[1] {
			t.Errorf("%s: the nodes have %d addresses together, want %d", what, got[1], got[0])
		}
	}
	if !slices.Equal(n1.NAT[0].Backup(), n2.NAT[0].To.Addresses) || !slices.Equal(n2.Services[0].Backup(), n1.Services[0].SourcePool) {
		t.Errorf("of two nodes one is not the backup of the other: %v, %v", n1.NAT[0].Backup(), n2.NAT[0].To.Addresses)
	}
	if len(expand(c.NAT[0].To.Addresses, true)) != 4 || c.NAT[0].Backup() != nil {
		t.Error("the configuration of all nodes has changed")
	}
}
