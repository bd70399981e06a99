// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// cpuClock measures the CPU time of the threads that run live frames. It includes the kernel's soft interrupt threads
// of their CPUs, which take over part of a high load. The CPU time of other programs does not count.
type cpuClock struct {
	threads []atomic.Int64 // Thread ids of the latest run, 0 before the first.
	softirq []int          // Process ids of ksoftirqd/N.
}

func newCPUClock(cpus []int) *cpuClock {
	c := &cpuClock{threads: make([]atomic.Int64, len(cpus))}
	names := map[string]bool{}
	for _, cpu := range cpus {
		names[fmt.Sprintf("ksoftirqd/%d", cpu)] = true
	}
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && names[strings.TrimSpace(string(b))] {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil {
				c.softirq = append(c.softirq, pid)
			}
		}
	}
	return c
}

// Clock IDs of other threads and processes: <linux/posix-timers.h>, CPUCLOCK_SCHED, with CPUCLOCK_PERTHREAD_MASK for
// a thread.
func threadClock(tid int) int32  { return int32(^tid)<<3 | 6 }
func processClock(pid int) int32 { return int32(^pid)<<3 | 2 }

// cpuTime returns the CPU time used so far.
func (c *cpuClock) cpuTime() time.Duration {
	var sum time.Duration
	add := func(clock int32) {
		var ts unix.Timespec
		if unix.ClockGettime(clock, &ts) == nil {
			sum += time.Duration(ts.Nano())
		}
	}
	for i := range c.threads {
		if tid := c.threads[i].Load(); tid != 0 {
			add(threadClock(int(tid)))
		}
	}
	for _, pid := range c.softirq {
		add(processClock(pid))
	}
	return sum
}
