// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// testRunAttr is the part of union bpf_attr that BPF_PROG_TEST_RUN reads.
type testRunAttr struct {
	progFD      uint32
	retval      uint32
	dataSizeIn  uint32
	dataSizeOut uint32
	dataIn      uint64
	dataOut     uint64
	repeat      uint32
	duration    uint32
	ctxSizeIn   uint32
	ctxSizeOut  uint32
	ctxIn       uint64
	ctxOut      uint64
	flags       uint32
	cpu         uint32
	batchSize   uint32
	_           uint32
}

const (
	cmdProgTestRun = 10     // BPF_PROG_TEST_RUN.
	testLiveFrames = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES.
	maxRepeat      = 1<<32 - 1
)

// liveRun runs an XDP program over frame on one CPU. It runs left times or, if left is nil, until the context ends or
// done returns true. It uses one system call if possible, because each call waits about 20 ms for an RCU grace
// period. It must run on a goroutine that may lock its thread.
type liveRun struct {
	netns   Namespace
	prog    *ebpf.Program
	frame   []byte
	cpu     int
	left    func() uint64
	batch   int // packets between flushes; 0 means the kernel's 64
	started chan<- struct{}
	thread  *atomic.Int64 // Receives the thread ID.
	ended   *atomic.Int64 // Receives the stop time, in ns of CLOCK_MONOTONIC.
	done    func() bool
}

func (r *liveRun) run(ctx context.Context) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, only unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	only.Set(r.cpu)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return fmt.Errorf("cpu %d: %w", r.cpu, err)
	}
	defer unix.SchedSetaffinity(0, &before)
	return r.netns.Do(func() error { return r.callRepeatedly(ctx) })
}

// callRepeatedly makes the calls. A watcher interrupts a call with SIGURG, which the Go runtime tolerates because it preempts
// with that signal.
func (r *liveRun) callRepeatedly(ctx context.Context) error {
	tid, stop := unix.Gettid(), make(chan struct{})
	r.thread.Store(int64(tid))
	r.ended.Store(0)
	watched := make(chan struct{})
	halt := func() bool {
		if ctx.Err() == nil && (r.done == nil || !r.done()) {
			return false
		}
		r.ended.CompareAndSwap(0, monotonic())
		return true
	}
	go func() {
		defer close(watched)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if halt() {
					unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
				}
			}
		}
	}()
	defer func() { close(stop); <-watched }()
	if r.started != nil {
		r.started <- struct{}{}
	}
	for !halt() {
		n := uint64(maxRepeat)
		if r.left != nil {
			if n = min(n, r.left()); n == 0 {
				return nil
			}
		}
		// A signal to the thread interrupts the call. The next call sends the remaining packets.
		if err := testRun(r.prog, r.frame, uint32(n), r.batch); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("live frames: %w (kernel 5.18 or newer is needed)", err)
		}
	}
	return nil
}

// monotonic returns the clock of bpf_ktime_get_ns.
func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // the call cannot fail
	return ts.Nano()
}

// span is the time from the first begin to the last end of several runs.
type span struct{ begin, end int64 }

// add extends the span by the time of one run. A run without begin or end is ignored.
func (t *span) add(begin, end int64) {
	if begin == 0 || end < begin {
		return
	}
	if t.begin == 0 || begin < t.begin {
		t.begin = begin
	}
	t.end = max(t.end, end)
}

// shareOf returns CPU nth's part of a limit over n CPUs; a limit of 0 means no limit.
func shareOf(limit uint64, nth, n int) uint64 {
	if limit == 0 {
		return math.MaxUint64
	}
	share := limit / uint64(n)
	if nth == 0 {
		share += limit % uint64(n)
	}
	return share
}

// schedule returns the time in ns that n turns on one of several CPUs take at a rate over all CPUs. It includes the
// interval after the last turn, so that a second holds as many turns as the rate.
func schedule(n uint64, rate float64, cpus int) int64 {
	if rate == 0 {
		return 0
	}
	return int64(float64(n) * 1e9 * float64(cpus) / rate)
}

// unsentTurns returns the number of turns that were due at a rate, up to a share of the limit, and not begun. Each CPU's
// schedule starts with its own first turn.
func unsentTurns(took time.Duration, rate float64, share, begun uint64) uint64 {
	if took <= 0 || begun == 0 {
		return 0
	}
	due := min(uint64(math.Ceil(took.Seconds()*rate)), share)
	return due - min(due, begun)
}

func (t *span) length() time.Duration { return time.Duration(t.end - t.begin) }

func testRun(prog *ebpf.Program, frame []byte, repeat uint32, batch int) error {
	attr := testRunAttr{
		progFD:     uint32(prog.FD()),
		dataSizeIn: uint32(len(frame)),
		dataIn:     uint64(uintptr(unsafe.Pointer(&frame[0]))),
		repeat:     repeat,
		flags:      testLiveFrames,
		batchSize:  uint32(batch),
	}
	_, _, errno := unix.Syscall(unix.SYS_BPF, cmdProgTestRun, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(frame)
	if errno != 0 {
		return errno
	}
	return nil
}
