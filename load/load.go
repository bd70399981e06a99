// SPDX-License-Identifier: Apache-2.0

// Package load generates network load and measures the received packets. XDP programs in a kernel loop
// (BPF_PROG_TEST_RUN with live frames) generate single packets and complete TCP connections. Go's client generates
// real HTTP requests.
//
// On a veth the whole path of a packet (sender, gateway, far end) is one chain of soft interrupts on the sender's
// CPU. So "per CPU" in its results means that one CPU runs the whole path. Nearly all of its time is the gateway's,
// because sender and far end take a few instructions each.
package load

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace, usually a *lab.Node. Do calls its argument on the calling goroutine, inside the
// namespace.
type Namespace interface {
	Do(func() error) error
}

// Here is the network namespace of the calling thread.
type Here struct{}

// Do implements [Namespace] by calling f.
func (Here) Do(f func() error) error { return f() }

// CPUs returns the CPUs that the calling thread may use, lowest first. They need not begin with CPU 0.
func CPUs() ([]int, error) {
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return nil, fmt.Errorf("CPUs of this process: %w", err)
	}
	var all []int
	for n := range len(mine) * strconv.IntSize {
		if mine.IsSet(n) {
			all = append(all, n)
		}
	}
	return all, nil
}

// checkRate returns an error for rates outside the range of the schedule; 0 means no rate.
func checkRate(perSecond float64) error {
	if perSecond != 0 && !(perSecond >= 1e-3 && perSecond <= 1e9) {
		return fmt.Errorf("rate %g a second: 0, or from 0.001 to 1,000,000,000", perSecond)
	}
	return nil
}

// gcd returns the greatest common divisor of two positive numbers.
func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// goldenStride returns the stride of shuffled packets.
func goldenStride(n uint32) uint32 { return strideNear(n, 0.6180339887498949) }

// strideNear returns a step near the given share of n that is coprime to n. Adding it modulo n visits every number
// below n once, and consecutive values are far apart.
func strideNear(n uint32, share float64) uint32 {
	if n < 3 {
		return 1
	}
	for s := uint32(float64(n) * share); s > 0; s-- {
		if gcd(s, n) == 1 {
			return s
		}
	}
	return 1
}

// Count renders a number with thousands separated by commas.
func Count(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
