// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

var _ datapath.Explainer = (*Datapath)(nil)

// xdpMeta is struct xdp_md of linux/bpf.h.
type xdpMeta struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// Explain runs a packet through the program with the switch dry_run set, on the maps in force. The
// program decides as usual, writes no map, and leaves its plan in the working memory.
func (d *Datapath) Explain(_ context.Context, q datapath.Question) (*datapath.Explanation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.inForce == nil {
		return nil, datapath.ErrIdle
	}
	frame, err := questionFrame(q)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	var e *datapath.Explanation
	err = d.inNamespace(func() error {
		in, err := d.ingressInterface(q)
		if err != nil {
			return err
		}
		w, err := d.dryRun(frame, uint32(in.Index))
		if err != nil {
			return err
		}
		e = d.explanation(q, in, w)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	return e, nil
}

// ingressInterface returns the ingress interface of a question.
func (d *Datapath) ingressInterface(q datapath.Question) (netdev.Interface, error) {
	h, err := readHost()
	if err != nil {
		return netdev.Interface{}, err
	}
	list, _ := h.AttachTo(d.snapshot.Config)
	if len(list) == 0 {
		return netdev.Interface{}, errors.New("no interface is attached")
	}
	if source := q.Tuple.Source.Addr(); q.Interface == "" && h.Owns(source) {
		return netdev.Interface{}, fmt.Errorf("the source %s is an address of this host, whose own connections the programs do not see: explain is about packets that arrive; name the interface", source)
	}
	if q.Interface == "" {
		back, _, err := netdev.NextHop(q.Tuple.Source.Addr())
		if at := slices.IndexFunc(list, func(a netdev.Interface) bool { return err == nil && a.Index == back }); at >= 0 {
			return list[at], nil
		}
		return list[0], nil
	}
	i, ok := h.ByName(q.Interface)
	if !ok {
		return i, fmt.Errorf("interface %s: no interface has this name", q.Interface)
	}
	if !slices.ContainsFunc(list, func(a netdev.Interface) bool { return a.Name == q.Interface }) {
		return i, datapath.ErrIdle // no program runs there
	}
	return i, nil
}

// questionFrame builds the frame for a question. A TCP packet is a SYN.
func questionFrame(q datapath.Question) ([]byte, error) {
	p, err := q.Packet(packet.SYN)
	if err != nil {
		return nil, err
	}
	return append(packet.Packet{&packet.Ethernet{}}, p...).Build(), nil
}

// dryRun runs a frame through the program and returns the program's working memory. It stays on one
// CPU, because the working memory is per CPU.
func (d *Datapath) dryRun(frame []byte, ifindex uint32) (*wire.Work, error) {
	c, err := d.t.Program(d.switches, true, "sluice_xdp")
	if err != nil {
		return nil, err
	}
	defer c.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu, restore, err := kernel.OneCPU()
	if err != nil {
		return nil, err
	}
	defer restore()
	o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: xdpMeta{DataEnd: uint32(len(frame)), Ingress: ifindex}}
	if _, err := c.Programs["sluice_xdp"].Run(o); err != nil {
		return nil, err
	}
	var works []wire.Work
	if err := c.Maps["works"].Lookup(uint32(0), &works); err != nil {
		return nil, err
	}
	return &works[cpu], nil
}

func (d *Datapath) explanation(q datapath.Question, in netdev.Interface, w *wire.Work) *datapath.Explanation {
	p := w.Plan
	e := &datapath.Explanation{Datapath: d.Name(), Interface: in.Name, Before: q.Tuple, After: q.Tuple,
		Action: wire.NameOf(wire.ActionNames(), int(p.Action)), Reason: wire.NameOf(wire.ReasonNames(), int(p.Reason)), Existing: p.Flags&wire.PlanExisting != 0}
	step := func(format string, args ...any) { e.Steps = append(e.Steps, fmt.Sprintf(format, args...)) }
	step("arrives on %s: %s", in.Name, q.Tuple)
	d.owner(e, w)
	if e.Owner != "" {
		step("%s decides", e.Owner)
	}
	if e.Backend != "" {
		step("backend %s", e.Backend)
	}
	if isForwarded(&p) {
		v6 := p.Family == wire.Family6
		e.After = wire.TupleOf(wire.AddrFrom(wire.Addr(p.To.Saddr), v6), wire.AddrFrom(wire.Addr(p.To.Daddr), v6), p.To.Sport, p.To.Dport, p.To.L4Proto)
		if e.After != e.Before {
			step("becomes %s", e.After)
		}
		if n := d.pendingSource(e); n != "" {
			e.Notes = append(e.Notes, n)
		}
	}
	if isForwarded(&p) && p.Flags&wire.PlanRouted != 0 {
		h := wire.Hop(w.Hop)
		if p.Hop != 0 {
			_ = d.t.Maps["hops"].Lookup(uint32(p.Hop), &h) // an array: every index exists
		}
		e.Out, e.NextHop = d.egress(w, int(h.Ifindex), in.Index, q.Tuple)
		step("leaves by %s, next hop %s, MTU %d", e.Out, e.NextHop, h.Mtu)
	}
	if e.Reason == wire.NameOf(wire.ReasonNames(), int(wire.ReasonNotOurs)) {
		e.Out, e.NextHop = d.kernelRoute(in.Index, q.Tuple)
	}
	if note := datapath.AnswersBypass(d.snapshot, d.lastHost.Networks, e); note != "" {
		e.Notes = append(e.Notes, note)
	}
	if off := d.forwardingOff(e); off != "" {
		step("%s", off)
	}
	step("%s: %s", e.Action, e.Reason)
	return e
}

// kernelRoute returns the egress interface and the next hop of a packet left to the kernel. It
// returns nothing for a local destination.
func (d *Datapath) kernelRoute(in int, t flow.Tuple) (string, netip.Addr) {
	index, hop, err := netdev.Routed(in, t)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) { // refused by the reverse path filter
		index, hop, err = netdev.NextHop(t.Dest.Addr())
	}
	if err != nil {
		return "", netip.Addr{}
	}
	name := fmt.Sprint(index)
	if l, err := netlink.LinkByIndex(index); err == nil {
		name = l.Attrs().Name
	}
	return name, hop
}

// forwardingOff returns how to enable forwarding in the kernel, if its absence prevents a
// translation. A rule with an egress interface matches no packet while the kernel forwards none.
func (d *Datapath) forwardingOff(e *datapath.Explanation) string {
	from, to := e.Before.Source.Addr(), e.Before.Dest.Addr()
	off := kernel.ForwardingOff(kernel.Sysctl, e.Interface, !from.Is4())
	switch {
	case off == "" || e.Reason == wire.NameOf(wire.ReasonNames(), int(wire.ReasonForwardingOff)):
		return off
	case e.Reason != wire.NameOf(wire.ReasonNames(), int(wire.ReasonNotOurs)):
		return ""
	}
	index, _, err := netdev.NextHop(to)
	if err != nil {
		return "" // for this host, or without a route
	}
	within := func(list []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, r := range d.snapshot.NAT {
		if r.Out == "" || len(r.Source) > 0 && !within(r.Source, from) {
			continue
		}
		out, err := netlink.LinkByIndex(index)
		if err == nil && r.Out.Has(out.Attrs().Name) && !within(r.Except, to) {
			return r.Name + " would translate it, but " + off
		}
	}
	return ""
}

// pendingSource describes the parts of the source that the program chooses only for a real packet.
func (d *Datapath) pendingSource(e *datapath.Explanation) string {
	source := e.After.Source
	switch {
	case source == e.Before.Source || source.Port() != 0, !source.Addr().IsUnspecified() && datapath.Portless(e.Before.Protocol):
		return ""
	case !source.Addr().IsUnspecified():
		return "port 0 stands for one that is chosen when a packet is really sent"
	}
	var pool []string
	for _, a := range d.poolOf(e.Owner) {
		if a.Is4() == source.Addr().Is4() {
			pool = append(pool, a.String())
		}
	}
	return fmt.Sprintf("%s stands for an address of %s and a port that are chosen when a packet is really sent", source, strings.Join(pool, ", "))
}

// poolOf returns the source pool of a service or rule.
func (d *Datapath) poolOf(owner string) []config.AddressRange {
	for _, s := range d.snapshot.Services {
		if s.Name == owner {
			return s.SourcePool
		}
	}
	for _, r := range d.snapshot.NAT {
		if r.Name == owner {
			return append(slices.Clone(r.To.Addresses), r.Pool...)
		}
	}
	return nil
}

// isForwarded reports whether the plan sends a packet on, by the program or by the kernel.
func isForwarded(p *wire.Plan) bool {
	return p.Action == wire.ActionForward || p.Flags&wire.PlanKernel != 0
}

// owner sets the service or rule that decided. For an existing flow, its entry names the owner.
func (d *Datapath) owner(e *datapath.Explanation, w *wire.Work) {
	owner, backend, kind := w.Plan.Owner, w.Plan.Backend, w.Plan.OwnerNat
	if e.Existing && w.Plan.Entry != wire.NoEntry {
		s := table.Entry{}
		if w.Packet.Family == wire.Family6 {
			s = table.FromFlow6(&d.t.Flows6.Values[w.Plan.Entry])
		} else {
			s = table.FromFlow4(&d.t.Flows4.Values[w.Plan.Entry])
		}
		if s.Flags&wire.EntryPrimary == 0 {
			s = d.t.Twin(s)
		}
		owner, backend, kind = s.Owner, s.Backend, wire.OwnerService
		if s.Flags&wire.EntryNAT != 0 {
			kind = wire.OwnerSource
		}
	}
	n := d.inForce.Names
	switch kind {
	case wire.OwnerService:
		e.Owner = n.Service[uint32(owner)]
		if isForwarded(&w.Plan) && !n.PortForward[uint32(owner)] {
			e.Backend = n.Backend[uint32(backend)]
		}
	case wire.OwnerSource:
		e.Owner = n.Source[uint32(owner)]
	case wire.OwnerStateless:
		e.Owner = n.Prefix[uint32(owner)]
	}
}

// egress returns the name of the egress interface and the next hop's address. Like the programs, it
// looks up the route with the source before translation.
func (d *Datapath) egress(w *wire.Work, ifindex, in int, t flow.Tuple) (string, netip.Addr) {
	to := wire.AddrFrom(wire.Addr(w.Plan.Gateway), w.Plan.GatewayFamily == wire.Family6)
	name := fmt.Sprint(ifindex)
	if l, err := netlink.LinkByIndex(ifindex); err == nil {
		name = l.Attrs().Name
	}
	if t.Source.Addr().Is4() == to.Is4() {
		t.Dest = netip.AddrPortFrom(to, wire.PortOf(w.Plan.To.Dport))
		if index, hop, err := netdev.Routed(in, t); err == nil && index == ifindex {
			return name, hop
		}
	}
	if _, hop, err := netdev.NextHop(to); err == nil {
		to = hop
	}
	return name, to
}
