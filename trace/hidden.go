// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hiddenDrops counts the drops that happen while a thread of process 1 is the
// current one, by perf events instead of by a program. The kernels of some virtual
// machines run no tracing program there, because process 1 is their provider's
// agent: what a softirq drops that interrupts it is seen by no probe. Other
// kernels' probes count as many as this does.
type hiddenDrops []int

// inheritThread is the bit inherit_thread of perf_event_attr (5.13), see perf_event_open(2).
const inheritThread = unix.CBitFieldMaskBit35

// openHiddenDrops begins at zero. It counts nothing inside of a PID namespace,
// where process 1 is another one, and without tracefs.
func openHiddenDrops() (hiddenDrops, error) {
	const firstPIDNamespace = "pid:[4026531836]" // PROC_PID_INIT_INO of include/linux/proc_ns.h
	if own, err := os.Readlink("/proc/self/ns/pid"); err != nil || own != firstPIDNamespace {
		return nil, err
	}
	text, err := os.ReadFile("/sys/kernel/tracing/events/skb/kfree_skb/id")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return nil, err
	}
	threads, err := os.ReadDir("/proc/1/task")
	if err != nil {
		return nil, err
	}
	var h hiddenDrops
	for _, thread := range threads {
		tid, err := strconv.Atoi(thread.Name())
		if err != nil {
			return nil, errors.Join(err, h.Close())
		}
		attr := unix.PerfEventAttr{
			Type: unix.PERF_TYPE_TRACEPOINT, Config: id,
			Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})),
			Bits: unix.PerfBitInherit | inheritThread, // its threads to come, not its processes
		}
		fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
		switch {
		case errors.Is(err, unix.ESRCH): // has ended
		case err != nil:
			return nil, errors.Join(os.NewSyscallError("perf_event_open", err), h.Close())
		default:
			h = append(h, fd)
		}
	}
	return h, nil
}

// Count returns the drops since the counters were opened.
func (h hiddenDrops) Count() (packets uint64) {
	for _, fd := range h {
		var b [8]byte
		if n, err := unix.Read(fd, b[:]); err == nil && n == len(b) {
			packets += binary.NativeEndian.Uint64(b[:])
		}
	}
	return packets
}

// Close ends the count.
func (h hiddenDrops) Close() error {
	var errs []error
	for _, fd := range h {
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}
