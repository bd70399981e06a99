// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Counters are the kernel's counts of one CPU in one network namespace since its creation. They are 32 bits wide and
// wrap: compute differences with Sub. Since Linux 4.18 and 5.x the kernel no longer counts insert, delete, new,
// ignore and searched. They are omitted, because a zero would be wrong.
type Counters struct {
	CPU           int    `json:"cpu"`
	Found         uint32 `json:"found"`          // NAT found the wanted tuple in use and tried another.
	Invalid       uint32 `json:"invalid"`        // Packets that match no connection.
	Insert        uint32 `json:"insert"`         // Direct insertions, by ctnetlink.
	InsertFailed  uint32 `json:"insert_failed"`  // New connections refused because their tuple exists.
	Drop          uint32 `json:"drop"`           // Packets dropped: table full or insert failed.
	EarlyDrop     uint32 `json:"early_drop"`     // Entries that were not assured, evicted to make room for new ones.
	Error         uint32 `json:"error"`          // Malformed packets (icmp and others).
	SearchRestart uint32 `json:"search_restart"` // Table lookups restarted because an entry moved.
	ClashResolve  uint32 `json:"clash_resolve"`  // Equal UDP connections merged.
	ChainTooLong  uint32 `json:"chain_too_long"` // New connections refused because a hash chain was full.
}

// fields lists the counters with the names that conntrack -S and
// /proc/net/stat/nf_conntrack print, and their ctnetlink attributes.
func (c *Counters) fields() []struct {
	attr uint16
	proc string
	at   *uint32
} {
	return []struct {
		attr uint16
		proc string
		at   *uint32
	}{
		{2, "found", &c.Found},
		{4, "invalid", &c.Invalid},
		{8, "insert", &c.Insert},
		{9, "insert_failed", &c.InsertFailed},
		{10, "drop", &c.Drop},
		{11, "early_drop", &c.EarlyDrop},
		{12, "icmp_error", &c.Error},
		{13, "search_restart", &c.SearchRestart},
		{14, "clashres", &c.ClashResolve},
		{15, "chainlength", &c.ChainTooLong},
	}
}

// Add adds o to c, field by field, and keeps c's CPU.
func (c *Counters) Add(o Counters) {
	mine, theirs := c.fields(), o.fields()
	for i := range mine {
		*mine[i].at += *theirs[i].at
	}
}

// Sub returns the difference of c and before, also across a wrap.
func (c Counters) Sub(before Counters) Counters {
	mine, theirs := c.fields(), before.fields()
	for i := range mine {
		*mine[i].at -= *theirs[i].at
	}
	return c
}

// Total adds the counters of all CPUs; its CPU is -1.
func Total(perCPU []Counters) Counters {
	sum := Counters{CPU: -1}
	for _, c := range perCPU {
		sum.Add(c)
	}
	return sum
}

// PerCPU returns the counters of every possible CPU in c's namespace.
func (c *Conn) PerCPU(ctx context.Context) ([]Counters, error) {
	done := c.guard(ctx)
	c.seq++
	err := c.send(finish(request(c.buf[:0], msgGetStatsCPU, unix.AF_UNSPEC, unix.NLM_F_DUMP, c.seq), 0))
	var list []Counters
	for finished := false; err == nil && !finished; {
		var n int
		if n, err = c.receive(c.buf); err != nil {
			break
		}
		finished, err = c.answers(c.buf[:n], unix.NFNL_SUBSYS_CTNETLINK<<8|msgGetStatsCPU, func(body []byte) error {
			s, err := decodeCounters(body)
			list = append(list, s)
			return err
		})
	}
	if cancelled := done(); cancelled != nil {
		return nil, cancelled
	}
	if err != nil {
		return nil, fmt.Errorf("conntrack statistics: %w", err)
	}
	return list, nil
}

func decodeCounters(body []byte) (Counters, error) {
	if len(body) < genericLen {
		return Counters{}, errTruncated
	}
	s := Counters{CPU: int(binary.BigEndian.Uint16(body[2:]))}
	fields := s.fields()
	err := forEachAttribute(body[genericLen:], func(kind uint16, v []byte) {
		for _, f := range fields {
			if f.attr == kind {
				*f.at = be32(v)
			}
		}
	})
	return s, err
}

// Entries returns the number of tracked connections in c's namespace and the host-wide limit. The limit is 0 on
// kernels that do not report it here (before 5.4).
func (c *Conn) Entries(ctx context.Context) (count, limit uint32, err error) {
	done := c.guard(ctx)
	c.seq++
	err = c.send(finish(request(c.buf[:0], msgGetStats, unix.AF_UNSPEC, 0, c.seq), 0))
	for answered := false; err == nil && !answered; {
		var n int
		if n, err = c.receive(c.buf); err != nil {
			break
		}
		_, err = c.answers(c.buf[:n], unix.NFNL_SUBSYS_CTNETLINK<<8|msgGetStats, func(body []byte) error {
			answered = true
			return forEachAttribute(body[min(genericLen, len(body)):], func(kind uint16, v []byte) {
				switch kind {
				case 1: // CTA_STATS_GLOBAL_ENTRIES
					count = be32(v)
				case 2: // CTA_STATS_GLOBAL_MAX_ENTRIES
					limit = be32(v)
				}
			})
		})
	}
	if cancelled := done(); cancelled != nil {
		return 0, 0, cancelled
	}
	if err != nil {
		return 0, 0, fmt.Errorf("conntrack count: %w", err)
	}
	return count, limit, nil
}

// answers passes the messages of the given type in b to visit. finished reports an acknowledgement or the end of a
// dump.
func (c *Conn) answers(b []byte, kind uint16, visit func(body []byte) error) (finished bool, err error) {
	for {
		m, rest, ok, err := nextMessage(b)
		if err != nil || !ok {
			return false, err
		}
		b = rest
		switch {
		case m.seq != c.seq:
		case m.kind == unix.NLMSG_DONE, m.kind == unix.NLMSG_ERROR:
			return true, m.errno()
		case m.kind == kind:
			if err := visit(m.body); err != nil {
				return false, err
			}
		}
	}
}

// Limits are the sizes of the table. Count belongs to the namespace; the others apply to the whole host.
type Limits struct {
	Count   uint32 `json:"count"`
	Max     uint32 `json:"max"`
	Buckets uint32 `json:"buckets"` // 0 if the kernel does not report it
}

// Fill returns Count as a share of Max, or 0 without a limit.
func (l Limits) Fill() float64 {
	if l.Max == 0 {
		return 0
	}
	return float64(l.Count) / float64(l.Max)
}

// MeanChain returns the mean length of a hash chain. Each entry is hashed once per direction.
func (l Limits) MeanChain() float64 {
	if l.Buckets == 0 {
		return 0
	}
	return 2 * float64(l.Count) / float64(l.Buckets)
}

// ReadLimits reads the sizes of ns from /proc/sys/net/netfilter. An error that wraps fs.ErrNotExist means that
// connection tracking is not loaded.
func ReadLimits(ns netdev.Namespace) (l Limits, err error) {
	err = ns.Do(func() (err error) {
		l, err = ownLimits()
		return err
	})
	return l, err
}

// ownLimits reads the sizes of the calling thread's namespace.
func ownLimits() (l Limits, err error) {
	for name, at := range map[string]*uint32{"count": &l.Count, "max": &l.Max, "buckets": &l.Buckets} {
		if *at, err = ownSetting(name); err != nil {
			return Limits{}, err
		}
	}
	return l, nil
}

// readSetting reads one number of /proc/sys/net/netfilter/nf_conntrack_*.
func readSetting(ns netdev.Namespace, name string) (v uint32, err error) {
	err = ns.Do(func() (err error) {
		v, err = ownSetting(name)
		return err
	})
	return v, err
}

func ownSetting(name string) (uint32, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
	if err != nil {
		return 0, fmt.Errorf("conntrack settings: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("conntrack settings: nf_conntrack_%s: %w", name, err)
	}
	return uint32(n), nil
}

// ReadNumbers reads the sizes of ns and the sum of its counters over all CPUs. It enters the namespace once for both.
func ReadNumbers(ctx context.Context, ns netdev.Namespace) (l Limits, sum Counters, err error) {
	err = ns.Do(func() (err error) {
		if l, err = ownLimits(); err != nil {
			return err
		}
		perCPU, err := ownPerCPU(ctx)
		sum = Total(perCPU)
		return err
	})
	return l, sum, err
}

// ReadPerCPU returns the counters of ns from netlink. If the kernel or the caller's rights do not allow that, it
// reads /proc/net/stat/nf_conntrack. Many kernels lack that file (CONFIG_NF_CONNTRACK_PROCFS).
func ReadPerCPU(ctx context.Context, ns netdev.Namespace) (list []Counters, err error) {
	err = ns.Do(func() (err error) {
		list, err = ownPerCPU(ctx)
		return err
	})
	return list, err
}

func ownPerCPU(ctx context.Context) ([]Counters, error) {
	c, err := Open()
	if err == nil {
		defer c.Close()
		var list []Counters
		if list, err = c.PerCPU(ctx); err == nil {
			return list, nil
		}
	}
	// /proc/net would show the namespace of the process's main thread.
	text, fallback := os.ReadFile("/proc/thread-self/net/stat/nf_conntrack")
	if fallback != nil {
		return nil, errors.Join(err, fallback)
	}
	return parseProcStat(string(text))
}

// parseProcStat parses /proc/net/stat/nf_conntrack: a header and one line of hexadecimal numbers per online CPU.
func parseProcStat(text string) ([]Counters, error) {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	column := map[string]int{}
	for i, name := range strings.Fields(lines[0]) {
		column[name] = i
	}
	// Kernels before 5.16 print other counters in the renamed columns.
	var list []Counters
	for cpu, line := range lines[1:] {
		values := strings.Fields(line)
		s := Counters{CPU: cpu}
		for _, f := range s.fields() {
			i, ok := column[f.proc]
			if !ok || i >= len(values) {
				continue
			}
			n, err := strconv.ParseUint(values[i], 16, 32)
			if err != nil {
				return nil, fmt.Errorf("/proc/net/stat/nf_conntrack: %s of CPU %d: %w", f.proc, cpu, err)
			}
			*f.at = uint32(n)
		}
		list = append(list, s)
	}
	return list, nil
}
