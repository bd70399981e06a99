// SPDX-License-Identifier: Apache-2.0

package config

import "net/netip"

// The traits of modes, schedulers and NAT types, each defined once. Compilers, model and views use them
// instead of comparing names.

// Hashes reports whether the scheduler selects the backend by a hash of the packet, so that it selects
// the same backend for each packet of a connection without flow state.
func (s Scheduler) Hashes() bool {
	return s == SchedulerSourceHash || s == SchedulerSymmetricHash || s == SchedulerMaglev
}

// CountsFlows reports whether the scheduler compares the numbers of flows of the backends.
func (s Scheduler) CountsFlows() bool { return s == SchedulerLC || s == SchedulerWLC }

// UsesWeights reports whether the weights of the backends have an effect. The empty scheduler is rr.
func (s Scheduler) UsesWeights() bool { return s != "" && s != SchedulerRR && s != SchedulerLC }

// OneWay reports whether replies bypass the gateway.
func (m Mode) OneWay() bool { return m == ModeDSR || m == ModeTunnel }

// RewritesSource reports whether the type gives inside hosts another source address for connections
// within their family.
func (t NATType) RewritesSource() bool { return t.UsesInterfaceAddress() || t == NATSNAT }

// HasBindings reports whether the type maps inside endpoints to allocated outside endpoints (RFC 4787 §4,
// RFC 6146 §3).
func (t NATType) HasBindings() bool { return t.RewritesSource() || t.CrossesStateful() }

// OneToOne reports whether the type maps prefixes of equal length, external to internal.
func (t NATType) OneToOne() bool { return t == NATStatic || t.ChecksumNeutral() }

// CrossesFamilies reports whether the type translates between IPv4 and IPv6.
func (t NATType) CrossesFamilies() bool { return t.CrossesStateful() || t.CrossesStateless() }

// UsesInterfaceAddress reports whether the outside address is an address of the outgoing interface.
func (t NATType) UsesInterfaceAddress() bool { return t == NATMasquerade }

// Forwards reports whether the type directs packets for one endpoint to another one.
func (t NATType) Forwards() bool { return t == NATPortForward }

// ChecksumNeutral reports whether a rewritten address keeps the sums of transport checksums (RFC 6296).
func (t NATType) ChecksumNeutral() bool { return t == NATNPT66 }

// CrossesStateful reports whether the type translates between IPv4 and IPv6 with bindings (RFC 6146).
func (t NATType) CrossesStateful() bool { return t == NATNAT64 }

// CrossesStateless reports whether the type translates between IPv4 and IPv6 without bindings (RFC 7915).
func (t NATType) CrossesStateless() bool { return t == NATSIIT }

// Known reports whether the type exists.
func (t NATType) Known() bool { return natKeys[t] != nil }

// Listens reports whether the rule is a port-forward with a listener, which is handled like a service
// with one backend.
func (r *NATRule) Listens() bool { return r.Type.Forwards() && r.Listen != nil }

// Key identifies the backend in consistent hashing: address and port. Both datapaths and all gateways
// hash the same keys, and thus agree on the backend of a tuple.
func (b Backend) Key() string { return netip.AddrPortFrom(b.Address, b.Port).String() }
