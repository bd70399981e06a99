// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"os"
	"slices"
	"strconv"
	"strings"
)

// CPUTime is the time of a CPU by activity, in clock ticks, since boot or within a window.
type CPUTime struct {
	CPU                  int    // Its number; the kernel leaves out those that are offline.
	Total, Softirq, Idle uint64 // Idle counts waits for disks, too.
}

// ParseCPUs reads the lines of /proc/stat for single CPUs.
func ParseCPUs(stat string) []CPUTime {
	var cpus []CPUTime
	for line := range strings.Lines(stat) {
		f := strings.Fields(line)
		if len(f) < 8 {
			continue
		}
		name, _ := strings.CutPrefix(f[0], "cpu")
		cpu, err := strconv.Atoi(name)
		if err != nil || name == f[0] {
			continue
		}
		c := CPUTime{CPU: cpu}
		for i, v := range f[1:min(len(f), 9)] { // guest time is part of user time
			n, _ := strconv.ParseUint(v, 10, 64)
			c.Total += n
			switch i {
			case 3, 4:
				c.Idle += n
			case 6:
				c.Softirq = n
			}
		}
		cpus = append(cpus, c)
	}
	return cpus
}

// CPUsBetween returns the time of the CPUs that were online at both ends of a window. If the kernel
// set the idle time of a CPU back, its increase is 0.
func CPUsBetween(before, after []CPUTime) []CPUTime {
	added := func(b, a uint64) uint64 { return a - min(b, a) }
	var cpus []CPUTime
	for _, a := range after {
		i := slices.IndexFunc(before, func(b CPUTime) bool { return b.CPU == a.CPU })
		if i < 0 || a.Total <= before[i].Total {
			continue
		}
		b := before[i]
		cpus = append(cpus, CPUTime{a.CPU, a.Total - b.Total, added(b.Softirq, a.Softirq), added(b.Idle, a.Idle)})
	}
	return cpus
}

// BusiestInSoftirq is the CPU that spent the largest share of a window in softirqs.
func BusiestInSoftirq(window []CPUTime) (cpu int, share float64) {
	for _, c := range window {
		if s := float64(c.Softirq) / float64(c.Total); s > share {
			cpu, share = c.CPU, s
		}
	}
	return cpu, share
}

// SoftnetCPU is a line of /proc/net/softnet_stat: packets that a CPU took, that found its backlog
// full, rounds that were cut short, and packets that other CPUs sent it (RPS).
type SoftnetCPU struct{ Processed, Dropped, Squeezed, RPS uint64 }

// ParseSoftnet reads 9 to 15 hexadecimal columns; their number depends on the kernel.
func ParseSoftnet(text string) []SoftnetCPU {
	var cpus []SoftnetCPU
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		var c SoftnetCPU
		for i, at := range map[int]*uint64{0: &c.Processed, 1: &c.Dropped, 2: &c.Squeezed, 9: &c.RPS} {
			if i < len(f) {
				*at, _ = strconv.ParseUint(f[i], 16, 64)
			}
		}
		cpus = append(cpus, c)
	}
	return cpus
}

// BacklogDrops returns the number of packets of the whole host that found a CPU's backlog full. The
// sum falls when a CPU goes offline.
func BacklogDrops() (sum uint64, err error) {
	text, err := os.ReadFile("/proc/net/softnet_stat")
	for _, c := range ParseSoftnet(string(text)) {
		sum += c.Dropped
	}
	return sum, err
}
