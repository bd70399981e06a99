// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"strconv"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

// BenchmarkPacket measures every packet of the packet cases after its case has run, so that its flow exists. The
// time is the program's run time by the kernel (BPF_STATS_RUN_TIME), less the time of an empty program. Each run
// gets the original packet and begins in a system call: caches are warm, but not hot.
func BenchmarkPacket(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Fatal(err)
	}
	defer stats.Close()
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		b.Fatal(err)
	}
	for _, hook := range []string{"xdp", "tc"} {
		empty := emptyProgram(b, hook)
		for _, c := range cases {
			if _, skip := c.Skip[hook]; skip || refusal(c.Config) != nil {
				continue
			}
			b.Run(hook+"/"+c.Name, func(b *testing.B) {
				r := &recorder{subject: newSubject(b, hook)}
				if err := c.Run(r); err != nil {
					b.Fatal(err)
				}
				for i, in := range r.arrivals {
					b.Run(strconv.Itoa(i+1), func(b *testing.B) {
						cost := r.measure(b, r.program(), in) - r.measure(b, empty, in)
						b.ReportMetric(cost, "ns/packet")
						b.ReportMetric(0, "ns/op") // removes the time of the system call
					})
				}
			})
		}
	}
}

func emptyProgram(b *testing.B, hook string) *ebpf.Program {
	kind := ebpf.SchedCLS
	if hook == "xdp" {
		kind = ebpf.XDP
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { p.Close() })
	return p
}

// recorder is a subject that stores the arriving packets.
type recorder struct {
	*subject
	arrivals []model.Arrival
}

func (r *recorder) Step(in model.Arrival) (model.Outcome, error) {
	r.arrivals = append(r.arrivals, in)
	return r.subject.Step(in)
}

// measure runs a program b.N times and returns the mean time of a run in ns.
func (r *recorder) measure(b *testing.B, p *ebpf.Program, in model.Arrival) float64 {
	o := r.options(in)
	var before, after *ebpf.ProgramStats
	err := r.inside(func() (err error) {
		if before, err = p.Stats(); err != nil {
			return err
		}
		for range b.N {
			if _, err := p.Run(o); err != nil {
				return err
			}
		}
		after, err = p.Stats()
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return float64(after.Runtime-before.Runtime) / float64(b.N)
}
