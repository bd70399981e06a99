// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/golden"
)

// TestPacketCases runs every packet case on XDP, on TC, on TC with a checksum over the whole packet, and on XDP
// with TC behind it. Cases that the datapath does not support are skipped with its reason. XDP programs have
// only the features that the case needs. The other hooks use the same programs with every feature for many
// cases.
//
// With SLUICE_FEW_PROGRAMS=1 all hooks do so, and cases with constants of their own are left out: on an emulated
// machine, the verifier takes a minute.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	few := number(t, "SLUICE_FEW_PROGRAMS", 0) > 0
	sideBySide(t, []string{"xdp", "tc", "tc-complete", "pair"}, func(t *testing.T, hook string, cpu int) {
		pool := poolOf(t, programKind{allOn: few || hook != "xdp"})
		for _, c := range cases {
			t.Run(c.Name, func(t *testing.T) {
				s := newSubject(t, hook)
				s.programPool, s.cpu, s.few = pool, cpu, few
				runCase(t, c, s)
			})
		}
	})
}

// sideBySide runs a test of each hook, XDP's parallel to the TC hooks', each on a CPU of its own. Parts with
// shared programs run one after the other, because programs belong to their tables: parallel runs would need one
// verification each.
func sideBySide(t *testing.T, hooks []string, test func(t *testing.T, hook string, cpu int)) {
	cpus := make(chan int, runtime.NumCPU())
	for cpu := range cap(cpus) {
		cpus <- cpu
	}
	var both sync.WaitGroup
	for _, sharing := range [][]string{{"xdp", "pair"}, {"tc", "tc-complete"}} {
		both.Go(func() {
			cpu := <-cpus
			defer func() { cpus <- cpu }()
			for _, hook := range sharing {
				if slices.Contains(hooks, hook) {
					t.Run(hook, func(t *testing.T) { test(t, hook, cpu) })
				}
			}
		})
	}
	both.Wait()
}

// runCase runs a packet case, or reports why the subject does not support it.
func runCase(t *testing.T, c *golden.Case, s *subject) {
	on := s.hook
	if on == "pair" {
		on = "tc"
	}
	if why, skip := c.Skip[on]; skip {
		t.Skip(why)
	}
	if err := refusal(c.Config); err != nil {
		t.Skip(err)
	}
	if err := c.Run(s); s.few && errors.Is(err, errOtherConstants) {
		t.Skip(err)
	} else if err != nil {
		t.Error(err)
	}
}
