// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sync/errgroup"
)

// Sender sends packets from one interface, with one program per CPU.
type Sender struct {
	netns   Namespace
	spec    PacketSpec
	cpus    []int
	frame   []byte
	objects []*packetsObjects
	clock   *cpuClock
	ended   []atomic.Int64 // Stop time of each CPU's latest run.
	loop    bool           // Run the barest loop instead, for comparison.
}

// maxStampers is SENDERS of bpf/load/sink.bpf.c.
const maxStampers = 64

// breakPlan lets a test send wrong checksums.
var breakPlan func(*packetsPlan)

// NewSender loads the programs. cpus are the sending CPUs; nil means CPU 0. Missing hardware addresses are filled in:
// the source's from the interface, the destination's from the namespace's neighbour table.
func NewSender(netns Namespace, spec PacketSpec, cpus []int) (*Sender, error) {
	if err := spec.normalize(); err != nil {
		return nil, err
	}
	if len(cpus) == 0 {
		cpus = []int{0}
	}
	if spec.Limit > 0 { // each CPU needs a packet
		cpus = cpus[:min(uint64(len(cpus)), spec.Limit)]
	}
	if spec.Stamp && len(cpus) > maxStampers {
		return nil, fmt.Errorf("packets: stamps from %d CPUs: the far end knows %d", len(cpus), maxStampers)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("packets: memory limit: %w", err)
	}
	var ifindex, mtu int
	err := netns.Do(func() error {
		i, err := net.InterfaceByName(spec.Interface)
		if err != nil {
			return fmt.Errorf("interface %s: %w", spec.Interface, err)
		}
		ifindex, mtu = i.Index, i.MTU
		if len(i.HardwareAddr) == 0 {
			return fmt.Errorf("interface %s has no Ethernet header: packets are sent as frames", spec.Interface)
		}
		if spec.SourceMAC == nil {
			spec.SourceMAC = i.HardwareAddr
		}
		if spec.DestMAC == nil {
			spec.DestMAC, err = nextHopMAC(spec.Dest.First, ifindex)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	t, err := newTemplate(&spec)
	if err != nil {
		return nil, err
	}
	if spec.Size > mtu+ethLen {
		return nil, fmt.Errorf("packets: size %d: interface %s takes frames of %d bytes (MTU %d)", spec.Size, spec.Interface, mtu+ethLen, mtu)
	}
	s := &Sender{netns: netns, spec: spec, cpus: cpus, frame: t.frame, clock: newCPUClock(cpus), ended: make([]atomic.Int64, len(cpus))}
	for nth := range cpus {
		plan := t.fill(&spec, nth, len(cpus), ifindex)
		if breakPlan != nil {
			breakPlan(&plan)
		}
		o, err := loadSender(plan)
		if err != nil {
			s.Close()
			return nil, err
		}
		s.objects = append(s.objects, o)
	}
	return s, nil
}

func loadSender(plan packetsPlan) (*packetsObjects, error) {
	collection, err := loadPackets()
	if err != nil {
		return nil, err
	}
	if err := collection.Variables["plan"].Set(plan); err != nil {
		return nil, fmt.Errorf("packets: plan: %w", err)
	}
	if err := collection.Variables["progress"].Set(packetsProgress{Tuple: plan.First, Datagram: uint32(plan.Sender)}); err != nil {
		return nil, fmt.Errorf("packets: progress: %w", err)
	}
	var o packetsObjects
	if err := collection.LoadAndAssign(&o, nil); err != nil {
		return nil, fmt.Errorf("packets: load program: %w", err)
	}
	return &o, nil
}

// BareLoop makes the next Run use the shortest program that can fill a link. It sends copies of one header from a
// template. Run is compared with it.
func (s *Sender) BareLoop() { s.loop = true }

// Spec returns the spec with defaults filled in.
func (s *Sender) Spec() PacketSpec { return s.spec }

// Run sends until the context ends or the spec's limit is reached. started, if not nil, is closed when every CPU is
// about to send.
func (s *Sender) Run(ctx context.Context, started chan<- struct{}) error {
	begun := make(chan struct{}, len(s.cpus))
	g, ctx := errgroup.WithContext(ctx)
	for nth, cpu := range s.cpus {
		r := liveRun{
			netns: s.netns, prog: s.objects[nth].LoadSend, frame: s.frame, cpu: cpu, started: begun, thread: &s.clock.threads[nth],
			ended: &s.ended[nth],
		}
		if s.loop {
			r.prog = s.objects[nth].LoadLoop
		}
		left := func() uint64 {
			share, sent := s.share(nth), s.progress(nth).Sent
			return share - min(share, sent)
		}
		if s.spec.Rate > 0 {
			// Flush often, so that a packet does not wait for a full batch.
			r.batch = 8
		}
		switch {
		case s.spec.Limit > 0 && s.spec.Rate > 0:
			r.done = func() bool { return left() == 0 }
		case s.spec.Limit > 0:
			r.left = left
		}
		g.Go(func() error { return r.run(ctx) })
	}
	if started != nil {
		for range s.cpus {
			select {
			case <-begun:
			case <-ctx.Done():
			}
		}
		close(started)
	}
	return g.Wait()
}

// share returns sender nth's part of the limit.
func (s *Sender) share(nth int) uint64 { return shareOf(s.spec.Limit, nth, len(s.cpus)) }

// CPUTime returns the CPU time of the sending threads and of the kernel's soft interrupt threads of their CPUs. On
// veth links it includes the gateway and the far end. Only differences within one Run are meaningful.
func (s *Sender) CPUTime() time.Duration { return s.clock.cpuTime() }

// Sent returns the number of packets passed to the interface so far, including refused packets, for example while it
// is down.
func (s *Sender) Sent() uint64 {
	var sum uint64
	for nth := range s.objects {
		sum += s.progress(nth).Sent
	}
	return sum
}

// Took returns the duration of the last Run from the first packet to the last, without the kernel's setup and
// teardown; see schedule.
func (s *Sender) Took() time.Duration {
	var t span
	for nth := range s.objects {
		t.add(s.times(nth))
	}
	return t.length()
}

func (s *Sender) times(nth int) (begin, end int64) {
	p := s.progress(nth)
	begin, end = int64(p.StartNs), s.ended[nth].Load()
	if p.Sent >= s.share(nth) {
		end = max(int64(p.EndNs), begin+schedule(p.Sent, s.spec.Rate, len(s.cpus)))
	}
	return begin, end
}

// Unsent returns the number of packets of the last Run that were due and not sent. The rate then exceeds the capacity
// of the CPUs, and the latency includes the wait for them.
func (s *Sender) Unsent() (sum uint64) {
	for nth := range s.objects {
		begin, end := s.times(nth)
		sum += unsentTurns(time.Duration(end-begin), s.spec.Rate/float64(len(s.cpus)), s.share(nth), s.progress(nth).Sent)
	}
	return sum
}

func (s *Sender) progress(nth int) packetsProgress {
	var p packetsProgress
	if err := s.objects[nth].Progress.Get(&p); err != nil {
		return packetsProgress{}
	}
	return p
}

// Close unloads the programs.
func (s *Sender) Close() error {
	for _, o := range s.objects {
		o.Close()
	}
	s.objects = nil
	return nil
}
