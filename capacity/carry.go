// SPDX-License-Identifier: Apache-2.0

package capacity

import "time"

// Carry is the load that a host can carry: the inverse of a plan.
type Carry struct {
	Host       Host    `json:"host"`
	Entries    uint64  `json:"entries"` // Within a tenth of the memory, a power of two.
	Memory     Bytes   `json:"memory"`  // of that table
	Connects   float64 `json:"connects_per_second"`
	Clients    uint64  `json:"clients,omitempty"` // with Habits.Connections each, at half fill
	OneService uint64  `json:"one_service"`       // Connections to one destination.
	Mappings   uint64  `json:"mappings"`          // Endpoint-independent, per protocol.
	PPSNft     uint64  `json:"packets_nftables"`
	PPSEBPF    uint64  `json:"packets_ebpf"`
	BitsNft    BitRate `json:"bits_nftables"`
	BitsEBPF   BitRate `json:"bits_ebpf"`
	Default    uint64  `json:"kernel_default"` // Default of Linux.
	OldRule    uint64  `json:"old_rule"`       // Limit in old guides for this memory.
}

// Habits describe the traffic for Capacity.
type Habits struct {
	Connections     uint64        // Per client; 0 omits Clients.
	Lifetime        time.Duration // of a connection, from first to last packet
	Linger          time.Duration // After the last packet; 0 means LingerTimeWait.
	PublicAddresses uint64        // 0 means 1.
	Frame           int           // Mean frame in bytes with FCS; 0 means 512.
	Rules           int           // Rules that each packet passes.
	Bandwidth       BitRate       // of the line; 0 means that cores are the limit
}

// Validate reports every error of t on h, by the checks of a Load with the same values.
func (t Habits) Validate(h Host) error {
	l := Load{Frame: t.Frame, Rules: t.Rules, PublicAddresses: t.PublicAddresses, Host: h,
		Requests: []Requests{{Name: "of each client", Rate: 1, Lifetime: t.Lifetime, Linger: t.Linger}}}
	return l.Validate()
}

// Capacity computes the load of the kind t that h can carry.
func Capacity(h Host, t Habits) Carry {
	entryBytes := EntryBytes(Extensions{NAT: true, Accounting: true}) + BucketBytes
	limit := min(uint64(memoryShare*float64(h.Memory))/entryBytes, maxEntries)
	entries := powerOfTwo(limit)
	if entries > limit {
		entries /= 2
	}
	if t.Linger == 0 {
		t.Linger = LingerTimeWait
	}
	if t.Frame == 0 {
		t.Frame = 512
	}
	pool := max(t.PublicAddresses, 1) * MasqueradePorts
	c := Carry{Host: h, Entries: entries, Memory: Bytes(entries * entryBytes),
		Connects:   RateFill * RateCeiling(entries, t.Lifetime, t.Linger),
		OneService: min(entries, uint64(float64(pool)*PortFill)),
		Mappings:   min(entries, uint64(float64(pool)*PortFill)),
		Default:    DefaultBuckets(h.Memory), OldRule: OldRule(h.Memory)}
	if t.Connections > 0 {
		c.Clients = entries / 2 / t.Connections
	}
	perCore := func(cost time.Duration) uint64 {
		pps := float64(h.Cores) / cost.Seconds()
		if t.Bandwidth > 0 {
			pps = min(pps, PacketRate(t.Bandwidth, t.Frame))
		}
		return uint64(pps)
	}
	c.PPSNft = perCore(CostNftables + time.Duration(t.Rules)*CostRule)
	c.PPSEBPF = perCore(CostEBPF)
	c.BitsNft = BitRate(c.PPSNft * 8 * uint64(t.Frame))
	c.BitsEBPF = BitRate(c.PPSEBPF * 8 * uint64(t.Frame))
	return c
}
