// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// outsideKey is an endpoint of a pool. Each protocol has its own ports. ICMP and ICMPv6 share one
// set of query identifiers.
type outsideKey struct {
	protocol flow.Protocol
	endpoint netip.AddrPort
}

func portClass(p flow.Protocol) flow.Protocol {
	if p == flow.ICMPv6 {
		return flow.ICMP
	}
	return p
}

// expand returns the addresses of the ranges in one family, in order.
func expand(ranges []config.AddressRange, v6 bool) []netip.Addr {
	var out []netip.Addr
	for _, r := range ranges {
		for a := r.First; r.Contains(a) && a.Is6() == v6 && len(out) < 1<<16; a = a.Next() {
			out = append(out, a)
		}
	}
	return out
}

// portRequest is a request for a port of a pool.
type portRequest struct {
	addresses []netip.Addr
	protocol  flow.Protocol
	wanted    uint16  // Inside port; the result has its parity and range if possible.
	client    *client // nil without paired pooling.
	paired    bool    // Paired pooling: the client keeps its address.
	ports     config.PortSet
	block     int
	blocks    *[]portBlock // Blocks of the client, for allocation in blocks.
	fixed     *portBlock   // Deterministic: the only block.
}

// portBlock is a range of consecutive ports on one address.
type portBlock struct {
	address     netip.Addr
	ports       flow.Ports
	provisional bool
}

func (b portBlock) containsPort(a netip.AddrPort) bool {
	return b.address == a.Addr() && b.ports.Contains(a.Port())
}

// allocate returns a free outside endpoint. RFC 6888 REQ-2: a client keeps its address, even
// without a free port there.
func (m *Model) allocate(r portRequest) (outsideKey, bool) {
	for _, address := range m.addressOrder(r) {
		if key, ok := m.allocateOn(r, address); ok {
			if s := m.yieldingSession(key); s != nil {
				m.reallocatePort(s, r.ports)
			}
			delete(m.ports, key)
			if r.client != nil && r.paired {
				r.client.address = address
			}
			return key, true
		}
	}
	return outsideKey{}, false
}

// addressOrder returns the addresses in allocation order.
func (m *Model) addressOrder(r portRequest) []netip.Addr {
	switch {
	case r.fixed != nil:
		return []netip.Addr{r.fixed.address}
	case r.client != nil && r.client.address.IsValid() && r.client.ports > 0 && !r.client.provisional &&
		(r.blocks != nil || slices.Contains(r.addresses, r.client.address)):
		return []netip.Addr{r.client.address}
	}
	return m.choices.Addresses(r.addresses)
}

// allocateOn allocates a port on one address. It prefers the parity and the range of the wanted
// port (RFC 4787 REQ-3a, REQ-4).
func (m *Model) allocateOn(r portRequest, address netip.Addr) (outsideKey, bool) {
	spans := []flow.Ports(r.ports)
	switch {
	case r.fixed != nil:
		spans = []flow.Ports{r.fixed.ports}
	case r.blocks != nil:
		spans = nil
		for _, b := range *r.blocks {
			if b.address == address {
				spans = append(spans, b.ports)
			}
		}
	}
	if key, ok := m.search(r, address, spans); ok || r.blocks == nil || r.fixed != nil {
		return key, ok
	}
	block, ok := m.freeBlock(r, address)
	if !ok {
		return outsideKey{}, false
	}
	*r.blocks = append(*r.blocks, block)
	return m.search(r, address, []flow.Ports{block.ports})
}

// firstLocalPort is the first port for local sockets (default ip_local_port_range). On the host's
// own addresses the model allocates these ports last.
const firstLocalPort = 32768

// search returns a free port in the spans. It tries three rounds: range and parity, range, any.
func (m *Model) search(r portRequest, address netip.Addr, spans []flow.Ports) (outsideKey, bool) {
	any := func(uint16) bool { return true }
	rounds := []func(port uint16) bool{
		func(p uint16) bool { return p&1 == r.wanted&1 && (p < 1024) == (r.wanted < 1024) },
		func(p uint16) bool { return (p < 1024) == (r.wanted < 1024) },
		any,
	}
	if portClass(r.protocol) == flow.ICMP { // identifiers have no parity and no range
		rounds = []func(uint16) bool{any}
	} else if !m.sameClassPossible(r, spans) { // the rule has no port in that range: only parity counts
		rounds[0] = func(p uint16) bool { return p&1 == r.wanted&1 }
	}
	if m.host.Owns(address) && portClass(r.protocol) != flow.ICMP {
		below := func(suits func(uint16) bool) func(uint16) bool {
			return func(p uint16) bool { return p < firstLocalPort && suits(p) }
		}
		rounds = []func(uint16) bool{below(rounds[0]), below(rounds[1]), rounds[0], rounds[1], below(any), any}
	}
	key := outsideKey{protocol: portClass(r.protocol)}
	for _, suits := range rounds {
		for port := range m.choices.Ports(address, spans) {
			key.endpoint = netip.AddrPortFrom(address, port)
			if !suits(port) || !m.isFree(key) {
				continue
			}
			if m.heldProvisionally(key, suits, spans) {
				break
			}
			return key, true
		}
	}
	return outsideKey{}, false
}

func (m *Model) sameClassPossible(r portRequest, spans []flow.Ports) bool {
	for _, s := range spans {
		if r.wanted < 1024 && s.First < 1024 || r.wanted >= 1024 && s.Last >= 1024 {
			return true
		}
	}
	return false
}

// isFree reports whether an endpoint is free: no binding, session, listener or hold-down uses it (RFC
// 6888 REQ-8). A followed datapath may allocate the port of a listener (docs/reference/limits.md).
func (m *Model) isFree(key outsideKey) bool {
	if b := m.outside[key]; b != nil && !m.mustYield(b) {
		return false
	}
	if until, held := m.ports[key]; held && (until == forever || m.now <= until) && m.yieldingSession(key) == nil {
		return false
	}
	if shown, ok := m.observedSource(); ok && shown == key.endpoint {
		return true
	}
	for _, s := range m.services {
		if _, ok := s.findListener(key.protocol, key.endpoint, ""); ok {
			return false
		}
	}
	return true
}

// mayAllocate reports whether the rule may allocate a port. Identifiers have no privileged range.
func (r *rule) mayAllocate(p flow.Protocol, port uint16) bool {
	return r.Ports.Contains(port) || portClass(p) == flow.ICMP && r.PortBlock == 0 && len(r.Ports) <= 1
}

// freeBlock returns a port block without an owner.
func (m *Model) freeBlock(r portRequest, address netip.Addr) (portBlock, bool) {
	ports := r.ports.Span()
	n := ports.Len() / r.block
	if n == 0 {
		return portBlock{}, false
	}
	start := 0
	for port := range m.choices.Ports(address, []flow.Ports{ports}) { // start at the block of the first offered port
		start = int(port-ports.First) / r.block
		break
	}
	shown, ok := m.observedSource()
	taken := map[netip.AddrPort]bool{}
	for _, c := range m.clients {
		c.blocks = slices.DeleteFunc(m.blocksOf(c), func(b portBlock) bool { return b.provisional && ok && b.containsPort(shown) })
		for _, b := range c.blocks {
			taken[netip.AddrPortFrom(b.address, b.ports.First)] = true
		}
	}
	for i := range n {
		first := ports.First + uint16((start+i)%n*r.block)
		b := portBlock{address: address, ports: flow.Ports{First: first, Last: first + uint16(r.block) - 1}}
		if !taken[netip.AddrPortFrom(address, first)] {
			b.provisional = m.choices.Provisional() && !(ok && b.containsPort(shown))
			return b, true
		}
	}
	return portBlock{}, false
}

// blocksOf returns the blocks of a client. The blocks become free at the end of the last port's
// hold-down.
func (m *Model) blocksOf(c *client) []portBlock {
	if c.ports == 0 && m.now > c.rest {
		c.blocks = nil
	}
	return c.blocks
}

// deterministicBlock computes the port block of an inside address (RFC 7422 §2). Inside addresses
// in order fill the blocks of the first outside address, and then the blocks of the next one.
func deterministicBlock(sources []netip.Prefix, pool []netip.Addr, ports flow.Ports, block int, inside netip.Addr) (portBlock, bool) {
	perAddress := ports.Len() / block
	index := 0
	for _, p := range sources {
		if p.Contains(inside) {
			index += distance(p.Masked().Addr(), inside)
			if perAddress == 0 || index/perAddress >= len(pool) {
				return portBlock{}, false
			}
			first := ports.First + uint16(index%perAddress*block)
			return portBlock{address: pool[index/perAddress], ports: flow.Ports{First: first, Last: first + uint16(block) - 1}}, true
		}
		index += 1 << min(p.Addr().BitLen()-p.Bits(), 24)
	}
	return portBlock{}, false
}

// distance returns b minus a in the last 32 bits of both addresses.
func distance(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	return int(binary.BigEndian.Uint32(y[len(y)-4:]) - binary.BigEndian.Uint32(x[len(x)-4:]))
}
