// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// BenchmarkSender sends over a link to a far end that drops, by the barest loop that can fill a link and by the real
// sender. Mpps are per second of CPU time. Their ratio is the cost of flows and checksums.
func BenchmarkSender(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	l := labtest.New(b, wire())
	sink, err := NewSink(SinkOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer sink.Close()
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		spec PacketSpec
		loop bool
	}{
		{"loop", PacketSpec{Flows: 1}, true},
		{"1 flow", PacketSpec{Flows: 1}, false},
		{"50,000 flows", PacketSpec{Flows: 50_000}, false},
		{"stamped", PacketSpec{Flows: 1, Stamp: true}, false},
	} {
		b.Run(c.name, func(b *testing.B) {
			c.spec.Source, c.spec.Dest = mustRange(b, "192.0.2.1:1024-65535"), mustRange(b, "192.0.2.2:53")
			c.spec.Interface = "eth0"
			s, err := NewSender(l.Node("source"), c.spec, nil)
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			if c.loop {
				s.BareLoop()
			}
			for b.Loop() {
				b.ReportMetric(mppsOf(b, s, sink), "Mpps")
			}
		})
	}
}

// mppsOf measures for half a second.
func mppsOf(b *testing.B, s *Sender, sink *Sink) float64 {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- s.Run(ctx, started) }()
	<-started
	time.Sleep(100 * time.Millisecond) // the call begins with a grace period
	before, err := sink.Read()
	cpu := s.CPUTime()
	time.Sleep(500 * time.Millisecond)
	used := s.CPUTime() - cpu
	after, err2 := sink.Read()
	stop()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	if err != nil || err2 != nil {
		b.Fatal(err, err2)
	}
	return float64(after.Packets-before.Packets) / used.Seconds() / 1e6
}
