// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/netdev"
)

// Counters are the kernel's own counts of one network namespace, by names such
// as "Ip.InAddrErrors", "TcpExt.ListenOverflows", "conntrack.drop" and
// "neigh.table_fulls". They only grow; differences are what matters. The names
// under "softnet." count for the whole host and are the same in every namespace.
type Counters map[string]uint64

// Sub returns the increase from before to c.
func (c Counters) Sub(before Counters) Counters {
	out := make(Counters, len(c))
	for name, v := range c {
		if strings.HasPrefix(name, "conntrack.") || strings.HasPrefix(name, "neigh.") {
			out[name] = uint64(uint32(v) - uint32(before[name])) // 32 bits wide, may wrap
			continue
		}
		if v >= before[name] {
			out[name] = v - before[name]
		}
	}
	return out
}

// ReadCounters reads the counters of a namespace. Counters that this kernel lacks are absent from
// the result. conntrackErr is the reason if conntrack's are absent.
func ReadCounters(ctx context.Context, ns netdev.Namespace) (c Counters, conntrackErr, err error) {
	err = ns.Do(func() (err error) {
		c, err = ParseCounters(os.DirFS("/"))
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("counters of namespace %s: %w", ns.Name, err)
	}
	perCPU, conntrackErr := conntrack.ReadPerCPU(ctx, ns)
	if conntrackErr == nil {
		c.AddConntrack(conntrack.Total(perCPU))
	}
	return c, conntrackErr, nil
}

// AddConntrack puts the counters of connection tracking into c.
func (c Counters) AddConntrack(t conntrack.Counters) {
	c["conntrack.found"] = uint64(t.Found)
	c["conntrack.invalid"] = uint64(t.Invalid)
	c["conntrack.insert_failed"] = uint64(t.InsertFailed)
	c["conntrack.drop"] = uint64(t.Drop)
	c["conntrack.early_drop"] = uint64(t.EarlyDrop)
	c["conntrack.search_restart"] = uint64(t.SearchRestart)
	c["conntrack.clash_resolve"] = uint64(t.ClashResolve)
	c["conntrack.chain_too_long"] = uint64(t.ChainTooLong)
}

// netDir is the calling thread's view: /proc/net would be the main thread's.
const netDir = "proc/thread-self/net/"

// ParseCounters reads the counters from a tree that looks like the root of a
// host, as the calling thread sees it.
func ParseCounters(root fs.FS) (Counters, error) {
	c := Counters{}
	text, err := fs.ReadFile(root, netDir+"snmp")
	if err != nil {
		return nil, err
	}
	c.addPairs(string(text))
	if text, err := fs.ReadFile(root, netDir+"netstat"); err == nil {
		c.addPairs(string(text))
	}
	if text, err := fs.ReadFile(root, netDir+"snmp6"); err == nil {
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) == 2 {
				c.add(f[0], f[1], 10)
			}
		}
	}
	if text, err := fs.ReadFile(root, netDir+"softnet_stat"); err == nil {
		c.addSoftnet(string(text))
	}
	for _, name := range []string{"arp_cache", "ndisc_cache"} {
		if text, err := fs.ReadFile(root, netDir+"stat/"+name); err == nil {
			c.addNeighbours(string(text))
		}
	}
	return c, nil
}

func (c Counters) add(name, value string, base int) {
	if n, err := strconv.ParseUint(value, base, 64); err == nil {
		c[name] += n
	}
}

// addPairs reads pairs of lines, names above values, as in /proc/net/snmp.
func (c Counters) addPairs(text string) {
	lines := strings.Split(text, "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		if len(names) == 0 || len(names) != len(values) {
			continue
		}
		group := strings.TrimSuffix(names[0], ":")
		for k := 1; k < len(names); k++ {
			c.add(group+"."+names[k], values[k], 10)
		}
	}
}

// addSoftnet adds up what all CPUs did.
func (c Counters) addSoftnet(text string) {
	for _, cpu := range ParseSoftnet(text) {
		c["softnet.processed"] += cpu.Processed
		c["softnet.dropped"] += cpu.Dropped
		c["softnet.squeezed"] += cpu.Squeezed
		c["softnet.received_rps"] += cpu.RPS
	}
}

// addNeighbours reads /proc/net/stat/arp_cache: "entries" is the same on each
// line, the other columns count by CPU.
func (c Counters) addNeighbours(text string) {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	names := strings.Fields(lines[0])
	for _, line := range lines[1:] {
		for i, v := range strings.Fields(line) {
			if i < len(names) && names[i] != "entries" {
				c.add("neigh."+names[i], v, 16)
			}
		}
	}
}
