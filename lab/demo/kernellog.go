// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// kernelLog reads new messages of the kernel's log. The zero value reads nothing.
type kernelLog struct {
	fd   int
	open bool
	why  error // reason why it is not open
}

// openKernelLog lets rules in namespaces log until the lab is removed; the host's default forbids it. It starts
// reading at the end of the kernel's log.
func (s *stage) openKernelLog(ctx context.Context) *kernelLog {
	// Another program may hold the host's settings. The log does not justify a long wait.
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := s.lab.HostSysctl(ctx, "net.netfilter.nf_log_all_netns", "1"); err != nil {
		return &kernelLog{why: err}
	}
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &kernelLog{why: fmt.Errorf("/dev/kmsg: %w", err)}
	}
	if _, err := unix.Seek(fd, 0, io.SeekEnd); err != nil {
		unix.Close(fd)
		return &kernelLog{why: fmt.Errorf("/dev/kmsg: %w", err)}
	}
	return &kernelLog{fd: fd, open: true}
}

// Close closes the log.
func (k *kernelLog) Close() error {
	if !k.open {
		return nil
	}
	k.open = false
	return unix.Close(k.fd)
}

// lines returns the messages since the last call that contain the text.
func (k *kernelLog) lines(text string) ([]string, error) {
	var found []string
	buf := make([]byte, 8192) // the kernel's CONSOLE_EXT_LOG_MAX: one record at a time
	for {
		n, err := unix.Read(k.fd, buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return found, nil
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EINTR):
			continue // records were overwritten before this read
		case err != nil:
			return found, os.NewSyscallError("read /dev/kmsg", err)
		}
		// "priority,sequence,microseconds,flags;message" (Documentation/ABI/testing/dev-kmsg)
		_, message, _ := strings.Cut(string(buf[:n]), ";")
		message, _, _ = strings.Cut(message, "\n")
		if strings.Contains(message, text) {
			found = append(found, message)
		}
	}
}

// readKernelLog checks the rate-limited log rule of router.yaml: 6 per minute, burst 1.
func (s *stage) readKernelLog(k *kernelLog, elapsed time.Duration) {
	if !k.open {
		s.printText("what the router logged cannot be read here: %v", k.why)
		return
	}
	lines, err := k.lines("NAT:IN=")
	if err != nil {
		s.printText("what the router logged cannot be read here: %v", err)
		return
	}
	allowed := 1 + int(elapsed/(10*time.Second)) + 1
	s.recordPromise(len(lines) >= 1 && len(lines) <= allowed, "the log rule keeps to 6 lines a minute", "%d lines in %.1f s of traffic", len(lines), elapsed.Seconds())
	if len(lines) > 0 {
		s.printText("the router logged: %s", lines[0])
	}
}
