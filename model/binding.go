// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// binding is a mapping (RFC 4787 §4): protocol of the inside endpoint ↔ outside endpoint. With endpoint-independent
// mapping (REQ-1) all remote endpoints share it. A binding exists as long as one of its sessions.
type binding struct {
	rule     *rule
	protocol flow.Protocol // inside endpoint
	inside   netip.AddrPort
	outside  outsideKey
	sessions int
	mapped   bool // a host requested the binding, see Map; the request counts as a session
	client   *client
	counted  bool // the client's port count includes it
	// remotes contains the destination addresses of the inside endpoint. Address-dependent
	// filtering admits packets from these addresses (RFC 4787 §5).
	remotes     map[netip.Addr]bool
	provisional bool // the outside endpoint may still change
}

type bindingKey struct {
	rule     *rule
	protocol flow.Protocol
	inside   netip.AddrPort
	remote   netip.AddrPort // Zero for endpoint-independent mapping; for nat64 the address that the IPv6 host uses.
	source   netip.Addr     // Masquerade: the source address for the route; otherwise zero.
}

// client is an inside address with its resources under one rule.
type client struct {
	address     netip.Addr // External address of the client (RFC 4787 REQ-2, "paired" pooling).
	provisional bool       // Address may still change.
	ports       int
	flows       int
	blocks      []portBlock
	rest        time.Duration   // Hold-down of its port blocks after the last port.
	resting     []time.Duration // End of the hold-down of each freed port.
}

type clientKey struct {
	rule    *rule
	service *service
	address netip.Addr
}

func (m *Model) client(key clientKey) *client {
	c := m.clients[key]
	if c == nil {
		c = &client{}
		m.clients[key] = c
	}
	return c
}

const forever = time.Duration(-1)

// removeBinding deletes a binding and starts the hold-down of its port.
func (m *Model) removeBinding(b *binding) {
	for key, other := range m.bindings {
		if other == b {
			delete(m.bindings, key)
		}
	}
	delete(m.outside, b.outside)
	c, until := b.client, m.now+PortHold
	if b.provisional {
		m.releasedProvisional = append(m.releasedProvisional, releasedPort{b.outside.protocol, b.outside.endpoint.Addr(), until})
	} else {
		m.ports[b.outside] = until
	}
	if !b.counted {
		return
	}
	c.ports--
	c.rest = until
	c.resting = append(c.resting, until)
}

// portsOf returns the number of ports that count against the client's quota. A freed port counts
// during its hold-down.
func (m *Model) portsOf(c *client) int {
	c.resting = slices.DeleteFunc(c.resting, func(until time.Duration) bool { return until < m.now })
	return c.ports + len(c.resting)
}

// open creates a session for the first packet of an inside host to destination to. It also creates
// a binding if none exists.
func (m *Model) open(r *rule, in Arrival, v *view, to netip.AddrPort) plan {
	if r.Type.CrossesStateful() && r.Prefix.Contains(v.src.Addr()) {
		return drop(ReasonLoop) // RFC 6146 §3.5
	}
	if r.Type.CrossesStateful() && isUnroutable(to.Addr()) {
		return drop(ReasonUntranslatable)
	}
	if next, _ := m.host.route(to.Addr()); len(r.pool(next, v.v6)) == 0 && !r.Type.CrossesStateful() {
		return r.refusePacket(ReasonNoAddress)
	}
	if v.translatesAddressOnly() && !r.Type.CrossesStateful() {
		return m.openPortless(r, v)
	}
	if reason := checkOpening(v); reason != "" {
		return drop(reason)
	}
	var target *binding // hairpin: the binding of another inside host
	forward, forwarded := netip.AddrPort{}, false
	if r.Type.CrossesStateful() {
		forward, forwarded = m.findForward64(in, v, to)
	}
	if r.Type.CrossesStateful() && !forwarded && m.inAnyPool(to.Addr()) {
		target = m.findBinding64(v, to)
		if target == nil && !m.host.Owns(to.Addr()) { // otherwise the packet may be for the host itself
			return drop(ReasonNoBinding)
		}
	}
	b, refusal := m.bindingFor(r, v, to)
	if b == nil {
		return refusal
	}
	b.allowRemote(to.Addr())
	outside := b.outside.endpoint
	protocol := v.protocol
	if protocol == flow.ICMPv6 && outside.Addr().Is4() {
		protocol = flow.ICMP
	}
	if portClass(v.protocol) == flow.ICMP {
		to = netip.AddrPortFrom(to.Addr(), outside.Port())
	}
	s := &session{rule: r, binding: b, client: b.client}
	s.tuple[0] = v.tuple()
	s.tuple[1] = flow.Tuple{Protocol: protocol, Source: to, Dest: outside}
	if target != nil {
		if !target.passesFilter(outside) || m.maybeFiltered(b, target) {
			m.dropUnused(b)
			return drop(ReasonFiltered)
		}
		forward, forwarded = target.inside, true
	}
	if forwarded {
		if target == nil && v.protocol == flow.ICMPv6 {
			forward = netip.AddrPortFrom(forward.Addr(), outside.Port())
		}
		s.setHairpin64(r, forward)
	}
	if m.hasReplyClash(s) {
		m.dropUnused(b)
		return r.refusePacket(ReasonClash)
	}
	m.addSession(s)
	return m.firstPacket(v, s)
}

// findBinding64 returns the binding of an IPv6 host with an outside endpoint, or nil.
func (m *Model) findBinding64(v *view, to netip.AddrPort) *binding {
	if b := m.outside[outsideKey{portClass(v.protocol), to}]; b != nil && b.rule.Type.CrossesStateful() {
		return b
	}
	return nil
}

// isHairpin64 reports whether nat64 keeps a packet from an IPv6 host to an IPv4 endpoint inside.
// Packets to a pool address never leave. If the host owns the address, an IPv6 host must own the
// endpoint too.
func (m *Model) isHairpin64(in Arrival, v *view, to netip.AddrPort) bool {
	if !m.host.Owns(to.Addr()) {
		return m.inAnyPool(to.Addr())
	}
	_, forwarded := m.findForward64(in, v, to)
	return m.findBinding64(v, to) != nil || forwarded
}

// setHairpin64 sets the hairpin mapping for a packet from one IPv6 host to the outside endpoint of
// another (RFC 6146 §3.8). The receiver sees the sender's outside endpoint with the NAT64 prefix.
func (s *session) setHairpin64(r *rule, target netip.AddrPort) {
	outside := s.binding.outside.endpoint
	s.tuple[1] = flow.Tuple{Protocol: s.tuple[0].Protocol, Source: target,
		Dest: netip.AddrPortFrom(Embed(r.Prefix, outside.Addr()), outside.Port())}
}

// dropUnused deletes a binding without sessions.
func (m *Model) dropUnused(b *binding) {
	if b.sessions == 0 {
		m.removeBinding(b)
	}
}

// firstPacket handles the packet that created the session.
func (m *Model) firstPacket(v *view, s *session) plan {
	s.updateState(flow.Original, v.flags)
	s.packets[0]++
	s.bytes[0] += uint64(len(v.ip))
	return (&sessionHalf{s, flow.Original}).planFor(v, ReasonNewFlow)
}

// checkOpening returns the reason that forbids a packet to open a session, "" if none does.
func checkOpening(v *view) Reason {
	switch v.protocol {
	case flow.UDP:
		return ""
	case flow.TCP: // a reset never opens a session; after a restart, any other segment may belong to a lost session
		if v.flags&packet.RST != 0 {
			return ReasonNoFlow
		}
		return ""
	case flow.ICMP, flow.ICMPv6:
		if v.kind == icmpQuery {
			return ""
		}
	}
	return ReasonUnsupportedProtocol
}

// bindingFor returns the binding of the packet's source and creates it if none exists. It returns
// nil and the plan for the packet if the limits or the pool prevent a new binding. RFC 6888 REQ-11:
// a new mapping never evicts another mapping.
func (m *Model) bindingFor(r *rule, v *view, to netip.AddrPort) (*binding, plan) {
	key := bindingKey{rule: r, protocol: v.protocol, inside: v.src}
	if r.Mapping == config.AddressAndPortDependent {
		key.remote = v.dst // the address as the inside host uses it: the unused bits of an embedded address count
	}
	next, _ := m.host.route(to.Addr())
	pool := r.pool(next, v.v6)
	if r.Type.UsesInterfaceAddress() && len(pool) > 0 {
		key.source = pool[0]
	}
	c := m.client(clientKey{rule: r, address: v.src.Addr()})
	refuse := func(reason Reason) (*binding, plan) { return nil, r.refusePacket(reason) }
	if !r.credit.withinRate(m.now, v.src.Addr(), r.NewConnectionsPerClient) {
		return refuse(ReasonLimitClientRate)
	}
	if r.ConnectionsPerClient > 0 && c.flows >= r.ConnectionsPerClient {
		return refuse(ReasonClientFlows)
	}
	if b := m.bindings[key]; b != nil && b.acceptsSessions() {
		m.confirm(b, v)
		return b, plan{}
	}
	if r.PortsPerClient > 0 && m.portsOf(c) >= r.PortsPerClient {
		return refuse(ReasonClientPorts)
	}
	endpoint, ok := m.outsideFor(r, c, v, pool)
	if !ok {
		return refuse(ReasonNoPort)
	}
	b := &binding{rule: r, protocol: v.protocol, inside: v.src, outside: endpoint, client: c, remotes: map[netip.Addr]bool{}}
	b.provisional = m.endpointProvisional(endpoint)
	c.provisional = b.provisional && (c.provisional || c.ports == 0)
	if b.counted = r.counts(); b.counted {
		c.ports++
	}
	m.bindings[key] = b
	m.assignEndpoint(endpoint, b)
	return b, plan{}
}

// alternatives returns the addresses for another outside endpoint of the binding. For masquerade
// the next hop chose the address, and a hairpin session does not show that next hop.
func (b *binding) alternatives() []netip.Addr {
	if b.rule.Type.UsesInterfaceAddress() {
		return []netip.Addr{b.outside.endpoint.Addr()}
	}
	return b.rule.pool(hop{}, b.inside.Addr().Is6())
}

// outsideFor allocates an outside endpoint with one of the addresses under the rule.
func (m *Model) outsideFor(r *rule, c *client, v *view, addresses []netip.Addr) (outsideKey, bool) {
	q := portRequest{addresses: addresses, protocol: v.protocol, wanted: v.src.Port(), client: c, paired: r.counts(), ports: r.Ports, block: r.PortBlock}
	if portClass(v.protocol) == flow.ICMP && r.PortBlock == 0 && len(r.Ports) <= 1 { // query identifiers have no privileged range
		q.ports = config.PortSet{{First: 0, Last: 65535}}
	}
	switch {
	case r.Deterministic:
		block, ok := deterministicBlock(r.Source, q.addresses, r.Ports.Span(), r.PortBlock, v.src.Addr())
		if !ok {
			return outsideKey{}, false
		}
		q.fixed = &block
	case r.PortBlock > 0:
		c.blocks = m.blocksOf(c)
		m.confirmBlock(c)
		q.blocks = &c.blocks
	}
	return m.allocate(q)
}

// handleInbound handles a packet to an outside endpoint without a session.
func (m *Model) handleInbound(in Arrival, v *view) (plan, bool) {
	b := m.outside[outsideKey{portClass(v.protocol), v.dst}]
	if b == nil || v.kind == icmpOther || !m.inAnyPool(v.dst.Addr()) && !m.isMasqueradeAddress(v.dst.Addr()) {
		if m.inAnyPool(v.dst.Addr()) && !m.host.Owns(v.dst.Addr()) {
			return drop(ReasonNoBinding), true
		}
		return plan{}, false
	}
	if hairpin := m.hairpinRule(b.rule, in, v); hairpin != nil {
		return m.openHairpin(hairpin, v, b), true
	}
	if v.protocol == flow.TCP && v.flags&packet.RST != 0 {
		return drop(ReasonNoFlow), true
	}
	if !b.passesFilter(v.src) {
		return drop(ReasonFiltered), true
	}
	if n := b.rule.ConnectionsPerClient; n > 0 && b.client.flows >= n {
		return drop(ReasonClientFlows), true
	}
	remote := v.src
	if b.rule.Type.CrossesStateful() {
		remote = netip.AddrPortFrom(Embed(b.rule.Prefix, v.src.Addr()), v.src.Port())
	}
	if portClass(v.protocol) == flow.ICMP {
		remote = netip.AddrPortFrom(remote.Addr(), b.inside.Port())
	}
	s := &session{rule: b.rule, binding: b, client: b.client}
	s.tuple[0] = v.tuple()
	s.tuple[1] = flow.Tuple{Protocol: b.protocol, Source: b.inside, Dest: remote}
	if m.hasReplyClash(s) {
		return drop(ReasonClash), true
	}
	m.addSession(s)
	return m.firstPacket(v, s), true
}

// allowRemote adds a destination address of the inside endpoint to the filter, if the rule's filtering
// is address-dependent.
func (b *binding) allowRemote(remote netip.Addr) {
	if b.rule.Filtering == config.AddressDependent {
		b.remotes[remote] = true
	}
}

// acceptsSessions reports whether new sessions may use a binding. After an address has left the pool, only
// clients with a port block on it may open sessions there.
func (b *binding) acceptsSessions() bool {
	a, r := b.outside.endpoint.Addr(), b.rule
	return r.Type.UsesInterfaceAddress() || r.poolContains(a) || r.PortBlock > 0 && !r.Deterministic
}

// passesFilter applies the filtering behaviour of the binding (RFC 4787 §5). Packets of existing sessions
// bypass this check.
func (b *binding) passesFilter(remote netip.AddrPort) bool {
	if b.mapped {
		return true
	}
	switch b.rule.Filtering {
	case config.AddressAndPortDependent:
		return false
	case config.AddressDependent:
		return b.remotes[remote.Addr()]
	}
	return b.rule.Mapping != config.AddressAndPortDependent
}

// openHairpin opens a session from an inside host to the outside endpoint of another inside host.
// The receiver sees the sender's outside endpoint (RFC 4787 REQ-9a).
func (m *Model) openHairpin(r *rule, v *view, target *binding) plan {
	if reason := checkOpening(v); reason != "" {
		return drop(reason)
	}
	b, refusal := m.bindingFor(r, v, v.dst)
	if b == nil {
		return refusal
	}
	b.allowRemote(v.dst.Addr())
	if !target.passesFilter(b.outside.endpoint) || m.maybeFiltered(b, target) {
		m.dropUnused(b)
		return drop(ReasonFiltered)
	}
	remote := b.outside.endpoint
	if target.rule.Type.CrossesStateful() {
		remote = netip.AddrPortFrom(Embed(target.rule.Prefix, remote.Addr()), remote.Port())
	}
	s := &session{rule: r, binding: b, client: b.client}
	s.tuple[0] = v.tuple()
	s.tuple[1] = flow.Tuple{Protocol: target.protocol, Source: target.inside, Dest: remote}
	if m.hasReplyClash(s) {
		m.dropUnused(b)
		return drop(ReasonClash)
	}
	m.addSession(s)
	return m.firstPacket(v, s)
}
