// SPDX-License-Identifier: Apache-2.0

// Package capacity plans a NAT gateway. It computes tracked connections, memory, ports, public addresses and cores
// from a load, and the possible load from a host. It is arithmetic only; every constant names its source.
package capacity

import (
	"math"
	"time"
)

// MasqueradePorts is the number of ports that Linux uses for source NAT without a port range in the rule: 1024 to
// 65535, for source ports above 1023 (net/netfilter/nf_nat_core.c).
const MasqueradePorts = 64512

const (
	// PortFill is the part of a pool that a plan uses. Linux begins to refuse connections between 90 and 95 % of a
	// pool of 1,000 ports (measured).
	PortFill = 0.8
	// RateFill is the part of the maximum rate of new connections that a plan uses. Beyond it clients back off while
	// freed entries stay unused (measured: 57/s with a maximum of 200/s).
	RateFill = 0.5
	// portAttempts is the number of ports that Linux tries before it refuses a connection: 128+64+32+16+8
	// (nf_nat_core.c).
	portAttempts = 248
	// maxEntries is the largest power of two for nf_conntrack_max, an int.
	maxEntries = 1 << 30
	// maxAddresses is the number of IPv4 addresses.
	maxAddresses = 1 << 32
	// memoryShare is the maximum share of the memory for a connection table. A larger table would turn an attack on
	// the table into an attack on the host.
	memoryShare = 0.10
	// ethernetGap is the overhead of a frame on the wire in addition to its bytes with FCS: preamble 8 and gap 12
	// (IEEE 802.3).
	ethernetGap = 20
)

// Linger is the default time that Linux keeps an entry after the last packet (net/netfilter/nf_conntrack_proto_tcp.c,
// _udp.c).
const (
	LingerTimeWait  = 120 * time.Second
	LingerClose     = 10 * time.Second
	LingerSynSent   = 120 * time.Second
	LingerUDP       = 30 * time.Second
	LingerUDPStream = 120 * time.Second
)

// Minimum timeouts of RFC 5382 REQ-5 and RFC 4787 REQ-5.
const (
	FloorTCPEstablished = 7440 * time.Second
	FloorTCPTransitory  = 240 * time.Second
	FloorUDP            = 120 * time.Second
)

// Default timeouts of Sluice's configuration: the time that the eBPF datapath keeps a flow after its last packet
// (docs/reference/config.md).
const (
	TimeoutTCPEstablished = FloorTCPEstablished
	TimeoutTCPTransitory  = FloorTCPTransitory
	TimeoutUDP            = 300 * time.Second
)

// Cost of one packet on one core for the whole forwarding path. Measured on veth with 50,000 flows of 60-byte
// packets. A NIC with a good driver is faster, a virtual one slower, so the values are approximate.
const (
	CostNftables = 1490 * time.Nanosecond // DNAT by verdict map: 0.67 Mpps.
	CostEBPF     = 300 * time.Nanosecond  // XDP with cached next hop: 3.3 Mpps.
	CostRule     = 3 * time.Nanosecond    // Each rule that a packet passes.
)

// Population is Little's law: the number of concurrent entries if rate entries begin per second, live for lifetime
// and stay for linger.
func Population(rate float64, lifetime, linger time.Duration) float64 {
	return rate * (lifetime + linger).Seconds()
}

// RateCeiling returns the maximum connections per second of a table if each uses its entry for lifetime and linger.
func RateCeiling(entries uint64, lifetime, linger time.Duration) float64 {
	held := (lifetime + linger).Seconds()
	if held <= 0 {
		return math.Inf(1)
	}
	return float64(entries) / held
}

// PacketRate returns the packets per second that fill a line with Ethernet frames. rate is in bit/s, frame in bytes
// with FCS.
func PacketRate(rate BitRate, frame int) float64 {
	return float64(rate) / (8 * float64(frame+ethernetGap))
}

// RefusalProbability returns the probability that Linux finds no free port for a new connection. occupancy is the
// used part of the pool, at random. Clusters of used ports increase the probability.
func RefusalProbability(occupancy float64) float64 {
	return math.Pow(min(max(occupancy, 0), 1), portAttempts)
}

// PublicAddresses returns the number of addresses for the given number of ports of one protocol at PortFill. For
// endpoint-dependent mappings (Linux masquerade), ports counts the connections to the busiest destination. For
// endpoint-independent mappings (RFC 4787 REQ-1), it counts all mappings of the protocol.
func PublicAddresses(ports uint64) uint64 {
	return ceilUint(float64(ports) / (MasqueradePorts * PortFill))
}

// SubscribersPerAddress returns the number of blocks of the given size in one address (RFC 6888 REQ-4, RFC 7422).
func SubscribersPerAddress(block uint64) uint64 {
	if block == 0 {
		return 0
	}
	return MasqueradePorts / block
}

// PortBlock returns the block size, a power of two with a reserve of 30 %. mappings is a number that 99 % of the
// subscribers do not exceed.
func PortBlock(mappings uint64) uint64 {
	return powerOfTwo(ceilUint(float64(mappings) * 1.3))
}

// DefaultBuckets returns the default number of hash buckets, and of entries, of Linux for a memory size
// (nf_conntrack_core.c).
func DefaultBuckets(memory Bytes) uint64 {
	switch {
	case memory > 4*GiB:
		return 262144
	case memory > GiB:
		return 65536
	}
	return max(uint64(memory)/16384/8, 1024)
}

// OldRule returns the limit of entries in old guides and 32-bit kernels: one per 16 KiB of memory. 512 MiB give
// 32,768.
func OldRule(memory Bytes) uint64 { return uint64(memory) / 16384 }

func ceilUint(x float64) uint64 {
	if x <= 0 {
		return 0
	}
	return uint64(math.Ceil(x))
}

// powerOfTwo rounds up.
func powerOfTwo(n uint64) uint64 {
	p := uint64(1)
	for p < n && p < 1<<62 {
		p <<= 1
	}
	return p
}
