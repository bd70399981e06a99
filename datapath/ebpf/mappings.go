// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
)

var _ datapath.Mapper = (*Datapath)(nil)

const xdpPass = 2 // XDP_PASS of linux/bpf.h

// MappingRules lists the rules in force that allow mappings, in configuration order.
func (d *Datapath) MappingRules() (list []datapath.MappingRule) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inForce == nil {
		return nil
	}
	for _, n := range d.snapshot.NAT {
		for id, r := range d.inForce.Mappable {
			if r == n {
				list = append(list, datapath.MappingRule{NATRule: n, Outside: d.inForce.Outside(id)})
			}
		}
	}
	return list
}

// Mappings lists the mappings of the rules in force.
func (d *Datapath) Mappings() (list []datapath.Mapping, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.inForce == nil {
		return nil, nil
	}
	all, err := table.Content[wire.MappingKey, wire.Mapping](d.t.Maps["mappings"])
	for k, v := range all {
		list = append(list, datapath.Mapping{Rule: d.inForce.Names.Source[uint32(k.Rule)], Protocol: flow.Protocol(k.L4Proto),
			Inside:  netip.AddrPortFrom(wire.AddrFrom(k.Addr, k.Family == wire.Family6), wire.PortOf(k.Port)),
			Outside: outsideOf(v), Nonce: v.Nonce, Expires: time.Duration(v.Expires)})
	}
	return list, err
}

func outsideOf(v wire.Mapping) netip.AddrPort {
	return netip.AddrPortFrom(wire.AddrFrom(v.Outside, v.OutsideFamily == wire.Family6), wire.PortOf(v.Port))
}

// mappingKey returns the key of a mapping in the rule in force.
func (d *Datapath) mappingKey(m datapath.Mapping) (wire.MappingKey, error) {
	if d.inForce != nil {
		for id, r := range d.inForce.Mappable {
			if r.Name == m.Rule {
				a := m.Inside.Addr()
				return wire.MappingKey{Addr: wire.AddrOf(a), Port: wire.PortOf(m.Inside.Port()), L4Proto: uint8(m.Protocol), Rule: uint8(id),
					Family: uint32(wire.FamilyOf(a))}, nil
			}
		}
	}
	return wire.MappingKey{}, fmt.Errorf("rule %q allows no mappings in the ebpf datapath", m.Rule)
}

// Map creates a mapping.
func (d *Datapath) Map(m datapath.Mapping, exact bool) (datapath.Mapping, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k, err := d.mappingKey(m)
	if err != nil {
		return m, err
	}
	rule := d.inForce.Rules[uint32(k.Rule)]
	four := m.Inside.Addr().Is4() || rule.PrefixLen > 0
	outside := slices.DeleteFunc(d.inForce.Outside(uint32(k.Rule)), func(a netip.Addr) bool { return a.Is4() != four })
	wanted := m.Outside.Addr()
	if !slices.Contains(outside, wanted) {
		if len(outside) == 0 || exact && !wanted.IsUnspecified() {
			return m, fmt.Errorf("outside address %s: %w", wanted, datapath.ErrNoPort)
		}
		wanted = netip.IPv6Unspecified()
		if four {
			wanted = netip.IPv4Unspecified()
		}
	}
	request := wire.MappingRequest{Key: k, Place: uint32(slices.Index(outside, wanted) + 1)}
	request.Mapping = wire.Mapping{Outside: wire.AddrOf(wanted), OutsideFamily: wire.FamilyOf(wanted), Port: wire.PortOf(m.Outside.Port()),
		Nonce: m.Nonce, Expires: uint64(m.Expires)}
	if m.Outside.Port() == 0 && !exact {
		request.Mapping.Port = k.Port // the allocation prefers the inside port
	}
	if exact {
		request.Exact = 1
	}
	for range mapTries {
		made := request
		if err := d.runMapProgram("map_open", d.switches, &made); err != nil {
			return m, err
		}
		switch made.Reason {
		case wire.ReasonNone:
		case wire.ReasonClientPorts:
			return m, datapath.ErrQuota
		case wire.ReasonNoPort:
			return m, datapath.ErrNoPort
		default:
			return m, fmt.Errorf("mappings: %s", wire.NameOf(wire.ReasonNames(), int(made.Reason)))
		}
		m.Outside = outsideOf(made.Mapping)
		if !d.isTaken(m.Protocol, m.Outside) {
			return m, nil
		}
		if err := d.runMapProgram("map_close", d.switches, &made); err != nil { // its port is in hold-down, so the next attempt gets another port
			return m, err
		}
	}
	return m, datapath.ErrNoPort
}

const mapTries = 4 // attempts to find a port without another user

// isTaken reports whether an outside endpoint has another user: a service, a port-forward, or a
// socket of this host.
func (d *Datapath) isTaken(p flow.Protocol, at netip.AddrPort) bool {
	listens := func(protocol flow.Protocol, l *config.Listen) bool {
		a := l.Address
		if l.Follows() {
			a, _ = d.lastHost.ListenAddress(l.Interface, at.Addr().Is6())
		}
		return (protocol == p || protocol == flow.Any) && a == at.Addr() && (len(l.Ports) == 0 ||
			slices.ContainsFunc(l.Ports, func(r flow.Ports) bool { return r.Contains(at.Port()) }))
	}
	c := d.snapshot.Config
	for i := range c.Services {
		for k := range c.Services[i].Listen {
			if listens(c.Services[i].Protocol, &c.Services[i].Listen[k]) {
				return true
			}
		}
	}
	for i := range c.NAT {
		if n := &c.NAT[i]; n.Listen != nil && listens(n.Protocol, n.Listen) {
			return true
		}
	}
	return d.lastHost.Owns(at.Addr()) && errors.Is(d.inNamespace(func() error { return tryBind(p, at) }), unix.EADDRINUSE)
}

// tryBind tries to bind a socket like a server.
func tryBind(p flow.Protocol, at netip.AddrPort) error {
	kind := unix.SOCK_STREAM
	if p == flow.UDP {
		kind = unix.SOCK_DGRAM
	}
	var to unix.Sockaddr = &unix.SockaddrInet4{Port: int(at.Port())}
	family := unix.AF_INET
	if a := at.Addr(); a.Is4() {
		to.(*unix.SockaddrInet4).Addr = a.As4()
	} else {
		family, to = unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: a.As16()}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if p == flow.TCP { // SO_REUSEADDR: connections in TIME_WAIT do not prevent bind
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
	}
	return unix.Bind(fd, to)
}

// Renew sets the time at which a mapping expires.
func (d *Datapath) Renew(m datapath.Mapping) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	k, err := d.mappingKey(m)
	if err != nil {
		return err
	}
	var v wire.Mapping
	if err := d.t.Maps["mappings"].Lookup(&k, &v); err != nil {
		return fmt.Errorf("mappings: %w", err)
	}
	v.Expires = uint64(m.Expires)
	return d.t.Maps["mappings"].Update(&k, &v, ebpf.UpdateExist)
}

// Unmap removes a mapping.
func (d *Datapath) Unmap(m datapath.Mapping) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	k, err := d.mappingKey(m)
	if err != nil {
		return err
	}
	return d.runMapProgram("map_close", d.switches, &wire.MappingRequest{Key: k})
}

// runMapProgram runs a program that opens or closes a mapping.
func (d *Datapath) runMapProgram(name string, s wire.Switches, request *wire.MappingRequest) error {
	frame := unsafe.Slice((*byte)(unsafe.Pointer(request)), unsafe.Sizeof(*request))
	verdict, err := d.runOnDemand(name, s, &ebpf.RunOptions{Data: slices.Clone(frame), DataOut: frame})
	if err == nil && verdict != xdpPass {
		err = fmt.Errorf("program %s: verdict %d", name, verdict)
	}
	return err
}

// retireMappings removes mappings without a configured rule, client or outside address. A new epoch
// then makes the clients renew their mappings.
func (d *Datapath) retireMappings(want *compile.Desired) error {
	all, err := table.Content[wire.MappingKey, wire.Mapping](d.t.Maps["mappings"])
	if err != nil {
		return err
	}
	lost := false
	for k, v := range all {
		inside := wire.AddrFrom(k.Addr, k.Family == wire.Family6)
		n := want.Mappable[uint32(k.Rule)]
		if n != nil && slices.ContainsFunc(n.Source, func(p netip.Prefix) bool { return p.Contains(inside) }) &&
			slices.Contains(want.Outside(uint32(k.Rule)), outsideOf(v).Addr()) {
			continue
		}
		lost = true
		if err := d.runMapProgram("map_close", want.Switches, &wire.MappingRequest{Key: k}); err != nil {
			return err
		}
	}
	epoch := ids.KeyOf(ids.Meta, "pcp-epoch")
	if _, known := d.t.IDs.Known[epoch]; known && !lost || !want.Switches.Mappings && !lost {
		return nil
	}
	draft := d.t.IDs.Draft()
	draft.Fresh[epoch] = uint32(kernel.SinceBoot() / time.Second)
	return draft.Keep()
}

// Epoch returns when mappings were last lost, as the time since boot.
func (d *Datapath) Epoch() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil {
		return kernel.SinceBoot()
	}
	return time.Duration(d.t.IDs.Known[ids.KeyOf(ids.Meta, "pcp-epoch")]) * time.Second
}
