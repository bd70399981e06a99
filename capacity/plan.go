// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// Plan holds the resources that a load requires.
type Plan struct {
	Load    Load   `json:"load"`
	Peak    uint64 `json:"peak"`    // Concurrent entries, without headroom.
	Entries uint64 `json:"entries"` // nf_conntrack_max: peak with headroom, a power of two.
	Buckets uint64 `json:"buckets"` // nf_conntrack_buckets: equal, so that chains stay at two.
	// Flows is the size of the eBPF datapath's table. It is like Entries, with Sluice's timeouts.
	Flows uint64 `json:"flows"`
	// EntryBytes is the kernel memory of one entry, Memory that for the full table.
	EntryBytes uint64 `json:"entry_bytes"`
	Memory     Bytes  `json:"memory"`
	// RateCeiling is the rate of connections that fills the table, for the mean lifetime of entries of the planned
	// requests; 0 without requests.
	RateCeiling float64 `json:"rate_ceiling,omitempty"`

	Ports           uint64  `json:"ports,omitempty"`            // in use at the peak, by the protocol that needs most
	PublicAddresses uint64  `json:"public_addresses,omitempty"` // Required for Ports.
	Occupancy       float64 `json:"occupancy,omitempty"`        // of the given addresses, 0 to 1
	Refused         float64 `json:"refused,omitempty"`          // Probability that a new connection finds no port.

	PortBlock        uint64 `json:"port_block,omitempty"`        // Ports per subscriber.
	PerAddress       uint64 `json:"per_address,omitempty"`       // Subscribers per address.
	BlockAddresses   uint64 `json:"block_addresses,omitempty"`   // Addresses for all subscribers.
	ClientBandwidth  Bytes  `json:"client_bandwidth,omitempty"`  // Bytes per second per client if all are active.
	PacketRate       uint64 `json:"packet_rate,omitempty"`       // Packets per second that fill the line.
	CoresNftables    uint64 `json:"cores_nftables,omitempty"`    // Cores for PacketRate.
	CoresEBPF        uint64 `json:"cores_ebpf,omitempty"`        // The same for XDP.
	NeighbourEntries uint64 `json:"neighbour_entries,omitempty"` // If all clients are on one link.

	// Notes lists unsatisfied requirements and the limits of the numbers.
	Notes []string `json:"notes,omitempty"`
}

// For computes the plan for l.
func For(l Load) (Plan, error) {
	if err := l.Validate(); err != nil {
		return Plan{}, err
	}
	if len(l.Classes) == 0 && len(l.Requests) == 0 {
		return Plan{}, fmt.Errorf("load: neither classes of clients nor requests: nothing to plan for")
	}
	peak, clients := l.connections()
	if need := peak * l.headroom(); !(need <= maxEntries) {
		return Plan{}, fmt.Errorf("load: %.4g entries at the peak, with headroom: a kernel tracks %d at most; plan a part of it for each gateway", need, maxEntries)
	}
	p := Plan{Load: l, Peak: ceilUint(peak)}
	p.Entries = powerOfTwo(ceilUint(peak * l.headroom()))
	p.Flows = powerOfTwo(ceilUint(l.flows() * l.headroom()))
	p.Buckets = max(p.Entries, 1024)
	kept := Extensions{NAT: true, Accounting: true, Helper: l.Helper}
	p.EntryBytes, p.Memory = EntryBytes(kept), Bytes(TableBytes(p.Entries, p.Buckets, kept))
	p.rates()
	p.ports()
	p.bandwidth(clients)
	p.NeighbourEntries = clients
	p.addNotes()
	return p, nil
}

// rates computes the maximum rate of new connections from the mean time of the planned requests in the table.
func (p *Plan) rates() {
	var rate, held float64
	for _, r := range p.Load.Requests {
		rate += r.Rate
		held += r.entries()
	}
	if held > 0 {
		p.RateCeiling = float64(p.Entries) / (held / rate)
	}
}

func (p *Plan) ports() {
	l := &p.Load
	switch {
	case l.EndpointIndependent:
		p.Ports = ceilUint(l.ports(Requests.flows))
	case l.BusiestDestination != 0:
		p.Ports = min(ceilUint(l.ports(Requests.entries)), l.BusiestDestination)
	default:
		p.Ports = ceilUint(l.ports(Requests.entries))
	}
	p.PublicAddresses = PublicAddresses(p.Ports)
	given := l.PublicAddresses
	if given == 0 {
		given = p.PublicAddresses
	}
	p.Occupancy = float64(p.Ports) / float64(given*MasqueradePorts)
	p.Refused = RefusalProbability(p.Occupancy)
	if l.Subscribers == 0 {
		return
	}
	p.PortBlock = PortBlock(l.mappings())
	if p.PerAddress = SubscribersPerAddress(p.PortBlock); p.PerAddress > 0 {
		p.BlockAddresses = (l.Subscribers-1)/p.PerAddress + 1
	}
}

func (p *Plan) bandwidth(clients uint64) {
	l := &p.Load
	if l.Bandwidth == 0 {
		return
	}
	if clients > 0 {
		p.ClientBandwidth = Bytes(uint64(l.Bandwidth) / 8 / clients)
	}
	rate := PacketRate(l.Bandwidth, l.frame())
	p.PacketRate = ceilUint(rate)
	rules := time.Duration(l.Rules) * CostRule
	p.CoresNftables = ceilUint(rate * (CostNftables + rules).Seconds())
	p.CoresEBPF = ceilUint(rate * CostEBPF.Seconds())
}

func (p *Plan) addNotes() {
	l := &p.Load
	say := func(format string, args ...any) { p.Notes = append(p.Notes, fmt.Sprintf(format, args...)) }
	if l.Host.Memory > 0 && float64(p.Memory) > memoryShare*float64(l.Host.Memory) {
		say("the full table takes %s of %s: over %.0f %%, a flood could exhaust the host; limit connections per source or add memory",
			p.Memory, l.Host.Memory, memoryShare*100)
	}
	if l.Host.Cores > 0 && p.CoresNftables > uint64(l.Host.Cores) {
		say("nftables needs about %d cores for the line's packets, the host has %d; eBPF needs about %d", p.CoresNftables, l.Host.Cores, p.CoresEBPF)
	}
	if l.PublicAddresses > 0 && p.PublicAddresses > l.PublicAddresses {
		say("%d public addresses are too few: %d ports in use need %d", l.PublicAddresses, p.Ports, p.PublicAddresses)
	}
	if p.PortBlock > MasqueradePorts {
		say("a block of %d ports for each subscriber is more than one address has", p.PortBlock)
	}
	if l.PublicAddresses > 0 && p.BlockAddresses > l.PublicAddresses {
		say("port blocks for %d subscribers need %d public addresses, there are %d", l.Subscribers, p.BlockAddresses, l.PublicAddresses)
	}
	var offered float64
	for i, r := range l.Requests {
		offered += r.Rate
		if r.Protocol != flow.UDP && r.lingerOrDefault() < FloorTCPTransitory {
			say("requests %s: linger %v is below the %v of RFC 5382 REQ-5 (Linux's own default is 120 s); give %v where Sluice's timeouts hold in the kernel's table, too",
				name(r.Name, i), r.lingerOrDefault(), FloorTCPTransitory, FloorTCPTransitory)
		}
	}
	if p.RateCeiling > 0 && offered > RateFill*p.RateCeiling {
		say("%.0f new connections/s are over half of the ceiling of %.0f/s: raise the headroom to 2 or more", offered, p.RateCeiling)
	}
	if !l.EndpointIndependent && l.BusiestDestination == 0 {
		say("ports are planned as if every connection went to one destination; give busiest-destination if that is not so")
	}
}
