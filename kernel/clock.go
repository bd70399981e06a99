// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"time"

	"golang.org/x/sys/unix"
)

// SinceBoot returns the time since the machine started, including suspended time. Changes of the wall clock do not
// affect it.
func SinceBoot() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // Linux 2.6.39
	return time.Duration(t.Nano())
}

// TicksPerSecond returns the kernel's HZ: the coarse clock advances once a tick.
func TicksPerSecond() uint32 {
	var t unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil || t.Nano() <= 0 {
		return 250
	}
	return uint32((int64(time.Second) + t.Nano()/2) / t.Nano())
}
