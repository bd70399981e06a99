// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// NAT-PMP (RFC 6886) is PCP's predecessor on the same port, distinguished by its version. Its mappings are PCP
// mappings with an all-zero nonce: only the address identifies a client.

// Sizes of messages in bytes (RFC 6886 §3.2, §3.3).
const (
	natpmpVersion    = 0
	natpmpMapRequest = 12
	natpmpHeader     = 8 // of answers: version, opcode, result, epoch
)

// natpmpOp is an opcode of a request (RFC 6886 §3.2, §3.3).
type natpmpOp uint8

const (
	natpmpAddress natpmpOp = iota
	natpmpMapUDP
	natpmpMapTCP
	natpmpOps
)

// String returns the opcode as counted in the metrics.
func (o natpmpOp) String() string {
	switch o {
	case natpmpAddress:
		return "natpmp-address"
	case natpmpMapUDP, natpmpMapTCP:
		return "natpmp-map"
	}
	return "natpmp-other"
}

func (o natpmpOp) protocol() flow.Protocol {
	if o == natpmpMapUDP {
		return flow.UDP
	}
	return flow.TCP
}

// natpmpCode returns the NAT-PMP result code (RFC 6886 §3.5).
func natpmpCode(r result) uint16 {
	switch r {
	case success:
		return 0
	case unsuppVersion:
		return 1
	case networkFailure:
		return 3
	case noResources, userExQuota, cannotProvideExternal:
		return 4
	case unsuppOpcode:
		return 5
	}
	return 2 // not authorized, refused
}

// answerNATPMP returns the answer to a message of version 0, nil for none. s.mu is held.
func (s *Server) answerNATPMP(b []byte, client netip.Addr, iface string, resolved bool, now time.Duration) []byte {
	op := natpmpOp(b[1])
	count := func(text string) { s.counts[Count{op.String(), text}]++ }
	if !client.Is4() || (op == natpmpMapUDP || op == natpmpMapTCP) && len(b) < natpmpMapRequest {
		return nil
	}
	rules := s.rulesOf(client, iface)
	neighbour := slices.ContainsFunc(s.networks[iface], func(p netip.Prefix) bool { return p.Contains(client) })
	switch {
	case len(rules) == 0 && !neighbour:
		count("not-a-client")
		return nil
	case !resolved && !s.allowUnresolved(iface, now):
		count("unresolved")
		return nil
	case !s.limit.allow(client, now):
		count("rate-limited")
		return nil
	}
	res := success
	rules = slices.DeleteFunc(slices.Clone(rules), func(r datapath.MappingRule) bool { return len(ipv4Addresses(r)) == 0 })
	switch {
	case op >= natpmpOps:
		res = unsuppOpcode
	case len(s.rulesOf(client, iface)) == 0:
		res = notAuthorized // a host without a rule that permits requests
	case len(rules) == 0:
		res = networkFailure // for example, the line has no address yet
	}
	var body []byte
	if res == success && op == natpmpAddress {
		a := s.publicAddress(client, rules).As4()
		body = a[:]
	} else if res == success {
		body, res = s.natpmpMap(op, b, client, rules, now)
	}
	count(res.String())
	if res != success {
		s.log.Debug("nat-pmp request refused", "client", client, "opcode", uint8(op), "result", res)
		body = natpmpRefused(op, b)
	}
	return append(natpmpHead(op, res, s.epochSeconds(now)), body...)
}

func natpmpHead(op natpmpOp, res result, epoch uint32) []byte {
	out := binary.BigEndian.AppendUint16([]byte{natpmpVersion, 0x80 | byte(op)}, natpmpCode(res))
	return binary.BigEndian.AppendUint32(out, epoch)
}

// natpmpRefused returns the data after the header of a refusal; undefined fields are zero (RFC 6886 §3.2, §3.3).
func natpmpRefused(op natpmpOp, request []byte) []byte {
	switch op {
	case natpmpAddress:
		return make([]byte, 4)
	case natpmpMapUDP, natpmpMapTCP:
		return append(slices.Clone(request[4:6]), make([]byte, 6)...) // the inside port of the request
	}
	return nil
}

// natpmpMap creates, renews or ends a mapping and returns the data after the header.
func (s *Server) natpmpMap(op natpmpOp, b []byte, client netip.Addr, rules []datapath.MappingRule, now time.Duration) ([]byte, result) {
	r := request{opcode: mapOp, protocol: op.protocol(), internal: binary.BigEndian.Uint16(b[4:]), lifetime: binary.BigEndian.Uint32(b[8:])}
	var g mappingGrant
	var res result
	if r.lifetime == 0 { // port 0: all mappings of the protocol (§3.4)
		r.external = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		g, res = s.remove(&r, client, now)
	} else if r.internal == 0 {
		return nil, notAuthorized
	} else {
		r.external = netip.AddrPortFrom(s.publicAddress(client, rules), binary.BigEndian.Uint16(b[6:]))
		// Not longer than requested (§3.3); PCP has a minimum lifetime.
		lifetime := min(time.Duration(r.lifetime)*time.Second, maxLifetime)
		g, res = s.grantMapping(&r, client, rules, now, lifetime)
	}
	if res != success {
		return nil, res
	}
	out := binary.BigEndian.AppendUint16(nil, r.internal)
	out = binary.BigEndian.AppendUint16(out, g.external.Port())
	return binary.BigEndian.AppendUint32(out, g.lifetime), success
}

// publicAddress returns the outside address of a client: the address of its mappings, else a fixed choice from the
// first rule, which is also suggested for its mappings.
func (s *Server) publicAddress(client netip.Addr, rules []datapath.MappingRule) netip.Addr {
	if s.clients[subscriber(client)] > 0 {
		for at, m := range s.mappings {
			if at.inside.Addr() == client && m.Outside.Addr().Is4() {
				return m.Outside.Addr()
			}
		}
	}
	list, a := ipv4Addresses(rules[0]), client.As4()
	return list[binary.BigEndian.Uint32(a[:])%uint32(len(list))]
}

// ipv4Addresses returns the IPv4 addresses of a rule.
func ipv4Addresses(r datapath.MappingRule) (list []netip.Addr) {
	for _, a := range r.Outside {
		if a.Is4() {
			list = append(list, a)
		}
	}
	return list
}
