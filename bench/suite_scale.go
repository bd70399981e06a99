// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/load"
)

func scaleSuite() Suite {
	s := Suite{
		Name: "scale", Title: "From a thousand to four million flows",
		About: "60-byte UDP packets. New flows: each packet is the first of its flow, all as fast as one CPU goes. Rate: packets " +
			"over all these flows, shuffled. Memory a flow is all that the gateway holds for so many, divided by them: of eBPF every " +
			"table (flows both ways, bindings, ports, hash tags) once the flows are open, as tables grow with them; of connection tracking its entries in " +
			"the kernel's slabs and its hash table. Apply is the time from the configuration to its verified presence in the kernel; " +
			"of nftables it includes a walk over the host's connection table, which ends connections that began without the service. Expiry is the " +
			" interrupt time of all CPUs while the flows are open and nothing is sent, where the timer that looks for ended flows runs.",
		Yardstick: true,
		MaxReps:   3,
		Points: []Point{
			{Name: "1,000", Value: 1000, Shuffled: true}, {Name: "50,000", Value: 50_000, Shuffled: true},
			{Name: "1,000,000", Value: 1_000_000, Shuffled: true, MaxReps: 2}, {Name: "4,000,000", Value: 4_000_000, Shuffled: true, MaxReps: 2},
		},
		Metrics: []Metric{
			mpps, {Name: "new flows", Unit: "1000/s"}, {Name: "memory", Unit: "bytes a flow", LowerIsBetter: true, Absolute: true},
			{Name: "apply", Unit: "ms", LowerIsBetter: true, Digits: 1, Absolute: true},
			{Name: "expiry", Unit: "ms a second", LowerIsBetter: true, Digits: 1, Absolute: true},
		},
		NotShown: []string{
			"Memory and new flows of few flows: what the machine does besides is more than that.",
			"Flows of real traffic, most of which are idle: here each has a packet in its turn.",
			"Connection tracking's expiry: it has a worker of its own, which is no interrupt.",
		},
	}
	peer := func(name, about string, set setup, dest netip.Addr) Row {
		return Row{Name: name, About: about, Absent: tooSlow, Run: func(t *Trial) error {
			return scaleRow(t, dest, func(n *network) (datapath.Datapath, error) { return nil, set(t, n) })
		}}
	}
	s.Rows = []Row{
		peer("iptables DNAT", "one rule", iptablesDNAT, vip4),
		peer("nft DNAT", "a map lookup", nftDNAT, vip4),
		peer("nft masquerade", "one address, 64 servers", nftMasquerade, outside),
	}
	for _, r := range []struct {
		name, path, attach string
		snat               bool
	}{
		{"sluice nftables dnat", "nftables", "", false}, {"sluice ebpf dnat (xdp)", "ebpf", "xdp", false}, {"sluice ebpf snat (xdp)", "ebpf", "xdp", true},
	} {
		row := Row{Name: r.name, About: "one service or rule; eBPF tables sized for the point", Run: func(t *Trial) error {
			dest := vip4
			if r.snat {
				dest = outside
			}
			return scaleRow(t, dest, func(n *network) (datapath.Datapath, error) { return n.applyScale(t, r.path, r.attach, r.snat) })
		}}
		if r.path == "nftables" {
			row.Absent = tooSlow
		}
		s.Rows = append(s.Rows, row)
	}
	return s
}

// tooSlow excludes the largest point for rows with connection tracking.
func tooSlow(p Point) string {
	if p.Value > 1_000_000 {
		return "connection tracking takes a minute to open and free so many; a million shows its cost a flow"
	}
	return ""
}

// scaleRow opens every flow once, then measures over all flows, then idle.
func scaleRow(t *Trial, dest netip.Addr, set func(*network) (datapath.Datapath, error)) error {
	n, err := newNetwork(t)
	if err != nil {
		return err
	}
	if err := t.needConntrack(t.Point.Value + 1<<17); err != nil {
		return err
	}
	if err := warmNeighbour(t, n); err != nil {
		return err
	}
	before := kernelMemory()
	d, err := set(n)
	if err != nil {
		return err
	}
	return n.reportScale(t, streamTo(dest, t.Point.Value), before, d)
}

// applyScale returns the datapath if it keeps the flows in tables of its own.
func (n *network) applyScale(t *Trial, path, attach string, snat bool) (datapath.Datapath, error) {
	yaml := service{mode: "dnat", protocol: "udp", attach: attach, port: 53, vip: vip4, backend: server4}.yaml(t.Point)
	if snat {
		yaml = snatYAML(attach)(t.Point)
	}
	c, err := config.Decode("bench", []byte(yaml))
	if err != nil {
		return nil, err
	}
	if attach != "" {
		c.Tables.Flows, c.Tables.Flows6 = max(t.Point.Value*21/20, 65536), 65536
	}
	d, change, err := applyConfig(t, n, path, c)
	if err != nil {
		return nil, err
	}
	t.Report("apply", float64(change.Duration)/1e6)
	if path != "ebpf" {
		return nil, nil // connection tracking keeps the flows
	}
	return d, nil
}

// reportTables reports the memory of all tables of a datapath per flow.
func (n *network) reportTables(t *Trial, d datapath.Datapath) error {
	c, err := d.Counters(t)
	if err != nil {
		return err
	}
	var sum uint64
	for _, table := range c.Tables {
		sum += table.Bytes
	}
	if sum > 0 && t.Point.Value >= 1_000_000 {
		t.Report("memory", float64(sum)/float64(t.Point.Value))
	}
	return nil
}

func (n *network) reportScale(t *Trial, s stream, before uint64, d datapath.Datapath) error {
	perSecond, arrived, err := n.openFlows(t, s, s.flows)
	if err != nil {
		return err
	}
	if lost := t.Point.Value - int(arrived); lost*50 > t.Point.Value {
		t.Note("%s flows: %.0f %% of the first packets did not arrive", t.Point.Name, 100*float64(lost)/float64(t.Point.Value))
	}
	if t.Point.Value >= 50_000 && perSecond > 0 {
		t.Report("new flows", perSecond/1e3)
	}
	if d != nil {
		if err := n.reportTables(t, d); err != nil {
			return err
		}
	} else if used := kernelMemory(); used > before && t.Point.Value >= 1_000_000 {
		t.Report("memory", float64(used-before+conntrackBuckets())/float64(t.Point.Value))
	}
	s.open = true
	if err := reportPackets(t, n, s); err != nil {
		return err
	}
	if d == nil || t.Point.Value < 1_000_000 {
		return nil
	}
	idle := readLoad()
	if err := wait(t, 1000); err != nil {
		return err
	}
	now := readLoad()
	t.Report("expiry", 1e3*(now.interrupts-idle.interrupts)/now.at.Sub(idle.at).Seconds())
	return nil
}

// conntrackBuckets returns the bytes of the connection table's hash, which the host allocates once: one pointer per
// bucket.
func conntrackBuckets() uint64 {
	n, _ := strconv.ParseUint(readLine("/proc/sys/net/netfilter/nf_conntrack_buckets"), 10, 64)
	return 8 * n
}

// openFlows sends one packet per flow and returns the rate of arrivals per second of CPU time. The rate is 0 if all
// packets arrived at once.
func (n *network) openFlows(t *Trial, s stream, count int) (perSecond float64, arrived uint64, err error) {
	if count <= 0 { // a sender reads 0 as no limit
		return 0, 0, nil
	}
	sink, err := load.NewSink(load.SinkOptions{})
	if err != nil {
		return 0, 0, err
	}
	defer sink.Close()
	from, to, spec := n.ends(s)
	if err := sink.Attach(to, "eth0"); err != nil {
		return 0, 0, err
	}
	spec.Limit = uint64(count)
	sender, err := load.NewSender(from, spec, []int{t.CPU})
	if err != nil {
		return 0, 0, err
	}
	defer sender.Close()
	ctx, cancel := context.WithTimeout(t, 30*time.Second)
	defer cancel()
	err = t.withYardstick(ctx, func() error {
		before, err := sink.ByCPU()
		if err != nil {
			return err
		}
		err = t.withProfile("new-flows", func() (err error) {
			perSecond, arrived, err = openedBy(ctx, sender, sink)
			return err
		})
		if err != nil {
			return err
		}
		after, err := sink.ByCPU()
		t.away = err == nil && otherCPUShare(before, after, t.CPU) >= maxElsewhere
		return err
	})
	if err != nil {
		return 0, arrived, fmt.Errorf("open flows: %d of %d arrived: %w", arrived, count, err)
	}
	return perSecond, arrived, nil
}

// openedBy runs a sender to its end. The clock starts with the first observed arrival. The rate is 0 if none arrived,
// or all at once.
func openedBy(ctx context.Context, sender *load.Sender, sink *load.Sink) (perSecond float64, arrived uint64, err error) {
	done := make(chan error, 1)
	go func() { done <- sender.Run(ctx, nil) }()
	var begin time.Duration
	var first uint64
	for {
		r, err := sink.Read()
		if err != nil {
			return 0, 0, err
		}
		if begin == 0 && r.Packets > 0 {
			begin, first = sender.CPUTime(), r.Packets
		}
		select {
		case err := <-done:
			used := sender.CPUTime()
			r, readErr := sink.Read()
			if err = errors.Join(err, readErr); err != nil || begin == 0 || r.Packets == first {
				return 0, r.Packets, err
			}
			return float64(r.Packets-first) / (used - begin).Seconds(), r.Packets, nil
		case <-time.After(100 * time.Microsecond):
		}
	}
}

// kernelMemory returns the kernel's unreclaimable slab memory in bytes, which contains the connection tracking
// entries.
func kernelMemory() uint64 { return meminfo("SUnreclaim:") }

// meminfo returns a line of /proc/meminfo in bytes, or 0 if the line is missing.
func meminfo(name string) uint64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(b) {
		if f := strings.Fields(string(line)); len(f) >= 2 && f[0] == name {
			kb, _ := strconv.ParseUint(f[1], 10, 64)
			return kb << 10
		}
	}
	return 0
}
