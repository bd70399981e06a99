// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// subject runs packets through a loaded program with BPF_PROG_TEST_RUN, in a network namespace with the
// interfaces of the case's host.
type subject struct {
	t           testing.TB
	hook        string      // "xdp", "tc", "tc-complete": TC with CHECKSUM_COMPLETE, or "pair": XDP with TC behind
	thread      chan func() // runs functions in the subject's namespace, on one CPU
	here        bool        // the calling goroutine runs them itself: no other one calls, and it ends with the subject
	cpu         int
	d           *Datapath
	snapshot    *datapath.Snapshot
	advanced    uint32 // tick of the last time step
	now         uint32 // tick of the current time step
	jiffies     *ebpf.Program
	ifaces      map[string]int
	names       map[int]string
	host        model.Host
	full        bool         // no packet uses the straight path
	byXDP       int          // packets that XDP has sent, of a pair
	programPool *programPool // pool of programs and tables; nil: this subject has its own
	few         bool         // use existing programs only
	borrowed    *shared
	early       *ringbuf.Reader // of frames held for their first fragment; nil until one was held
	caller      caller
	works       []wire.Work // of each CPU
	hop         wire.Hop
	stickies    hashed[wire.StickyKey, wire.Sticky]
	fragments   hashed[wire.FragmentKey, wire.Fragment]
	clients     hashed[wire.ClientKey, wire.Client]
	rules       hashed[uint32, wire.FirewallRule]
}

var _ golden.Subject = (*subject)(nil)

// subjects counts the subjects, to spread them over the CPUs.
var subjects atomic.Uint32

func newSubject(t testing.TB, hook string) *subject {
	s := &subject{t: t, hook: hook, cpu: int(subjects.Add(1)) % runtime.NumCPU(), works: make([]wire.Work, ebpf.MustPossibleCPU())}
	t.Cleanup(s.drop)
	return s
}

// Name implements golden.Subject.
func (s *subject) Name() string { return s.hook }

func (s *subject) drop() {
	if s.early != nil {
		s.early.Close()
		s.early = nil
	}
	if s.d != nil && s.borrowed != nil {
		s.programPool.give(s.borrowed, s.d)
	} else if s.d != nil {
		if err := s.d.Remove(context.Background()); err != nil {
			s.t.Error(err)
		}
		s.d.Close()
	}
	s.d, s.borrowed = nil, nil
	if s.thread != nil {
		close(s.thread)
		s.thread = nil
	}
}

// enter starts a thread in a network namespace of its own, which ends with the thread. The thread stays on one
// CPU: the program leaves its plan in per-CPU memory.
func (s *subject) enter() error {
	if s.here {
		return s.settle()
	}
	thread, made := make(chan func()), make(chan error)
	go func() {
		made <- s.settle()
		for f := range thread {
			f()
		}
	}()
	s.thread = thread
	return <-made
}

// settle moves the calling goroutine into a new network namespace, and to the subject's CPU. Its thread ends
// with it.
func (s *subject) settle() error {
	runtime.LockOSThread()
	var cpu unix.CPUSet
	cpu.Set(s.cpu)
	ns, err := netns.New()
	if err == nil {
		err = ns.Close() // the thread keeps it
	}
	return errors.Join(err, unix.SchedSetaffinity(0, &cpu))
}

// inside runs f in the subject's namespace.
func (s *subject) inside(f func() error) error {
	if s.here {
		return f()
	}
	done := make(chan error)
	s.thread <- func() { done <- f() }
	return <-done
}

// smallTables are the sizes for cases without their own, and for shared programs.
var smallTables = config.Tables{Flows: 4096, Flows6: 4096, Clients: 1024, HalfOpen: 4096}

// Reset implements golden.Subject.
func (s *subject) Reset(c *config.Config, h model.Host) error {
	s.drop()
	if err := s.enter(); err != nil {
		return err
	}
	if err := s.inside(func() error { return s.build(h) }); err != nil {
		return fmt.Errorf("host: %w", err)
	}
	s.host = h
	small := *c
	if small.Tables.Flows == 0 {
		small.Tables = smallTables
	}
	alike := small.Tables
	alike.HalfOpen, alike.Clients = smallTables.HalfOpen, smallTables.Clients // a quota of handshakes is a constant of the programs
	shares := s.programPool != nil && alike == smallTables
	if shares {
		small.Tables.Clients = smallTables.Clients
	}
	small.Attach = config.AttachTC
	if s.hook == "xdp" || s.hook == "pair" {
		small.Attach = config.AttachXDP
	}
	s.snapshot = golden.Snapshot(&small)
	return s.inside(func() (err error) {
		s.d, err = Open(Options{Dir: pinsOf(s.t), NoAttach: true, FullPath: s.full, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			return err
		}
		if shares {
			if s.borrowed, err = s.programPool.borrow(s.d, s.hook, s.snapshot, s.few); err != nil && (s.few || !errors.Is(err, errOtherConstants)) {
				return err
			}
		}
		if err := s.apply(); err != nil {
			return err
		}
		s.advanced, err = s.clock()
		return err
	})
}

// apply gives the snapshot to the datapath. Only Advance sweeps: the timer would sweep concurrently, and age
// flows by the run time of a slow machine.
func (s *subject) apply() error {
	if _, err := s.d.Apply(context.Background(), s.snapshot); err != nil {
		return err
	}
	if s.borrowed != nil && s.d.programs == s.borrowed.inUse { // the timer of the borrowed programs never started
		return nil
	}
	ret, err := s.d.programs.Programs["sweep_stop"].Run(&ebpf.RunOptions{Context: make([]byte, 8)})
	if err == nil && ret != 0 {
		err = fmt.Errorf("stop the sweeper: %d", ret)
	}
	return err
}

// anywhere reports the datapath's support on a host with unknown interfaces.
type anywhere struct{}

func (anywhere) CarriesService(s *config.Service) error   { return compile.CarriesService(s) }
func (anywhere) CarriesNAT(n *config.NATRule) error       { return compile.CarriesNAT(n) }
func (anywhere) CarriesRule(r *config.FirewallRule) error { return compile.CarriesRule(r) }

// refusal returns why the datapath does not support all of a configuration.
func refusal(c *config.Config) error { return golden.Refusal(anywhere{}, c) }

// build creates the interfaces, addresses, neighbours and routes of a host. All links accept frames from XDP,
// except lan0 of a pair, so that both programs handle packets.
func (s *subject) build(h model.Host) (err error) {
	s.ifaces, _, err = labtest.CaseHost(h, netns.None())
	s.names = map[int]string{}
	for name, index := range s.ifaces {
		s.names[index] = name
		takes := s.hook != "pair" || name != "lan0"
		err = errors.Join(err, lab.SetGRO(name, true), lab.SetGRO("peer-"+name, takes))
	}
	return err
}

// frame returns a frame that arrives on an interface, for its hardware address.
func (s *subject) frame(iface, text string) []byte {
	at, _ := s.host.Interface(iface)
	return append(packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 0, 0, 0, 1, 2}, Dst: at.MAC}}, packet.MustText(text)...).Build()
}

// xdpContext is struct xdp_md.
type xdpContext struct {
	Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32
}

const testChecksumComplete = 1 << 2 // BPF_F_TEST_SKB_CHECKSUM_COMPLETE

// Step implements golden.Subject.
func (s *subject) Step(in model.Arrival) (out model.Outcome, err error) {
	err = s.inside(func() (err error) {
		out, err = s.run(in)
		return err
	})
	return out, err
}

// xdp reports whether XDP alone handles all packets, as it does for a pair on hosts without lan0.
func (s *subject) xdp() bool { return (s.hook == "xdp" || s.hook == "pair") && !s.d.switches.Paired }

func (s *subject) program() *ebpf.Program {
	if s.xdp() {
		return s.d.programs.Programs["sluice_xdp"]
	}
	return s.d.programs.Programs["sluice_tc"]
}

// options returns the options of BPF_PROG_TEST_RUN for a frame.
func (s *subject) options(in model.Arrival) *ebpf.RunOptions {
	ifindex := uint32(s.ifaces[in.Interface])
	o := &ebpf.RunOptions{Data: in.Frame, DataOut: s.caller.room(len(in.Frame))}
	switch {
	case s.xdp():
		o.Context = xdpContext{DataEnd: uint32(len(in.Frame)), Ingress: ifindex}
	case s.hook == "tc-complete":
		o.Flags = testChecksumComplete
		// The kernel removes tags before TC. The test run checksums a tag in the frame in the place of the
		// addresses.
		if i, ok := s.host.Interface(in.Interface); ok && (in.Frame[0]&1 == 1 || i.MAC == packet.MAC(in.Frame[:6])) {
			o.Data = model.Untagged(in.Frame)
		}
		fallthrough
	default:
		o.Context = skbMeta{Ingress: ifindex, Ifindex: ifindex}
	}
	return o
}

// beforeTC runs XDP with TC behind it on a frame. It reports whether XDP has sent or dropped the frame.
func (s *subject) beforeTC(in model.Arrival) (sent, dropped bool, o *ebpf.RunOptions, err error) {
	o = &ebpf.RunOptions{Data: in.Frame, DataOut: s.caller.room(len(in.Frame)),
		Context: xdpContext{DataEnd: uint32(len(in.Frame)), Ingress: uint32(s.ifaces[in.Interface])}}
	ret, err := s.caller.run(s.d.programs.Programs["sluice_xdp"], o)
	switch {
	case err != nil:
		return false, false, nil, fmt.Errorf("xdp: %w", err)
	case ret == 4: // XDP_REDIRECT
		s.byXDP++
		return true, false, o, nil
	case ret == 1 && s.d.switches.Denied: // XDP_DROP
		return false, true, o, nil
	case ret != 2 || !bytes.Equal(o.DataOut, in.Frame): // XDP_PASS
		return false, false, nil, fmt.Errorf("xdp: verdict %d for what is left to TC, and %x of %x", ret, o.DataOut, in.Frame)
	}
	return false, false, nil, nil
}

func (s *subject) run(in model.Arrival) (model.Outcome, error) {
	if s.d.switches.Paired {
		if sent, dropped, o, err := s.beforeTC(in); err != nil || sent || dropped {
			if err != nil {
				return model.Outcome{}, err
			}
			return s.outcome(in, o, sent, false)
		}
	}
	if !s.xdp() && len(in.Frame) < 34 { // the kernel makes no such skb
		return model.Outcome{Action: model.Drop, Reason: model.ReasonTruncated}, nil
	}
	o := s.options(in)
	ret, err := s.caller.run(s.program(), o)
	if err != nil {
		return model.Outcome{}, fmt.Errorf("%s: %w", s.hook, err)
	}
	sent, passed := ret == 7, int32(ret) == -1 // TC_ACT_REDIRECT, TC_ACT_UNSPEC
	if s.xdp() {
		sent, passed = ret == 3 || ret == 4, ret == 2 // XDP_TX, XDP_REDIRECT; XDP_PASS
	}
	return s.outcome(in, o, sent, passed)
}

// outcome reads the result of a program.
func (s *subject) outcome(in model.Arrival, o *ebpf.RunOptions, sent, passed bool) (model.Outcome, error) {
	if err := element(&s.caller, s.d.programs.Maps["works"], 0, &s.works[0]); err != nil {
		return model.Outcome{}, fmt.Errorf("map works: %w", err)
	}
	w := &s.works[s.cpu]
	r := model.Outcome{Action: model.Action(wire.ActionNames()[w.Plan.Action]), Reason: model.Reason(wire.ReasonNames()[w.Plan.Reason])}
	if slices.Contains([]model.Reason{model.ReasonHeldFragment, model.ReasonToFragment6, model.ReasonUnresolved}, r.Reason) { // make room in the ring: no daemon reads it here
		if err := s.forgetHeld(); err != nil {
			return r, err
		}
	}
	if r.Reason == model.ReasonUnresolved || r.Reason == model.ReasonNoNeighbour {
		r.Planned = planned(w)
	}
	switch {
	case sent && r.Action == model.Drop:
		r.Out = []model.Departure{{Interface: in.Interface, Frame: bytes.Clone(o.DataOut)}}
	case sent, passed && r.Reason == model.ReasonToFragment:
		s.hop = wire.Hop(w.Hop)
		if w.Plan.Hop != 0 {
			if err := element(&s.caller, s.d.t.Maps["hops"], uint32(w.Plan.Hop), &s.hop); err != nil {
				return r, fmt.Errorf("map hops: %w", err)
			}
		}
		r.Out = []model.Departure{{Interface: s.names[int(s.hop.Ifindex)], Frame: bytes.Clone(o.DataOut)}}
	case passed && r.Reason == model.ReasonNoNeighbour, // unchanged in mode dsr
		passed && !bytes.Equal(o.DataOut, in.Frame) && !bytes.Equal(o.DataOut, model.Untagged(in.Frame)):
		r.Out = []model.Departure{{Interface: s.names[int(uint32(w.Fib[1]))], Frame: bytes.Clone(o.DataOut)}}
	}
	return r, nil
}

// planned reads the translation of a packet. The packet is neither an ICMP error nor a later fragment.
func planned(w *wire.Work) model.Planned {
	if w.Packet.Flags&(wire.PacketError|wire.PacketLaterFragment) != 0 {
		return model.Planned{}
	}
	to, v6 := wire.Tuple(w.Plan.To), w.Plan.Family == wire.Family6
	return model.Planned{
		Tuple: flow.Tuple{Protocol: flow.Protocol(to.L4Proto),
			Source: netip.AddrPortFrom(wire.AddrFrom(to.Saddr, v6), wire.PortOf(to.Sport)),
			Dest:   netip.AddrPortFrom(wire.AddrFrom(to.Daddr, v6), wire.PortOf(to.Dport))},
		Gateway: wire.AddrFrom(w.Plan.Gateway, w.Plan.GatewayFamily == wire.Family6),
	}
}

func (s *subject) forgetHeld() (err error) {
	if s.early == nil {
		if s.early, err = ringbuf.NewReader(s.d.t.Maps["early"]); err != nil {
			return err
		}
	}
	_, err = s.early.Read()
	return err
}

// Apply implements golden.Subject, with the existing tables.
func (s *subject) Apply(c *config.Config) error {
	next := *c
	next.Attach, next.Tables = s.snapshot.Config.Attach, s.snapshot.Config.Tables
	s.snapshot = golden.Snapshot(&next)
	return s.inside(s.reapply)
}

// reapply gives a changed snapshot to a datapath.
func (s *subject) reapply() error {
	if s.borrowed != nil {
		s.borrowed.refused = true
		if err := s.programPool.equip(s.borrowed, s.d, s.snapshot); err != nil {
			return err
		}
	}
	return s.apply()
}

// SetHost implements golden.Subject. As in a daemon, every change invalidates the next hops. All changes except
// changes of neighbours apply the configuration again.
func (s *subject) SetHost(h model.Host) error {
	return s.inside(func() error {
		more, err := labtest.ChangeHost(s.host, h)
		if err != nil {
			return err
		}
		s.host = h
		bumpGeneration(s.d.t.Control)
		if more {
			if err := s.reapply(); err != nil {
				return err
			}
		}
		return s.sweepDead() // as every two seconds: ends flows of lost addresses and of failed backends
	})
}

// SetState implements golden.Subject.
func (s *subject) SetState(service, backend string, state datapath.State) error {
	golden.SetState(s.snapshot, service, backend, state)
	return s.apply()
}

// Map implements golden.Subject.
func (s *subject) Map(m datapath.Mapping) error {
	_, err := s.d.Map(m, true)
	return err
}

// Unmap implements golden.Subject.
func (s *subject) Unmap(m datapath.Mapping) error { return s.d.Unmap(m) }

// Flows implements golden.Subject.
func (s *subject) Flows() (out []flow.Flow, err error) {
	err = s.d.Flows(context.Background(), func(f flow.Flow) bool { out = append(out, f); return true })
	return out, err
}

// Counters implements golden.Subject.
func (s *subject) Counters() (*datapath.Counters, error) { return s.d.Counters(context.Background()) }
