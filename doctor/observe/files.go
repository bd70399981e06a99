// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"io/fs"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/trace"
)

// threadNet is the calling thread's view of its network namespace.
const threadNet = "proc/thread-self/net/"

func text(root fs.FS, name string) string {
	b, _ := fs.ReadFile(root, name)
	return string(b)
}

// ReadHostCounters reads the counters of the host from files.
func ReadHostCounters(root fs.FS) HostCounters {
	c := HostCounters{
		CPUs:       trace.ParseCPUs(text(root, "proc/stat")),
		Softnet:    trace.ParseSoftnet(text(root, threadNet+"softnet_stat")),
		Interrupts: parseInterrupts(text(root, "proc/interrupts")),
	}
	if counters, err := trace.ParseCounters(root); err == nil {
		c.Neighbours = counters
	}
	return c
}

// ReadHostFiles reads the state of the host from files.
func ReadHostFiles(root fs.FS) HostReading {
	h := HostReading{
		HostCounters: ReadHostCounters(root),

		Release: strings.TrimSpace(text(root, "proc/sys/kernel/osrelease")),
		Memory:  parseMeminfo(text(root, "proc/meminfo")),
		Slab:    parseSlab(text(root, "proc/slabinfo")),
		Sysctl: readSysctl(root, []string{"net/core/*", "net/netfilter/nf_conntrack_*", "net/ipv4/neigh/default/gc_thresh*",
			"net/ipv6/neigh/default/gc_thresh*", "net/ipv4/ip_forward", "net/ipv4/tcp_mem", "net/ipv4/tcp_max_orphans", "fs/file-nr", "fs/nr_open"}),
		Mitigations: map[string]string{},
	}
	for i, name := range []string{"arp_cache", "ndisc_cache"} {
		h.Entries[i] = neighbourEntries(text(root, "proc/net/stat/"+name))
	}
	paths, _ := fs.Glob(root, "sys/devices/system/cpu/vulnerabilities/*")
	for _, p := range paths {
		h.Mitigations[p[strings.LastIndexByte(p, '/')+1:]] = strings.TrimSpace(text(root, p))
	}
	_, err := fs.Stat(root, "sys/kernel/btf/vmlinux")
	h.BTF = err == nil
	h.Files = worstFiles(root)
	h.Monitors = monitors(root)
	return h
}

// smallLimit excludes programs that lower their own limit because they open no more files: a
// sandboxed child sets 1.
const smallLimit = 64

// worstFiles finds the process that is nearest to its limit of open files. A process
// that has more open than its limit had them before, and does not feel it.
func worstFiles(root fs.FS) (worst ProcessFiles) {
	processes, _ := fs.Glob(root, "proc/[0-9]*/fd")
	for _, dir := range processes {
		st, err := fs.Stat(root, dir)
		if err != nil {
			continue
		}
		open := uint64(st.Size()) // since 6.2 the number of files
		if open == 0 {
			list, err := fs.ReadDir(root, dir)
			if err != nil {
				continue
			}
			open = uint64(len(list))
		}
		process := strings.TrimSuffix(dir, "/fd")
		limit, hard := openFilesLimits(text(root, process+"/limits"))
		if limit >= smallLimit && open <= limit && float64(open)*float64(max(worst.Limit, 1)) > float64(worst.Open)*float64(limit) {
			pid, _ := strconv.Atoi(strings.TrimPrefix(process, "proc/"))
			worst = ProcessFiles{strings.TrimSpace(text(root, process+"/comm")), pid, open, limit, hard}
		}
	}
	return worst
}

// openFilesLimits reads the soft and the hard limit of /proc/PID/limits; a soft one is 0
// when there is none.
func openFilesLimits(limits string) (soft, hard uint64) {
	_, rest, _ := strings.Cut(limits, "Max open files")
	f := strings.Fields(rest)
	if len(f) < 2 {
		return 0, 0
	}
	soft, _ = strconv.ParseUint(f[0], 10, 64) // "unlimited" is no limit
	hard, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		hard = math.MaxUint64
	}
	return soft, hard
}

// ReadNamespaceFiles reads the state of the calling thread's namespace from files, except the lists
// of sockets.
func ReadNamespaceFiles(root fs.FS) (NamespaceReading, error) {
	r := NamespaceReading{At: time.Now(), Sysctl: readSysctl(root, netSysctl), Expectations: -1}
	var err error
	if r.Counters, err = trace.ParseCounters(root); err != nil {
		return r, err
	}
	for name, at := range map[string]*uint32{"count": &r.Limits.Count, "max": &r.Limits.Max, "buckets": &r.Limits.Buckets} {
		n, _ := Number(r.Sysctl, "net.netfilter.nf_conntrack_"+name)
		*at = uint32(n)
	}
	r.Sockstat = parseSockstat(text(root, threadNet+"sockstat"))
	r.EventListeners = parseNetlink(text(root, threadNet+"netlink"))
	if b, err := fs.ReadFile(root, threadNet+"nf_conntrack_expect"); err == nil {
		r.Expectations = bytes.Count(b, []byte("\n"))
	}
	r.LegacyTables = append(strings.Fields(text(root, threadNet+"ip_tables_names")), strings.Fields(text(root, threadNet+"ip6_tables_names"))...)
	for name, n := range parseSockstat(text(root, threadNet+"sockstat6")) {
		r.Sockstat[name] = n
	}
	return r, nil
}

func parseMeminfo(s string) map[string]uint64 {
	m := map[string]uint64{}
	for line := range strings.Lines(s) {
		f := strings.Fields(line)
		if len(f) >= 2 {
			n, _ := strconv.ParseUint(f[1], 10, 64)
			m[strings.TrimSuffix(f[0], ":")] = n << 10
		}
	}
	return m
}

// parseSlab adds the caches of connection entries; old kernels have one for each namespace.
func parseSlab(s string) SlabInfo {
	var out SlabInfo
	for line := range strings.Lines(s) {
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "nf_conntrack" && !strings.HasPrefix(f[0], "nf_conntrack_0") {
			continue
		}
		active, _ := strconv.ParseUint(f[1], 10, 64)
		size, _ := strconv.ParseUint(f[3], 10, 64)
		out.Active += active
		out.ObjectBytes = max(out.ObjectBytes, size)
	}
	return out
}

func neighbourEntries(s string) uint64 {
	lines := strings.Split(s, "\n")
	if len(lines) < 2 {
		return 0
	}
	f := strings.Fields(lines[1])
	if len(f) == 0 {
		return 0
	}
	n, _ := strconv.ParseUint(f[0], 16, 64)
	return n
}

// networkInterrupt matches the names that network drivers give their interrupts.
var networkInterrupt = regexp.MustCompile(`(?i)(eth|en[ops]\d|virtio\d+-(input|output)|mlx|i40e|ice|ixgbe|ena|bnxt|rx|tx)`)

func parseInterrupts(s string) map[string][]uint64 {
	out := map[string][]uint64{}
	for line := range strings.Lines(s) {
		f := strings.Fields(line)
		if len(f) < 3 || !strings.HasSuffix(f[0], ":") || !networkInterrupt.MatchString(f[len(f)-1]) {
			continue
		}
		if _, err := strconv.Atoi(strings.TrimSuffix(f[0], ":")); err != nil {
			continue // TLB, LOC and so on
		}
		var counts []uint64
		for _, v := range f[1:] {
			n, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				break
			}
			counts = append(counts, n)
		}
		out[f[len(f)-1]+" "+f[0]] = counts
	}
	return out
}

// parseSockstat turns "TCP: inuse 5 orphan 0" into "TCP.inuse": 5.
func parseSockstat(s string) map[string]uint64 {
	out := map[string]uint64{}
	for line := range strings.Lines(s) {
		group, rest, ok := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if !ok {
			continue
		}
		for i := 0; i+1 < len(f); i += 2 {
			out[group+"."+f[i]], _ = strconv.ParseUint(f[i+1], 10, 64)
		}
	}
	return out
}

// allConntrackEvents are the netlink groups of new, updated and destroyed flows.
const allConntrackEvents = 0x7

// parseNetlink counts sockets of NETLINK_NETFILTER (12) that hear new flows or
// updates; DESTROY alone (0x4) costs little.
func parseNetlink(s string) int {
	n := 0
	for line := range strings.Lines(s) {
		f := strings.Fields(line) // sk Eth Pid Groups ...
		if len(f) < 4 || f[1] != "12" {
			continue
		}
		groups, err := strconv.ParseUint(f[3], 16, 64)
		if err == nil && groups&allConntrackEvents&^0x4 != 0 {
			n++
		}
	}
	return n
}

// hexEndpoint reads "0100007F:1F90": words of the address in host order.
func hexEndpoint(s string) (netip.AddrPort, bool) {
	address, port, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(address)
	p, err2 := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || err2 != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), ok
}

var (
	// TableFull matches the kernel's message that a connection table was full; the
	// group is the inode of the namespace, empty for the first.
	TableFull = regexp.MustCompile(`nf_conntrack: table full(?: in netns (\d+))?, dropping packet`)
	otherLine = regexp.MustCompile(`expectation table full|neighbou?r.*table overflow|TCP: (?:request_sock|Possible SYN flooding)`)
)

// ParseLog finds the kernel messages that matter in records of /dev/kmsg:
// "priority,sequence,microseconds,flags;text".
func ParseLog(records []string, uptime time.Duration) []LogLine {
	var out []LogLine
	for _, record := range records {
		head, message, ok := strings.Cut(record, ";")
		if !ok {
			continue
		}
		if !strings.Contains(message, "table") && !strings.Contains(message, "TCP: ") {
			continue // without the expressions, which are slow
		}
		m := TableFull.FindStringSubmatch(message)
		if m == nil && !otherLine.MatchString(message) {
			continue
		}
		line := LogLine{Text: strings.TrimSpace(strings.SplitN(message, "\n", 2)[0])}
		if f := strings.Split(head, ","); len(f) >= 3 {
			us, _ := strconv.ParseInt(f[2], 10, 64)
			line.Age = uptime - time.Duration(us)*time.Microsecond
			line.At = time.Now().Add(-line.Age)
		}
		if m != nil && m[1] != "" {
			line.Netns, _ = strconv.ParseUint(m[1], 10, 64)
		}
		out = append(out, line)
	}
	return out
}
