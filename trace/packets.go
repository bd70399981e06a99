// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-lb/sluice/flow"
)

// Packets observes the headers of packets where they enter and leave the host, and where they are
// dropped. Openings of connections and errors are all seen; of the other packets the first of each
// flow, point and size class in an epoch.
type Packets struct {
	objects observeObjects
	links   []link.Link
	ring    *ringbuf.Reader
	drops   *Drops // Decodes places and reasons; it counts nothing.
	before  uint64 // Interruptions when the programs were attached.
}

// PacketLoss counts what was not observed. A missing packet is evidence only where all are 0.
type PacketLoss struct {
	Openings    uint64 `json:"openings,omitempty"`    // Openings and errors beyond the rate, or beyond the room in the ring.
	Others      uint64 `json:"others,omitempty"`      // First packets of flows, for the same reasons.
	Unreadable  uint64 `json:"unreadable,omitempty"`  // Headers in pages of the driver.
	Interrupted uint64 `json:"interrupted,omitempty"` // Packets of an interrupt within the same program.
}

// Any reports whether an opening or an error may be missing.
func (l PacketLoss) Any() bool { return l.Openings+l.Unreadable+l.Interrupted > 0 }

// The epochs of samples, and how often the ring is read.
const (
	packetEpoch = 250 * time.Millisecond
	packetRead  = 50 * time.Millisecond
)

// Rates of events a second, of each CPU.
const (
	openingRate = 20_000
	otherRate   = 10_000
)

// OpenPackets observes the packets of one namespace, or of all where netns is 0. It needs CAP_BPF and
// CAP_PERFMON.
func OpenPackets(netns uint64) (*Packets, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, fmt.Errorf("packets: the kernel's BTF: %w", err)
	}
	p := &Packets{drops: &Drops{nftSeen: nftDropsApart()}}
	// Without symbols or reasons drops have no cause, but the packets are seen.
	p.drops.symbols, _ = recentSymbols()
	p.drops.reasons, _ = LoadReasons(kernel)
	spec, err := loadObserve()
	if err != nil {
		return nil, fmt.Errorf("packets: %w", err)
	}
	modules := conntrackModule(kernel)
	drop, _ := p.drops.reasons.Number("NETFILTER_DROP")
	for name, value := range map[string]any{
		observeVarHaveRxSk: tracepointArgs(kernel, "kfree_skb") >= 4, observeVarHaveConntrack: hasConntrack(kernel, modules),
		observeVarNetfilterDrop: drop, observeVarOnlyNetns: uint32(netns),
		observeVarIntervalNs: [2]uint32{uint32(time.Second / openingRate), uint32(time.Second / otherRate)},
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("packets: constant %s: %w", name, err)
		}
	}
	opts := ebpf.CollectionOptions{}
	opts.Programs.ExtraRelocationTargets = modules
	if err := spec.LoadAndAssign(&p.objects, &opts); err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("packets: %w: run as root, or with CAP_BPF and CAP_PERFMON", os.ErrPermission)
		}
		return nil, fmt.Errorf("packets: load programs: %w", err)
	}
	if p.ring, err = ringbuf.NewReader(p.objects.PacketEvents); err != nil {
		return nil, errors.Join(fmt.Errorf("packets: %w", err), p.Close())
	}
	p.before = p.interruptions()
	for _, program := range p.programs() {
		l, err := link.AttachTracing(link.TracingOptions{Program: program})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("packets: attach %s: %w", program, err), p.Close())
		}
		p.links = append(p.links, l)
	}
	return p, nil
}

// hasConntrack reports whether the kernel or its modules have the types of connection tracking.
func hasConntrack(kernel *btf.Spec, modules []*btf.Spec) bool {
	var conn *btf.Struct
	for _, spec := range append(modules, kernel) {
		if spec.TypeByName("nf_conn", &conn) == nil {
			return true
		}
	}
	return false
}

func (p *Packets) programs() []*ebpf.Program {
	return []*ebpf.Program{p.objects.PacketReceived, p.objects.PacketTransmitted, p.objects.PacketDropped}
}

func (p *Packets) interruptions() (n uint64) {
	for _, program := range p.programs() {
		if stats, err := program.Stats(); err == nil {
			n += stats.RecursionMisses
		}
	}
	return n
}

// Read calls visit for every packet until ctx ends, then for those that are in the ring. visit must
// not keep the packet.
func (p *Packets) Read(ctx context.Context, visit func(*Packet)) error {
	var record ringbuf.Record
	began := time.Now()
	for epoch := uint32(1); ; {
		ended := ctx.Err() != nil
		p.ring.SetDeadline(time.Now().Add(packetRead))
		if ended {
			p.ring.SetDeadline(time.Now())
		}
		for {
			err := p.ring.ReadInto(&record)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return fmt.Errorf("packets: read events: %w", err)
			}
			if len(record.RawSample) >= int(unsafe.Sizeof(observePacketEvent{})) {
				visit(p.decode((*observePacketEvent)(unsafe.Pointer(&record.RawSample[0]))))
			}
		}
		if ended {
			return nil
		}
		if now := 1 + uint32(time.Since(began)/packetEpoch); now != epoch {
			epoch = now
			if err := p.objects.Epoch.Set(epoch); err != nil {
				return fmt.Errorf("packets: begin an epoch: %w", err)
			}
		}
	}
}

// decode converts an event of the programs.
func (p *Packets) decode(raw *observePacketEvent) *Packet {
	out := &Packet{
		Time: time.Duration(raw.TimeNs), Netns: uint64(raw.Netns), Point: Point(raw.Point),
		Interface: cString(raw.Ifname[:]), IfIndex: raw.Ifindex, InIfIndex: raw.Iif, Buffer: raw.Skb,
		Length: int(raw.L3Len), GSOSize: int(raw.GsoSize), Tracked: Tracked(raw.CtState), Connection: raw.Ct,
		HasMACs: raw.HasMacs != 0, DestMAC: [6]byte(raw.Macs[:6]), SourceMAC: [6]byte(raw.Macs[6:]),
	}
	out.readHeaders(networkOrder(raw.EthType), raw.Data[:min(int(raw.DataLen), len(raw.Data))])
	if raw.Ct != 0 {
		out.Original, out.Reply = wireTuple((*dropsDropTuple)(&raw.Orig)), wireTuple((*dropsDropTuple)(&raw.Reply))
		if raw.CtInfo >= ctIsReply {
			out.Direction = flow.Reply
		}
		out.Confirmed, out.SeenReply = raw.CtStatus&ipsConfirmed != 0, raw.CtStatus&ipsSeenReply != 0
	}
	if out.Point == Dropped {
		out.Hook, out.Reason, out.Place = Hook(raw.Hook), p.drops.reasons.Name(raw.Reason), p.drops.symbols.Find(raw.Location)
		out.Cause = causeOf(dropSite{function: out.Place.Name, reason: out.Reason, hook: out.Hook, ct: out.Tracked, nftSeparate: p.drops.nftSeen,
			unicast: out.Tuple.IsValid() && !out.Tuple.Dest.Addr().IsMulticast(), linkLocal: out.Tuple.Source.Addr().IsLinkLocalUnicast()})
	}
	return out
}

// Of linux/netfilter/nf_conntrack_common.h.
const (
	ctIsReply    = 3 // the first value of enum ip_conntrack_info for replies
	ipsSeenReply = 1 << 1
	ipsConfirmed = 1 << 3
)

// RunTime returns how often the programs have run and how long in all; both are zero unless sysctl
// kernel.bpf_stats_enabled or EnableStats is on.
func (p *Packets) RunTime() (runs uint64, total time.Duration) {
	for _, program := range p.programs() {
		if stats, err := program.Stats(); err == nil {
			runs, total = runs+stats.RunCount, total+stats.Runtime
		}
	}
	return runs, total
}

// Lost returns what was not observed since the programs were attached.
func (p *Packets) Lost() PacketLoss {
	count := func(which observePacketCounter) (n uint64) {
		var perCPU []uint64
		if p.objects.PacketCounters.Lookup(uint32(which), &perCPU) == nil {
			for _, v := range perCPU {
				n += v
			}
		}
		return n
	}
	return PacketLoss{
		Openings:    count(observePacketCounterPACKETS_OVER_RATE) + count(observePacketCounterPACKETS_RING_FULL),
		Others:      count(observePacketCounterSAMPLES_OVER_RATE) + count(observePacketCounterSAMPLES_TABLE_FULL),
		Unreadable:  count(observePacketCounterPACKETS_UNREADABLE),
		Interrupted: p.interruptions() - p.before,
	}
}

// Detach ends the observation; what is in the ring can still be read.
func (p *Packets) Detach() error {
	var errs []error
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	p.links = nil
	return errors.Join(errs...)
}

// Close detaches and unloads the programs.
func (p *Packets) Close() error {
	errs := []error{p.Detach()}
	if p.ring != nil {
		errs = append(errs, p.ring.Close())
	}
	errs = append(errs, p.objects.Close())
	return errors.Join(errs...)
}
