// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
)

// Reference is a minimal forwarder that marks the practical limit of a machine. It is a yardstick, not a gateway: it
// has no services, states or ICMP.
type Reference struct {
	objects *forwardObjects
	links   []link.Link
}

// ReferenceKind names a reference program.
type ReferenceKind string

// The reference programs.
const (
	// Redirect swaps the hardware addresses and redirects: the practical limit of forwarding.
	Redirect ReferenceKind = "redirect"
	// RedirectTC is the same on TC (TCX, Linux 6.6).
	RedirectTC ReferenceKind = "redirect-tc"
	// Cross redirects like Redirect and replaces the IP header by one of the other family, with constant addresses:
	// the limit of translation between the families. Its packets have wrong checksums.
	Cross ReferenceKind = "cross"
	// BareDNAT looks up a UDP flow in a hash map and rewrites its destination.
	BareDNAT ReferenceKind = "bare-dnat"
	// FIB queries the kernel's routing table for every packet.
	FIB ReferenceKind = "fib"
	// Drop drops every IP packet.
	Drop ReferenceKind = "drop"
)

// BareFlow is one flow of BareDNAT with its destination.
type BareFlow struct {
	Source, Dest netip.AddrPort
	To           netip.AddrPort
}

// ReferenceOptions configures a reference program.
type ReferenceOptions struct {
	In, Out string // interfaces of the namespace
	// SourceMAC and DestMAC are the hardware addresses in packets of BareDNAT.
	SourceMAC, DestMAC net.HardwareAddr
	// Flow returns the flows of BareDNAT for 0 … FlowCount-1.
	FlowCount int
	Flow      func(int) BareFlow
	// ShuffledElements creates the hash elements in a different order from Flow, so that neighbouring flows are not
	// neighbours in memory.
	ShuffledElements bool
}

// NewReference loads a reference program and attaches it to the interface In.
func NewReference(netns Namespace, kind ReferenceKind, o ReferenceOptions) (*Reference, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("reference %s: memory limit: %w", kind, err)
	}
	collection, err := loadForward()
	if err != nil {
		return nil, err
	}
	out := 0
	if o.Out != "" {
		if out, err = ifindexOf(netns, o.Out); err != nil {
			return nil, err
		}
	}
	if err := collection.Variables["out_ifindex"].Set(uint32(out)); err != nil {
		return nil, fmt.Errorf("reference %s: %w", kind, err)
	}
	collection.Maps["bare_flows"].MaxEntries = uint32(max(o.FlowCount, 1))
	r := &Reference{objects: new(forwardObjects)}
	if err := collection.LoadAndAssign(r.objects, nil); err != nil {
		return nil, fmt.Errorf("reference %s: load program: %w", kind, err)
	}
	progs := map[ReferenceKind]*ebpf.Program{
		Redirect: r.objects.LoadRedirect, RedirectTC: r.objects.LoadRedirectTc, BareDNAT: r.objects.LoadBareDnat,
		Cross: r.objects.LoadCross, FIB: r.objects.LoadFib, Drop: r.objects.LoadDrop,
	}
	prog := progs[kind]
	if prog == nil {
		r.Close()
		return nil, fmt.Errorf("reference %q: no such program", kind)
	}
	if err := r.addFlows(o, out); err != nil {
		r.Close()
		return nil, err
	}
	attach := attachXDP
	if kind == RedirectTC {
		attach = attachTC
	}
	l, err := attach(netns, o.In, prog)
	if err != nil {
		r.Close()
		return nil, err
	}
	r.links = append(r.links, l)
	return r, nil
}

func ifindexOf(netns Namespace, iface string) (int, error) {
	index := 0
	err := netns.Do(func() error {
		i, err := net.InterfaceByName(iface)
		if err != nil {
			return fmt.Errorf("interface %s: %w", iface, err)
		}
		index = i.Index
		return nil
	})
	return index, err
}

func (r *Reference) addFlows(o ReferenceOptions, out int) error {
	const batch = 4096
	keys, values := make([]forwardBareKey, 0, batch), make([]forwardBareFlow, 0, batch)
	// A preallocated hash allocates its elements in memory order. The stride must differ from that for shuffled
	// packets, which would visit the elements in order.
	stride, at := uint32(1), uint32(0)
	if o.ShuffledElements {
		stride = strideNear(uint32(o.FlowCount), math.Sqrt2-1)
	}
	for i := range o.FlowCount {
		f := o.Flow(int(at))
		at = (at + stride) % uint32(o.FlowCount)
		key := forwardBareKey{
			Source: wireAddress(f.Source.Addr()), Dest: wireAddress(f.Dest.Addr()),
			SourcePort: wirePort(f.Source.Port()), DestPort: wirePort(f.Dest.Port()), L4Proto: 17,
		}
		value := forwardBareFlow{Dest: wireAddress(f.To.Addr()), DestPort: wirePort(f.To.Port()), Ifindex: uint32(out)}
		copy(value.DestMac[:], o.DestMAC)
		copy(value.SourceMac[:], o.SourceMAC)
		keys, values = append(keys, key), append(values, value)
		if len(keys) == batch || i == o.FlowCount-1 {
			if _, err := r.objects.BareFlows.BatchUpdate(keys, values, nil); err != nil {
				return fmt.Errorf("reference: add flows: %w", err)
			}
			keys, values = keys[:0], values[:0]
		}
	}
	return nil
}

// wireAddress and wire2 convert values so that their bytes in memory are in network byte order.
func wireAddress(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

func wirePort(p uint16) uint16 { return p>>8 | p<<8 }

// Close detaches and unloads.
func (r *Reference) Close() error {
	var errs []error
	for _, l := range r.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, r.objects.Close())...)
}

// Reflector sends UDP datagrams back to their source.
type Reflector struct {
	objects *sinkObjects
	link    link.Link
}

// NewReflector attaches a reflector to an interface.
func NewReflector(netns Namespace, iface string) (*Reflector, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("reflector: memory limit: %w", err)
	}
	r := &Reflector{objects: new(sinkObjects)}
	if err := loadSinkObjects(r.objects, nil); err != nil {
		return nil, fmt.Errorf("reflector: load program: %w", err)
	}
	var err error
	if r.link, err = attachXDP(netns, iface, r.objects.LoadReflect); err != nil {
		return nil, errors.Join(err, r.objects.Close())
	}
	return r, nil
}

// Close detaches and unloads.
func (r *Reflector) Close() error { return errors.Join(r.link.Close(), r.objects.Close()) }
