// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// The nodes of a cluster divide the addresses of a pool without communication. The owner of an address is a function
// of the pool and of the list of nodes. All nodes with one configuration therefore agree, whatever they know about each
// other, and no port has two owners.

const (
	maxShared    = 4096  // addresses of a divided pool, as on the eBPF datapath
	maxAllShared = 16384 // addresses of all divided pools; bounds the time of a division
)

// Share is the part of a pool that one node uses.
type Share struct {
	Own    []AddressRange // Addresses from which the node allocates.
	Backup []AddressRange // Addresses that the node announces in case that their owner fails.
}

// score orders the nodes of an address, and the addresses of a node, at random (rendezvous hashing): FNV-1a with the
// finalizer of MurmurHash3, because FNV alone barely mixes the last bytes. The values are part of the contract between
// the nodes, also of different versions.
func score(node string, a netip.Addr) uint64 {
	x := uint64(0xcbf29ce484222325)
	add := func(b byte) { x = (x ^ uint64(b)) * 0x100000001b3 }
	for i := range len(node) {
		add(node[i])
	}
	for _, b := range a.As16() {
		add(b)
	}
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// owners returns the owner of each address, as an index of nodes. The first node owns everything. Every following node
// takes an equal part from the nodes before it, the addresses with the best scores first. A node at the end of the list
// thus moves no address between the others. The parts differ by at most one.
func owners(addresses []netip.Addr, nodes []Node) []int {
	owner, have := make([]int, len(addresses)), make([]int, len(nodes))
	have[0] = len(addresses)
	scores, order := make([]uint64, len(addresses)), make([]int, len(addresses))
	for k := 1; k < len(nodes); k++ {
		for i, a := range addresses {
			scores[i], order[i] = score(nodes[k].Name, a), i
		}
		slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(scores[j], scores[i]) })
		part := len(addresses) / (k + 1)
		for _, most := range []int{part + 1, part} { // first from the nodes that have too many in any case
			for _, i := range order {
				if o := owner[i]; o < k && have[o] > most && have[k] < part {
					have[o], have[k], owner[i] = have[o]-1, have[k]+1, k
				}
			}
		}
	}
	return owner
}

// backup returns the node that announces an address while its owner does not: of the others the one with the best
// score, so that the addresses of one owner spread over all. The scores differ from the scores of owners, which are low
// for the nodes that did not take the address.
func backup(a netip.Addr, owner int, nodes []Node) int {
	best, most := -1, uint64(0)
	for i, n := range nodes {
		if s := score("backup "+n.Name, a); i != owner && (best < 0 || s > most) {
			best, most = i, s
		}
	}
	return best
}

// Divide returns the share of each node in a pool, in the order of the nodes. Each address family is divided by itself.
func Divide(pool []AddressRange, nodes []Node) []Share {
	shares := make([]Share, len(nodes))
	for _, v4 := range []bool{true, false} {
		addresses := expand(pool, v4)
		for i, owner := range owners(addresses, nodes) {
			s := &shares[owner]
			s.Own = appendAddress(s.Own, addresses[i])
			if b := backup(addresses[i], owner, nodes); b >= 0 {
				shares[b].Backup = appendAddress(shares[b].Backup, addresses[i])
			}
		}
	}
	return shares
}

// expand returns the addresses of one family in a pool, in order, so that the order in the file does not matter.
func expand(pool []AddressRange, v4 bool) (list []netip.Addr) {
	for _, r := range pool {
		for a := r.First; a.IsValid() && r.Is4() == v4 && r.Contains(a) && len(list) <= maxShared; a = a.Next() {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return list
}

// appendAddress adds an address to ordered ranges.
func appendAddress(list []AddressRange, a netip.Addr) []AddressRange {
	if n := len(list); n > 0 && list[n-1].Last.Next() == a {
		list[n-1].Last = a
		return list
	}
	return append(list, AddressRange{a, a})
}

// ForNode returns the configuration of one node: each pool has the addresses that the node owns. Without nodes it is c.
func (c *Config) ForNode(node string) *Config {
	me := slices.IndexFunc(c.Nodes(), func(n Node) bool { return n.Name == node })
	if me < 0 {
		return c
	}
	own := *c
	own.Services, own.NAT = slices.Clone(c.Services), slices.Clone(c.NAT)
	own.eachPool(func(_ string, pool, backup *[]AddressRange, shares []Share) {
		*pool, *backup = shares[me].Own, shares[me].Backup
	})
	return &own
}

// DividedPool is a pool with the share of each node.
type DividedPool struct {
	Owner  string // "service NAME" or "nat NAME"
	Shares []Share
}

// DividedPools returns the pools that the nodes divide.
func (c *Config) DividedPools() (list []DividedPool) {
	if len(c.Nodes()) > 0 {
		c.eachPool(func(owner string, _, _ *[]AddressRange, shares []Share) {
			list = append(list, DividedPool{owner, shares})
		})
	}
	return list
}

// eachPool calls f for each pool that the nodes divide.
func (c *Config) eachPool(f func(owner string, pool, backup *[]AddressRange, shares []Share)) {
	known := map[string][]Share{} // Many rules may have one pool.
	divide := func(pool []AddressRange) []Share {
		key := poolKey(pool)
		if known[key] == nil {
			known[key] = Divide(pool, c.Nodes())
		}
		return known[key]
	}
	for i := range c.Services {
		if s := &c.Services[i]; len(s.SourcePool) > 0 {
			f("service "+s.Name, &s.SourcePool, &s.backup, divide(s.SourcePool))
		}
	}
	for i := range c.NAT {
		if pool := c.NAT[i].dividedPool(); pool != nil {
			f("nat "+c.NAT[i].Name, pool, &c.NAT[i].backup, divide(*pool))
		}
	}
}

// Backup returns the pool addresses of a rule that this node announces for their owners.
func (r *NATRule) Backup() []AddressRange { return r.backup }

// Backup returns the pool addresses of a service that this node announces for their owners.
func (s *Service) Backup() []AddressRange { return s.backup }

// dividedPool returns the addresses whose ports a rule allocates; nil for a rule that allocates none.
func (r *NATRule) dividedPool() *[]AddressRange {
	switch {
	case r.Type.CrossesStateful():
		return &r.Pool
	case r.Type.RewritesSource() && !r.Type.UsesInterfaceAddress():
		return &r.To.Addresses
	}
	return nil
}

// sharedPool is a pool that the nodes divide.
type sharedPool struct {
	at     path
	owner  string
	ranges []AddressRange
}

// nodes checks the nodes of a cluster, and the pools that they divide.
func (v *validator) nodes() {
	nodes := v.c.Nodes()
	names, addresses := seenNames{}, map[netip.Addr]int{}
	for i, n := range nodes {
		p := at("cluster").key("nodes").index(i)
		v.name(p.key("name"), n.Name)
		if first := names.recordName(n.Name, i); first >= 0 && n.Name != "" {
			v.errorf(p.key("name"), "give each node a name of its own", "name %s is taken by cluster.nodes[%d]", n.Name, first)
		}
		if first, taken := addresses[n.Address]; taken && n.Address.IsValid() {
			v.errorf(p.key("address"), "write the address of an interface of this node", "address %s is taken by node %s", n.Address, nodes[first].Name)
		}
		v.specialAddress(p.key("address"), asNode, n.Address)
		addresses[n.Address] = i
	}
	if len(nodes) > 1 {
		v.dividedPools(len(nodes))
	}
}

// dividedPools checks that each node gets a part of each pool, and that no address has two owners.
func (v *validator) dividedPools(nodes int) {
	var pools []sharedPool
	for i := range v.c.Services {
		s := &v.c.Services[i]
		pools = append(pools, sharedPool{at("services").index(i).key("source-pool"), "service " + s.Name, s.SourcePool})
	}
	for i := range v.c.NAT {
		r, p := &v.c.NAT[i], at("nat").index(i)
		pool := r.dividedPool()
		if pool == nil {
			continue
		}
		if r.Deterministic {
			v.errorf(p.key("deterministic"), "remove it: the nodes log the blocks that they assign", "deterministic computes the ports of a host from the whole pool, and the nodes of the cluster divide it").atKey = true
		}
		key := "to"
		if pool == &r.Pool {
			key = "pool"
		}
		pools = append(pools, sharedPool{p.key(key), "nat " + r.Name, *pool})
	}
	seen := map[string]bool{} // Rules with the same pool agree on the owners.
	pools = slices.DeleteFunc(pools, func(p sharedPool) bool {
		key := poolKey(p.ranges)
		again := key == "" || seen[key]
		seen[key] = true
		return again
	})
	var ranges []AddressRange
	var of []int
	total := 0
	for i, p := range pools {
		for _, v4 := range []bool{true, false} {
			n := len(expand(p.ranges, v4))
			total += n
			switch {
			case total > maxAllShared && total-n <= maxAllShared:
				v.errorf(p.at, "write fewer", "the nodes of a cluster divide up to %d addresses in all", maxAllShared)
			case n > maxShared:
				v.errorf(p.at, "write fewer, or give each rule its own", "the nodes of a cluster divide pools of up to %d addresses", maxShared)
			case n > 0 && n < nodes:
				v.errorf(p.at, fmt.Sprintf("write at least %d addresses", nodes),
					"%d addresses for %d nodes: a node without an address refuses all connections, and a router cannot send the replies of one address to two nodes", n, nodes).depends = []path{at("cluster").key("nodes")}
			}
		}
		for _, r := range p.ranges {
			ranges, of = append(ranges, r), append(of, i)
		}
	}
	spans := spansOf(ranges)
	for n, first := range spans.overlaps() {
		if p, other := pools[of[n]], pools[of[first]]; of[n] != of[first] {
			v.errorf(p.at, "write the same addresses in both, or other ones", "the pool shares addresses with the one of %s: the nodes would divide them differently", other.owner).depends = []path{other.at}
		}
	}
	v.dividedListeners(spans, func(n int) string { return pools[of[n]].owner })
}

// dividedListeners refuses listeners on divided addresses: only the owner of the address receives their packets.
func (v *validator) dividedListeners(spans spans, owner func(int) string) {
	refuse := func(p path, l Listen) {
		if n := spans.indexOverlapping(AddressRange{l.Address, l.Address}); l.Address.IsValid() && n >= 0 {
			v.errorf(p.key("address"), "write an address of its own", "%s is in the pool of %s, and routers send all its packets to the node that owns it", l.Address, owner(n))
		}
	}
	for i := range v.c.Services {
		for j, l := range v.c.Services[i].Listen {
			refuse(at("services").index(i).key("listen").index(j), l)
		}
	}
	for i := range v.c.NAT {
		if l := v.c.NAT[i].Listen; l != nil {
			refuse(at("nat").index(i).key("listen"), *l)
		}
	}
}

// poolKey identifies the addresses of a pool, in any order and notation; "" for none.
func poolKey(pool []AddressRange) (key string) {
	sorted := slices.Clone(pool)
	slices.SortFunc(sorted, func(a, b AddressRange) int { return a.First.Compare(b.First) })
	for i, r := range sorted {
		if i+1 < len(sorted) && r.Last.IsValid() && r.Last.Next() == sorted[i+1].First {
			sorted[i+1].First = r.First
			continue
		}
		key += r.First.String() + "-" + r.Last.String() + " "
	}
	return key
}
