// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/hold"
)

// Addresses holds the addresses of services and pools on the host's interfaces: an hold.Holder,
// except in tests.
type Addresses interface {
	// Plan returns the changes that Set would make. It changes nothing.
	Plan([]hold.Want) (*datapath.Change, []hold.Status, error)
	// Set replaces the wanted addresses and returns the resulting change.
	Set([]hold.Want) (*datapath.Change, error)
	// Kick triggers another read of the host's addresses.
	Kick()
	Statuses() []hold.Status
	// Release removes all held addresses, unless keep is set, and ends the holder.
	Release(keep bool) error
}

// wantedAddresses lists the addresses of a configuration for which this host must receive packets.
// Addresses mapped by siit are omitted, because the configuration does not say which side of a
// mapping is a host of its own.
func wantedAddresses(c *config.Config, plan placement) (list []hold.Want) {
	leave := ""
	if c.HoldAddresses == config.SwitchOff {
		leave = LeftByKey
	}
	add := func(owner, leave string, first, last netip.Addr) {
		if first.IsValid() {
			list = append(list, hold.Want{First: first, Last: last, Owner: owner, Leave: leave})
		}
	}
	listen := func(owner, leave string, a netip.Addr, follows bool) {
		if a.IsValid() {
			list = append(list, hold.Want{First: a, Last: a, Owner: owner, Leave: leave, Listens: follows})
		}
	}
	for i := range c.Services {
		s := &c.Services[i]
		owner, leave := "service "+s.Name, leave
		if leave == "" && s.Check != nil && s.Check.Via == "service" {
			leave = "probes via the service cannot leave a host that has its address: write via: direct, or have the address routed here"
		}
		for _, l := range s.Listen {
			why := leave
			if why == "" && s.Mode == config.ModeStateless && l.Address.Is4() && slices.Contains(plan.services[i].Datapaths, "nftables") {
				why = "on nftables answers of a stateless service get its address before they are routed, and the kernel drops packets from an address of its own: have the address routed here, or write datapath: ebpf"
			}
			listen(owner, why, l.Address, s.Mode == config.ModeDNAT || s.Mode == config.ModeFullNAT)
		}
		for _, r := range s.SourcePool {
			add(owner, leave, r.First, r.Last)
		}
	}
	for i := range c.NAT {
		n := &c.NAT[i]
		owner := "nat " + n.Name
		if n.Listen != nil {
			listen(owner, leave, n.Listen.Address, true)
		}
		for _, r := range append(n.To.Addresses[:len(n.To.Addresses):len(n.To.Addresses)], n.Pool...) {
			add(owner, leave, r.First, r.Last)
		}
		if n.External.IsValid() {
			add(owner, leave, n.External.Masked().Addr(), lastOf(n.External))
		}
	}
	return list
}

// LeftByKey is the reason if the configuration turns holding off.
const LeftByKey = "hold-addresses is off"

// lastOf returns the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// holdAddresses passes the wanted addresses to the holder and returns the resulting change.
func (e *Engine) holdAddresses(cfg *config.Config, plan placement) *datapath.Change {
	if e.opt.Addresses == nil {
		return nil
	}
	change, err := e.opt.Addresses.Set(wantedAddresses(cfg, plan))
	if err != nil {
		e.opt.Log.Warn("the host's addresses cannot be read: those of services and pools are not held before it is looked at again", "error", err)
		return nil
	}
	return change
}

// addressWarnings returns warnings about unreachable addresses.
func (e *Engine) addressWarnings() (list []string) {
	if e.opt.Addresses == nil {
		return nil
	}
	for _, s := range e.opt.Addresses.Statuses() {
		if s.State == hold.Lost {
			list = append(list, fmt.Sprintf("%s: address %s on %s is lost: %s", strings.Join(s.Owners, ", "), s.Range(), s.On(), s.Why))
		}
		if s.State == hold.Foreign || s.State == hold.Absent && s.Why != LeftByKey {
			list = append(list, fmt.Sprintf("%s: address %s on %s is not held: %s", strings.Join(s.Owners, ", "), s.Range(), s.On(), s.Why))
		}
	}
	return list
}
