// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// eventCount counts the drops of all CPUs by perf events instead of a program. Kernels of some
// virtual machines run no tracing program while a thread of the provider's agent is current. Drops
// of a softirq that interrupts such a thread are invisible to probes, but not to this counter. On
// other kernels both counts are equal.
type eventCount []int

const kfreeSkbID = "events/skb/kfree_skb/id"

// tracefs lists the usual mount points: its own, and the one below debugfs.
var tracefs = []string{"/sys/kernel/tracing", "/sys/kernel/debug/tracing"}

// eventID reads the number of the event for drops. Where tracefs is not mounted it is
// read from a mount that no directory shows and that ends with its file descriptor.
func eventID(tracefs []string) (text []byte, err error) {
	for _, dir := range tracefs {
		if text, err = os.ReadFile(dir + "/" + kfreeSkbID); !errors.Is(err, os.ErrNotExist) {
			return text, err
		}
	}
	if text, err = detachedEventID(); err != nil {
		return nil, fmt.Errorf("tracefs is not mounted here (mount -t tracefs tracefs /sys/kernel/tracing): %w", err)
	}
	return text, nil
}

func detachedEventID() ([]byte, error) {
	context, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	root, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	defer unix.Close(root)
	fd, err := unix.Openat(root, kfreeSkbID, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("openat", err)
	}
	file := os.NewFile(uintptr(fd), kfreeSkbID)
	defer file.Close()
	return io.ReadAll(file)
}

// openEventCount begins at zero.
func openEventCount() (eventCount, error) {
	text, err := eventID(tracefs)
	if err != nil {
		return nil, err
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return nil, err
	}
	var c eventCount
	for cpu := range ebpf.MustPossibleCPU() {
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		switch {
		case errors.Is(err, unix.ENODEV): // not online
		case err != nil:
			return nil, errors.Join(os.NewSyscallError("perf_event_open", err), c.Close())
		default:
			c = append(c, fd)
		}
	}
	return c, nil
}

// Packets returns the drops since the counters were opened.
func (c eventCount) Packets() (packets uint64) {
	for _, fd := range c {
		var b [8]byte
		if n, err := unix.Read(fd, b[:]); err == nil && n == len(b) {
			packets += binary.NativeEndian.Uint64(b[:])
		}
	}
	return packets
}

// Close ends the count.
func (c eventCount) Close() error {
	var errs []error
	for _, fd := range c {
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}
