// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/packet/golden"
)

// lastForwarded remembers the last packet of a case that was forwarded.
type lastForwarded struct {
	*subject
	in *nat.Arrival
}

func (l *lastForwarded) Step(in nat.Arrival) (nat.Outcome, error) {
	out, err := l.subject.Step(in)
	if err == nil && out.Action == nat.Forward && len(out.Out) == 1 {
		l.in = &in
	}
	return out, err
}

// BenchmarkPacketCases takes the time of the program over the last forwarded
// packet of each golden case, in the state that the case has led to. It is the
// kernel's own measure of the program (BPF_STATS_RUN_TIME), some 20 ns of which
// are the two readings of its clock. System calls do not count, but come between
// the packets, so caches are cold: figures are for comparing cases and versions.
// What a packet costs in a stream is what "sluice bench packets" measures.
//
//	go test -run xxx -bench PacketCases -benchtime 5000x ./datapath/ebpf
func BenchmarkPacketCases(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		b.Fatal(err)
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Skip(err)
	}
	defer stats.Close()
	for _, hook := range []string{"xdp", "tc"} {
		for _, c := range cases {
			b.Run(hook+"/"+c.Name, func(b *testing.B) { benchmarkCase(b, hook, c) })
		}
	}
}

func benchmarkCase(b *testing.B, hook string, c *golden.Case) {
	if why, skip := c.Skip[hook]; skip {
		b.Skip(why)
	}
	if err := refusal(c.Config); err != nil {
		b.Skip(err)
	}
	s := &lastForwarded{subject: newSubject(b, hook)}
	if err := c.Run(s); err != nil {
		b.Skip(err) // TestPacketCases reports it
	}
	if s.in == nil {
		b.Skip("no packet of this case is forwarded")
	}
	program := s.d.programs.Programs["sluice_tc"]
	if hook == "xdp" {
		program = s.d.programs.Programs["sluice_xdp"]
	}
	before, err := program.Stats()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.subject.Step(*s.in); err != nil {
			b.Fatal(err)
		}
	}
	after, err := program.Stats()
	if err != nil {
		b.Fatal(err)
	}
	if runs := after.RunCount - before.RunCount; runs > 0 {
		b.ReportMetric(float64(after.Runtime-before.Runtime)/float64(runs), "ns/packet")
	}
	b.ReportMetric(0, "ns/op") // the system calls', of no interest
}
