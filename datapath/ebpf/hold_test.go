// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// busyRing always has a record, of which nothing comes, until done.
type busyRing func() (done bool)

func (busyRing) SetDeadline(time.Time) {}

func (done busyRing) ReadInto(r *ringbuf.Record) error {
	if done() {
		return os.ErrClosed
	}
	r.RawSample = nil
	return nil
}

// TestHeldExpireWhileBusy: what has waited too long goes, however much comes.
func TestHeldExpireWhileBusy(t *testing.T) {
	k := wireFragmentKey{Id: 1}
	h := &holder{d: &Datapath{}, waiting: map[wireFragmentKey][]heldFrame{k: {{at: monotonic() - heldLife - time.Second}}},
		senders: map[wireAddr]int{k.Saddr: 1}, frames: 1}
	h.expired = monotonic()
	var holding uint32
	patience := time.Now().Add(10 * time.Second)
	h.serve(busyRing(func() bool { return h.frames == 0 || time.Now().After(patience) }), &holding)
	if h.frames != 0 || holding != 0 || len(h.waiting)+len(h.senders) != 0 {
		t.Errorf("%d fragments wait still, of %d senders; the programs are told of %d", h.frames, len(h.senders), holding)
	}
}

// TestHeldFailEachForItself: a packet that cannot be sent on takes no other with it,
// and the log has one line for all.
func TestHeldFailEachForItself(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var log strings.Builder
	d := &Datapath{t: &tables{}, inForce: &desired{}, opt: Options{Log: slog.New(slog.NewTextHandler(&log, nil))}}
	h := &holder{d: d, tables: d.t, programs: &ebpf.Collection{Programs: map[string]*ebpf.Program{"sluice_tc": p}}}
	good, bad := heldFrame{ifindex: 1, frame: make([]byte, 64)}, heldFrame{ifindex: 1, frame: make([]byte, 1)} // shorter than Ethernet's header
	for range 3 {
		if !h.try([]heldFrame{bad, good, bad}) {
			t.Fatal("the datapath is not being changed, and yet the packets wait")
		}
	}
	if h.failed != 6 || d.missed.Load() != 6 {
		t.Errorf("6 packets failed, and %d (%d) were counted", h.failed, d.missed.Load())
	}
	h.report()
	h.lose(1, h.failure)
	h.reported += time.Hour // whatever the test has taken
	h.report()              // too soon
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "packets=6") {
		t.Errorf("the log has %d lines: %s", n, &log)
	}
	h.reported -= time.Hour + reportEvery
	if h.report(); !strings.Contains(log.String(), "packets=1 ") {
		t.Errorf("the log never tells of the last one: %s", &log)
	}
}
