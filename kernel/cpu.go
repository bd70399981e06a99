// SPDX-License-Identifier: Apache-2.0

package kernel

import "golang.org/x/sys/unix"

// OneCPU pins the calling thread, which must be locked, to its first allowed CPU until restore is called.
func OneCPU() (cpu int, restore func(), err error) {
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return 0, nil, err
	}
	for !before.IsSet(cpu) {
		cpu++
	}
	one.Set(cpu)
	return cpu, func() { _ = unix.SchedSetaffinity(0, &before) }, unix.SchedSetaffinity(0, &one)
}
