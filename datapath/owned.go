// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Owned is a virtual address of the gateway. A packet to one of its ports without a listener is refused or dropped,
// and not routed. Otherwise it would follow the default route back to its router, in a loop until its TTL is 0.
type Owned struct {
	Address netip.Addr
	// Answer is the most informative when-down setting of the services on the address; for a port-forward it is
	// reset.
	Answer config.WhenDown
	// Bound reports that every listener is bound to an interface: elsewhere the address may belong to another host.
	// Then only packets that would leave by their input interface are refused.
	Bound bool
	// Shared reports that another datapath also has listeners on the address.
	Shared bool
}

// OwnedAddresses returns, in order, the addresses that services and port-forwards of a snapshot listen on. It omits
// addresses for which near returns true: hosts on the gateway's own networks are reached without a router, and one
// may have the address. It also omits addresses of interfaces, because their other ports belong to the host.
func OwnedAddresses(s *Snapshot, near func(netip.Addr) bool) []Owned {
	o := owners{mine: map[string]bool{}, of: map[netip.Addr]*Owned{}, here: map[netip.Addr]bool{}}
	for _, svc := range s.Services {
		o.mine["service "+svc.Name] = true
	}
	for _, n := range s.NAT {
		o.mine["nat "+n.Name] = true
	}
	for i := range s.Config.Services {
		svc := &s.Config.Services[i]
		for _, l := range svc.Listen {
			o.add(l.Address, cmp.Or(svc.WhenDown, config.WhenDownReset), l.Interface != "", o.mine["service "+svc.Name])
		}
	}
	for i := range s.Config.NAT {
		if n := &s.Config.NAT[i]; n.Listens() {
			o.add(n.Listen.Address, config.WhenDownReset, n.Listen.Interface != "" || n.In != "", o.mine["nat "+n.Name])
		}
	}
	var list []Owned
	for a, owned := range o.of {
		if o.here[a] && !near(a) {
			list = append(list, *owned)
		}
	}
	slices.SortFunc(list, func(a, b Owned) int { return a.Address.Compare(b.Address) })
	return list
}

// owners collects the listeners of a configuration by address.
type owners struct {
	mine map[string]bool // services and NAT rules of the snapshot
	of   map[netip.Addr]*Owned
	here map[netip.Addr]bool // addresses on which this datapath has listeners
}

// telling lists the answers in order of their information.
var telling = []config.WhenDown{config.WhenDownDrop, config.WhenDownReject, config.WhenDownReset}

func (o *owners) add(a netip.Addr, answer config.WhenDown, bound, mine bool) {
	if !a.IsValid() { // listens on the address of an interface
		return
	}
	was := o.of[a]
	if was == nil {
		was = &Owned{Address: a, Answer: answer, Bound: true}
		o.of[a] = was
	}
	if slices.Index(telling, answer) > slices.Index(telling, was.Answer) {
		was.Answer = answer
	}
	was.Bound = was.Bound && bound
	if mine {
		o.here[a] = true
	} else {
		was.Shared = true
	}
}

// SharesReplies reports whether every node of a cluster translates the replies of a service, also without a flow: the
// hash of the request identifies the backend, and nothing else changes the choice.
func SharesReplies(c *config.Config, s *config.Service) bool {
	ported := s.Protocol == flow.TCP || s.Protocol == flow.UDP
	return len(c.Nodes()) > 1 && ported && s.Mode == config.ModeDNAT && s.Scheduler.Hashes() && s.Persistence == nil && len(s.Sessions) == 0 && !s.SYNCookies
}

// BackupPools returns the pool addresses that this host announces for other nodes of its cluster. It translates nothing
// to them.
func BackupPools(s *Snapshot) (pools []config.AddressRange) {
	for _, svc := range s.Services {
		pools = append(pools, svc.Backup()...)
	}
	for _, n := range s.NAT {
		pools = append(pools, n.Backup()...)
	}
	return pools
}

// OwnedPools returns the outside addresses of source translation. Packets to them that match no mapping are dropped.
func OwnedPools(s *Snapshot) (pools []config.AddressRange) {
	pools = BackupPools(s)
	for _, svc := range s.Services {
		pools = append(pools, svc.SourcePool...)
	}
	for _, n := range s.NAT {
		pools = append(pools, n.To.Addresses...)
		pools = append(pools, n.Pool...)
	}
	return pools
}
