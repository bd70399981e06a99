// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"slices"
	"strconv"
	"strings"
)

// CPUTime is what a CPU did, in clock ticks: since boot, or within a window.
type CPUTime struct {
	CPU                  int    // its number; the kernel leaves out those that are offline
	Total, Softirq, Idle uint64 // Idle counts waits for disks, too
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

// CPUsBetween is what the CPUs did that were there at both ends of a window. The kernel
// may set the idle time of one back; what it gained is nothing then.
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
