// SPDX-License-Identifier: Apache-2.0

// Package capacity plans a NAT gateway: from the load that it shall carry to
// tracked connections, memory, ports, public addresses and cores, and back from
// a host to the load that it can carry. It is arithmetic only; every constant
// names where it comes from.
package capacity

import (
	"math"
	"time"
)

// MasqueradePorts is how many ports Linux takes for source NAT of a connection
// from a port above 1023 when the rule names no range: 1024 to 65535
// (net/netfilter/nf_nat_core.c).
const MasqueradePorts = 64512

const (
	// PortFill is the part of a pool that a plan uses. Linux begins to refuse
	// between 90 and 95 % of a pool of 1,000 ports (measured).
	PortFill = 0.8
	// RateFill is the part of the ceiling of new connections that a plan uses:
	// beyond it clients back off while freed entries lie idle (measured: 57/s
	// where the ceiling was 200/s).
	RateFill = 0.5
	// portAttempts is how many ports Linux tries before it refuses a connection:
	// 128+64+32+16+8 (nf_nat_core.c).
	portAttempts = 248
	// maxEntries is the largest power of two that nf_conntrack_max, an int, takes.
	maxEntries = 1 << 30
	// maxAddresses is how many IPv4 addresses there are.
	maxAddresses = 1 << 32
	// memoryShare is the part of the memory that a connection table may take
	// before an attack on it becomes an attack on the host.
	memoryShare = 0.10
	// ethernetGap is what a frame costs on the wire beside its bytes with FCS:
	// preamble 8 and gap 12 (IEEE 802.3).
	ethernetGap = 20
)

// Linger is how long Linux keeps an entry after the last packet, by default
// (net/netfilter/nf_conntrack_proto_tcp.c, _udp.c).
const (
	LingerTimeWait  = 120 * time.Second
	LingerClose     = 10 * time.Second
	LingerSynSent   = 120 * time.Second
	LingerUDP       = 30 * time.Second
	LingerUDPStream = 120 * time.Second
)

// Floors of RFC 5382 REQ-5 and RFC 4787 REQ-5.
const (
	FloorTCPEstablished = 7440 * time.Second
	FloorTCPTransitory  = 240 * time.Second
	FloorUDP            = 120 * time.Second
)

// Timeouts of Sluice's configuration, when it names no others: how long the eBPF
// datapath keeps a flow after its last packet (docs/config.md).
const (
	TimeoutTCPEstablished = FloorTCPEstablished
	TimeoutTCPTransitory  = FloorTCPTransitory
	TimeoutUDP            = 300 * time.Second
)

// Cost of one packet on one core, all of the forwarding path counted. Measured
// on veth with 50,000 flows of 60-byte packets; a NIC with a good driver is
// faster, a virtual one slower: for orientation.
const (
	CostNftables = 1490 * time.Nanosecond // DNAT by verdict map: 0.67 Mpps
	CostEBPF     = 300 * time.Nanosecond  // XDP with cached next hop: 3.3 Mpps
	CostRule     = 3 * time.Nanosecond    // each rule that a packet walks past
)

// Population is Little's law: how many entries exist at once when rate begin
// each second, live for lifetime and are kept for linger.
func Population(rate float64, lifetime, linger time.Duration) float64 {
	return rate * (lifetime + linger).Seconds()
}

// RateCeiling is how many connections a second a table of the given size can
// take when each holds its entry for lifetime and linger.
func RateCeiling(entries uint64, lifetime, linger time.Duration) float64 {
	held := (lifetime + linger).Seconds()
	if held <= 0 {
		return math.Inf(1)
	}
	return float64(entries) / held
}

// PacketRate returns the packets a second that fill a line of the given rate
// (bit/s) with Ethernet frames of the given length (bytes with FCS).
func PacketRate(rate BitRate, frame int) float64 {
	return float64(rate) / (8 * float64(frame+ethernetGap))
}

// RefusalProbability is the chance that Linux finds no free port for a new
// connection when the given part of the pool is taken at random. Clusters of
// taken ports make it happen earlier.
func RefusalProbability(occupancy float64) float64 {
	return math.Pow(min(max(occupancy, 0), 1), portAttempts)
}

// PublicAddresses is how many addresses carry the given number of ports of one
// protocol with PortFill of each used. For mappings that depend on the endpoint
// (Linux masquerade) ports are the connections to the busiest destination; for
// endpoint-independent ones (RFC 4787 REQ-1) they are all mappings of the protocol.
func PublicAddresses(ports uint64) uint64 {
	return ceil(float64(ports) / (MasqueradePorts * PortFill))
}

// SubscribersPerAddress is how many blocks of that many ports one address gives
// (RFC 6888 REQ-4, RFC 7422).
func SubscribersPerAddress(block uint64) uint64 {
	if block == 0 {
		return 0
	}
	return MasqueradePorts / block
}

// PortBlock is the size of block, a power of two, for subscribers of whom 99 in
// 100 never hold more than the given number of mappings, with 30 % in reserve.
func PortBlock(mappings uint64) uint64 {
	return powerOfTwo(ceil(float64(mappings) * 1.3))
}

// DefaultBuckets is the number of hash buckets, and the limit of entries, that
// Linux chooses for a memory of that size (nf_conntrack_core.c).
func DefaultBuckets(memory Bytes) uint64 {
	switch {
	case memory > 4*GiB:
		return 262144
	case memory > GiB:
		return 65536
	}
	return max(uint64(memory)/16384/8, 1024)
}

// OldRule is the limit of entries in old guides and 32-bit kernels: one for each
// 16 KiB of memory. 512 MiB give 32,768.
func OldRule(memory Bytes) uint64 { return uint64(memory) / 16384 }

func ceil(x float64) uint64 {
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
