// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// wire is a sender and a far end on one link.
func wire() lab.Topology {
	return lab.Topology{
		Name:  "loadwire",
		Nodes: []lab.NodeSpec{{Name: "source"}, {Name: "sink"}},
		Links: []lab.LinkSpec{{
			A: lab.End{Node: "source", Iface: "eth0", GRO: true, Addresses: []string{"192.0.2.1/24", "2001:db8::1/64"}},
			B: lab.End{Node: "sink", Iface: "eth0", Addresses: []string{"192.0.2.2/24", "2001:db8::2/64"}},
		}},
	}
}

// slowest is how long the slowest machine may take for anything here.
const slowest = time.Minute

func mustRange(t testing.TB, s string) Range {
	t.Helper()
	r, err := ParseRange(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestPackets sends every kind of packet over a link and has the far end check
// every checksum and sequence number.
func TestPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	cases := []struct {
		name         string
		source, dest string
		spec         PacketSpec
		size         uint64 // of each frame
	}{
		{"udp4", "192.0.2.1:1024", "192.0.2.2:53", PacketSpec{}, 60},
		{"udp4 every field varies", "198.51.100.0/28:1024-1039", "192.0.2.2+5:1-7", PacketSpec{Stamp: true}, 60},
		{"udp4 ports only", "192.0.2.1:1024-1039", "192.0.2.2:1-7", PacketSpec{}, 60},
		{"udp4 stamped", "192.0.2.1:1024", "192.0.2.2:53", PacketSpec{Stamp: true}, 60},
		{"udp4 odd size", "192.0.2.1:1024", "192.0.2.2:53", PacketSpec{Stamp: true, Size: 1513}, 1513},
		{"udp4 many flows", "198.51.100.0/24:1024-65535", "192.0.2.2+4:1-3", PacketSpec{Stamp: true, Flows: 50_000, Shuffled: true}, 60},
		{"tcp4 syn", "192.0.2.1:1024-2048", "192.0.2.2:80", PacketSpec{Protocol: flow.TCP, Flags: "syn"}, 60},
		{"tcp4 stamped", "192.0.2.1:1024-2048", "192.0.2.2:80", PacketSpec{Protocol: flow.TCP, Flags: "psh,ack", Stamp: true}, 70},
		{"icmp", "192.0.2.1:1-100", "192.0.2.2", PacketSpec{Protocol: flow.ICMP, Stamp: true}, 60},
		{"udp6", "[2001:db8::1]:1024-65535", "[2001:db8::2]:53", PacketSpec{Stamp: true}, 78},
		{"tcp6 many", "[2001:db8::10+1000]:1024", "[2001:db8::2]:80", PacketSpec{Protocol: flow.TCP, Stamp: true}, 90},
		{"icmpv6", "[2001:db8::1]:7", "[2001:db8::2]", PacketSpec{Protocol: flow.ICMPv6, Stamp: true}, 78},
		{"fragments4", "192.0.2.1:1024", "192.0.2.2:53", PacketSpec{Fragments: 3, Size: 218}, 218},
		{"fragments6", "[2001:db8::1]:1024", "[2001:db8::2]:53", PacketSpec{Fragments: 2, Size: 214}, 214},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			const count = 10_000
			spec := c.spec
			spec.Source, spec.Dest = mustRange(t, c.source), mustRange(t, c.dest)
			spec.Interface, spec.Limit = "eth0", count
			got := sendOnce(t, l, spec)
			want := Received{Packets: count, Bytes: count * c.size, PassedToKernel: got.PassedToKernel}
			if spec.Fragments > 1 {
				want.Fragments = count
			}
			if got != want {
				t.Errorf("received %+v, want %+v", got, want)
			}
		})
	}
}

// TestTwoSenders has two CPUs share the flows, the rate and the limit.
func TestTwoSenders(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs")
	}
	l := labtest.New(t, wire())
	// The link holds as many: the CPU that takes them from it may have to wait.
	const limit = 255
	got := sendOnce(t, l, PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024-2023"), Dest: mustRange(t, "192.0.2.2:53"),
		Interface: "eth0", Limit: limit, Rate: 2000, Stamp: true,
	}, 0, 1)
	if got.Packets != limit || got.SequenceLost != 0 || got.BadL4Checksum != 0 {
		t.Errorf("received %+v", got)
	}
	// The second CPU has no packet to send, and ends.
	for _, rate := range []float64{0, 1000} {
		got := sendOnce(t, l, PacketSpec{
			Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Limit: 1, Rate: rate,
		}, 0, 1)
		if got.Packets != 1 {
			t.Errorf("one packet from two CPUs: received %+v", got)
		}
	}
}

// TestFragmentsOfThreeSenders: simultaneous fragments of several CPUs between the same addresses must not be
// reassembled to one datagram.
func TestFragmentsOfThreeSenders(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	for name, spec := range map[string]PacketSpec{
		"IPv4": {Source: mustRange(t, "192.0.2.1:1024-1083"), Dest: mustRange(t, "192.0.2.2:53"), Fragments: 3, Size: 218},
		"IPv6": {Source: mustRange(t, "[2001:db8::1]:1024-1083"), Dest: mustRange(t, "[2001:db8::2]:53"), Fragments: 3, Size: 214},
	} {
		spec.SourceMAC, spec.DestMAC = make([]byte, 6), make([]byte, 6)
		if err := spec.normalize(); err != nil {
			t.Fatal(err)
		}
		layout, err := newTemplate(&spec)
		if err != nil {
			t.Fatal(err)
		}
		const senders, packets = 3, 60
		fragments := map[uint16]int{}
		for nth := range senders {
			o, err := loadSender(layout.fill(&spec, nth, senders, 1))
			if err != nil {
				t.Fatal(err)
			}
			defer o.Close()
			for range packets {
				frame := make([]byte, spec.Size)
				if _, err := o.LoadSend.Run(&ebpf.RunOptions{Data: layout.frame, DataOut: frame}); err != nil {
					t.Fatal(err)
				}
				fragments[binary.BigEndian.Uint16(frame[layout.plan.IdentOff:])]++
			}
		}
		if len(fragments) != senders*packets/spec.Fragments {
			t.Errorf("%s: fragments by datagram: %v, want %d of %d", name, fragments, spec.Fragments, senders*packets/spec.Fragments)
		}
	}
}

// TestSenderSurvivesSignals: a signal interrupts the call that sends; the next call sends the rest.
func TestSenderSurvivesSignals(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	sender, err := NewSender(l.Node("source"), PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Limit: 2_000_000,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	started, done := make(chan struct{}), make(chan error, 1)
	begin := time.Now()
	go func() { done <- sender.Run(t.Context(), started) }()
	<-started
	labtest.Eventually(t, slowest, "the first packet", func() error {
		if sender.Sent() == 0 {
			return errors.New("none sent")
		}
		return nil
	})
	if err := unix.Tgkill(os.Getpid(), int(sender.clock.threads[0].Load()), unix.SIGURG); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || sender.Sent() != 2_000_000 {
		t.Errorf("%d sent, %v", sender.Sent(), err)
	}
	if took := sender.Took(); took <= 0 || took > time.Since(begin) {
		t.Errorf("took %v of %v", took, time.Since(begin))
	}
}

// TestScheduleOfDays: the due time of a packet is right when days have passed.
func TestScheduleOfDays(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	sender, err := NewSender(l.Node("source"), PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Rate: 1e6,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	const days = 1<<48/1000 + 1 // packets: one more than 64 bits hold in 2^-16 ns
	for due, want := range map[time.Duration]uint32{
		-time.Minute: xdpRedirect, // the schedule began so that this packet was due a minute ago
		time.Minute:  xdpDrop,
	} {
		start := monotonic() - days*1000 + int64(due)
		if err := sender.objects[0].Progress.Set(packetsProgress{Sent: days, Check: math.MaxUint64, StartNs: uint64(start)}); err != nil {
			t.Fatal(err)
		}
		got, err := sender.objects[0].LoadSend.Run(&ebpf.RunOptions{Data: sender.frame, DataOut: make([]byte, 512)})
		if err != nil || got != want {
			t.Errorf("due in %v: verdict %d, want %d, %v", due, got, want, err)
		}
	}
}

// TestSpecs: numbers that cannot be sent are refused, not cut to their low bits.
func TestSpecs(t *testing.T) {
	for name, s := range map[string]PacketSpec{
		"rate below zero":    {Rate: -1},
		"no number":          {Rate: math.NaN()},
		"rate too high":      {Rate: 1e15},
		"TTL":                {TTL: 300},
		"long datagram":      {Fragments: 50, Size: 1498},
		"many fragments":     {Fragments: 65537},
		"countless":          {Fragments: math.MaxInt},
		"unknown flag":       {Protocol: flow.TCP, Flags: "syn,foo"},
		"no room":            {Size: 20},
		"no page":            {Size: 9000},
		"fewer than none":    {Fragments: -1},
		"stamped fragments":  {Fragments: 2, Size: 218, Stamp: true},
		"flags of UDP":       {Flags: "syn"},
		"ports of ICMP":      {Protocol: flow.ICMP},
		"flows below zero":   {Flows: -5},
		"more flows":         {Flows: 2},
		"beyond the last 32": {Source: Range{First: netip.MustParseAddr("255.255.255.255"), Count: 2}},
	} {
		if !s.Source.First.IsValid() {
			s.Source = mustRange(t, "192.0.2.1:1024")
		}
		s.Dest = mustRange(t, "192.0.2.2:53")
		if err := s.Validate(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for name, s := range map[string]FlowSpec{
		"all of a large range": {Source: mustRange(t, "10.0.0.0/8")},
		"too many connections": {Source: mustRange(t, "10.0.0.0/8"), Connections: 1 << 26},
		"more than there are":  {Connections: 11},
		"below zero":           {Connections: -1},
		"tries":                {Tries: 256},
		"timeout":              {Timeout: -time.Second},
		"rate":                 {Rate: -1},
		"requests":             {Requests: -1},
		"response":             {ResponseSize: maxResponse + 1},
	} {
		if !s.Source.First.IsValid() {
			s.Source = mustRange(t, "192.0.2.1:1024-1033")
		}
		s.Dest = netip.MustParseAddrPort("192.0.2.2:80")
		if err := s.Validate(); err == nil {
			t.Errorf("%s: no error, %+v", name, s)
		}
	}
	s := FlowSpec{Source: mustRange(t, "10.0.0.0/8"), Dest: netip.MustParseAddrPort("192.0.2.2:80"), Connections: 1_000_000}
	if err := s.normalize(); err != nil || s.Connections != 1_000_000 {
		t.Errorf("a million of a large range: %+v, %v", s, err)
	}
}

// TestRefusedSenders: frames that the interface would refuse are neither sent nor counted. The same applies to stamps
// of senders unknown to the far end.
func TestRefusedSenders(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	for size, fits := range map[int]bool{1514: true, 1515: false, 2000: false} {
		s, err := NewSender(l.Node("source"), PacketSpec{
			Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Size: size,
		}, nil)
		if fits != (err == nil) {
			t.Errorf("size %d: %v", size, err)
		}
		if err == nil {
			s.Close()
		}
	}
	if _, err := NewSender(l.Node("source"), PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Stamp: true,
	}, make([]int, maxStampers+1)); err == nil {
		t.Error("stamps from more CPUs than the far end knows: no error")
	}
	if err := newSink(t, SinkOptions{}).Attach(l.Node("sink"), "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := newSink(t, SinkOptions{}).Attach(l.Node("sink"), "eth0"); err == nil || !strings.Contains(err.Error(), "interface eth0: attach XDP in driver mode: another program is there") {
		t.Errorf("a second far end: %v", err)
	}
}

// TestAwait counts packets in flight, and ends if no more arrive.
func TestAwait(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	sink := newSink(t, SinkOptions{})
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		t.Fatal(err)
	}
	sender, err := NewSender(l.Node("source"), PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Limit: 4, Rate: 20,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- sender.Run(t.Context(), started) }()
	<-started
	for sender.Sent() == 0 { // the call begins with a grace period
		time.Sleep(time.Millisecond)
	}
	if got, err := sink.awaitSilence(4, slowest, slowest); err != nil || got.Packets != 4 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	// The last of 4 packets at 20 a second is due after 150 ms, a fifth would be after 200.
	if took := sender.Took(); took < 200*time.Millisecond {
		t.Errorf("took %v", took)
	}
	begin := time.Now()
	if got, err := sink.Await(5); err != nil || got.Packets != 4 || time.Since(begin) < 500*time.Millisecond {
		t.Errorf("after %v: %+v, %v", time.Since(begin), got, err)
	}
}

// TestUnsent: unsent packets were due on the CPU that did not send them.
func TestUnsent(t *testing.T) {
	for _, c := range []struct {
		took         time.Duration
		rate         float64
		share, begun uint64
		want         uint64
	}{
		{time.Second, 1000, math.MaxUint64, 400, 600}, {time.Second, 1000, 500, 400, 100}, {time.Second, 1000, 400, 400, 0},
		{time.Second, 0, math.MaxUint64, 400, 0}, {999_500 * time.Microsecond, 1000, math.MaxUint64, 1000, 0},
		{-time.Second, 1000, math.MaxUint64, 1, 0}, {time.Hour, 1e9, math.MaxUint64, 0, 0}, // ended before it began, never began
	} {
		if got := unsentTurns(c.took, c.rate, c.share, c.begun); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	for nth, share := range []uint64{4, 3, 3} {
		if shareOf(10, nth, 3) != share || shareOf(0, nth, 3) != math.MaxUint64 {
			t.Errorf("CPU %d has %d of 10, %d of all", nth, shareOf(10, nth, 3), shareOf(0, nth, 3))
		}
	}
}

func sendOnce(t *testing.T, l *lab.Lab, spec PacketSpec, cpus ...int) Received {
	t.Helper()
	sink, err := NewSink(SinkOptions{Checksums: true, Stamps: spec.Stamp})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		t.Fatal(err)
	}
	sender, err := NewSender(l.Node("source"), spec, cpus)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	ctx, cancel := context.WithTimeout(context.Background(), slowest)
	defer cancel()
	if err := sender.Run(ctx, nil); err != nil || ctx.Err() != nil {
		t.Fatalf("the senders do not end: %v, %v", err, ctx.Err())
	}
	var got Received
	labtest.Eventually(t, slowest, "the last packets", func() error {
		if got, err = sink.Read(); err != nil {
			return err
		}
		if got.Packets < spec.Limit {
			return fmt.Errorf("%d of %d arrived", got.Packets, spec.Limit)
		}
		return nil
	})
	return got
}

// TestSinkSeesBadChecksums proves that the far end's checks can fail.
func TestSinkSeesBadChecksums(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	spec := PacketSpec{
		Source: mustRange(t, "192.0.2.1+4:1024-1027"), Dest: mustRange(t, "192.0.2.2:53"),
		Interface: "eth0", Limit: 100, Stamp: true,
	}
	breakPlan = func(p *packetsPlan) { p.L4Sum++; p.Sender = 3 }
	defer func() { breakPlan = nil }()
	if got := sendOnce(t, l, spec); got.BadL4Checksum != 100 || got.BadIPChecksum != 0 {
		t.Errorf("broken transport checksum: %+v", got)
	}
	breakPlan = func(p *packetsPlan) { p.IpSum++ }
	if got := sendOnce(t, l, spec); got.BadIPChecksum != 100 {
		t.Errorf("broken IPv4 checksum: %+v", got)
	}
}

// TestRate checks the one bound on time that no slow machine can break.
func TestRate(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	begin := time.Now()
	sendOnce(t, l, PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"),
		Interface: "eth0", Limit: 5_000, Rate: 10_000, Stamp: true,
	})
	if took := time.Since(begin); took < 450*time.Millisecond {
		t.Errorf("5,000 packets at 10,000 a second took %v", took)
	}
}

func TestParseRange(t *testing.T) {
	for s, want := range map[string]Range{
		"192.0.2.1":              {netip.MustParseAddr("192.0.2.1"), 1, flow.Ports{}},
		"192.0.2.1:80":           {netip.MustParseAddr("192.0.2.1"), 1, flow.Ports{First: 80, Last: 80}},
		"192.0.2.0/24:1024-2047": {netip.MustParseAddr("192.0.2.0"), 256, flow.Ports{First: 1024, Last: 2047}},
		"192.0.2.9+1000:5":       {netip.MustParseAddr("192.0.2.9"), 1000, flow.Ports{First: 5, Last: 5}},
		"2001:db8::1":            {netip.MustParseAddr("2001:db8::1"), 1, flow.Ports{}},
		"[2001:db8::]/120:53":    {netip.MustParseAddr("2001:db8::"), 256, flow.Ports{First: 53, Last: 53}},
		"[2001:db8::1+7]:53-54":  {netip.MustParseAddr("2001:db8::1"), 7, flow.Ports{First: 53, Last: 54}},
	} {
		got, err := ParseRange(s)
		if err != nil || got != want {
			t.Errorf("ParseRange(%q) = %+v, %v; want %+v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "192.0.2.1:0", "192.0.2.1:9-8", "300.0.0.1", "10.0.0.0/2", "10.0.0.1+x", "10.0.0.1+10k", "10.0.0.1+0", "10.0.0.1+4294967297", "10.0.0.0/24+5", "255.255.255.250+7", "[::1", "[2001:db8::1]80", "[2001:db8::10]7/64", "192.0.2.1:"} {
		if r, err := ParseRange(s); err == nil {
			t.Errorf("ParseRange(%q) = %+v, want an error", s, r)
		}
	}
}

// TestGoldenStride checks that every tuple is visited once a round.
func TestGoldenStride(t *testing.T) {
	for _, n := range []uint32{1, 2, 3, 10, 1000, 50_000, 65_536} {
		for _, stride := range []uint32{goldenStride(n), strideNear(n, math.Sqrt2-1)} {
			seen, at := make([]bool, n), uint32(0)
			for range n {
				if seen[at] {
					t.Fatalf("n %d, stride %d: %d visited twice", n, stride, at)
				}
				seen[at] = true
				if at += stride; at >= n {
					at -= n
				}
			}
		}
	}
}
