// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
)

// BenchmarkWatched measures the cost of 'sluice doctor --watch' and 'sluice top' together on a fully loaded gateway:
// every CPU forwards packets of 50,000 connections through nftables masquerade. An iteration is one round of the doctor
// with default settings.
//
//	go test -run xxx -bench Watched -benchtime 30x ./doctor
//
// The speed of a virtual machine varies by some percent within a minute, which is more than the cost. So packets are
// counted every 50 ms. Each count is compared with the nearest counts, before and after, during which both programs
// waited. The metrics are:
//
//   - packets-lost-%: the median of the rounds, because a jump in speed makes single rounds outliers;
//   - noise-%: its standard error;
//   - probed-lost-%: the loss in the doctor's window, while drops are probed;
//   - doctor-CPU-% and top-CPU-%: CPU time of the programs, as a share of the time of all CPUs.
func BenchmarkWatched(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF, labtest.Conntrack, labtest.Nftables, labtest.Tool("nft"), labtest.Tool("go"))
	binary := filepath.Join(b.TempDir(), "sluice")
	if out, err := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice").CombinedOutput(); err != nil {
		b.Fatalf("build: %v\n%s", err, out)
	}
	g := busyGateway(b)
	w := watchers(b, binary, g.path)
	var counts []count
	rounds := 0
	start := time.Now()
	for b.Loop() {
		counts = append(counts, g.round(b, w)...)
		rounds++
	}
	w.stop()
	var lost, probed []float64
	w.mark(counts)
	for i := range rounds {
		all, within := losses(counts, start.Add(time.Duration(i)*roundLength), start.Add(time.Duration(i+1)*roundLength))
		b.Logf("round %d: %.2f %% lost, %.2f %% while drops are probed", i, all, within)
		lost, probed = append(lost, all), append(probed, within)
	}
	middle, noise := median(lost)
	b.ReportMetric(middle, "packets-lost-%")
	b.ReportMetric(noise, "noise-%")
	middle, _ = median(probed)
	b.ReportMetric(middle, "probed-lost-%")
	for i, p := range w.programs {
		var used time.Duration
		for _, c := range counts {
			used += c.cpu[i]
		}
		b.ReportMetric(100*used.Seconds()/(float64(rounds)*roundLength.Seconds())/float64(runtime.NumCPU()), p.Args[1]+"-CPU-%")
	}
}

// roundLength is the default interval of 'doctor --watch'. slice is the length of one count of packets.
const (
	roundLength = 15 * time.Second
	slice       = 50 * time.Millisecond
)

// count is the traffic and the cost of one slice.
type count struct {
	at      time.Time // end of the slice
	packets float64   // per second
	cpu     [2]time.Duration
	probed  bool // in the doctor's window
}

// still reports whether both programs were idle.
func (c *count) still() bool { return !c.probed && c.cpu[0]+c.cpu[1] < 20*time.Microsecond }

// losses compares the slices of a round with their still neighbours, five on each side.
func losses(counts []count, from, to time.Time) (all, probed float64) {
	const neighbours = 5
	var every, within []float64
	for i, c := range counts {
		if c.at.Before(from) || !c.at.Before(to) {
			continue
		}
		var sides []float64
		for _, step := range []int{-1, 1} {
			sum, n := 0.0, 0
			for j := i + step; j >= 0 && j < len(counts) && n < neighbours; j += step {
				if counts[j].still() {
					sum += counts[j].packets
					n++
				}
			}
			if n > 0 {
				sides = append(sides, sum/float64(n))
			}
		}
		loss := 100 * (1 - c.packets/mean(sides))
		every = append(every, loss)
		if c.probed {
			within = append(within, loss)
		}
	}
	return mean(every), mean(within)
}

func mean(v []float64) (m float64) {
	for _, x := range v {
		m += x / float64(len(v))
	}
	return m
}

// median returns the median and its standard error, by the distance of the quartiles.
func median(v []float64) (middle, noise float64) {
	v = slices.Sorted(slices.Values(v))
	at := func(q float64) float64 {
		x := q * float64(len(v)-1)
		low := int(x)
		return v[low] + (x-float64(low))*(v[min(low+1, len(v)-1)]-v[low])
	}
	return at(0.5), 0.93 * (at(0.75) - at(0.25)) / math.Sqrt(float64(len(v)))
}

// gateway forwards as much as it can.
type gateway struct {
	path string // of its network namespace
	wan  *os.File
}

// busyGateway forwards to an interface that accepts every packet. If the far end dropped packets, the probe of drops
// would run for each packet.
func busyGateway(b *testing.B) *gateway {
	b.Helper()
	l := labtest.New(b, lab.Topology{Name: "watched",
		Nodes: []lab.NodeSpec{{Name: "source", Routes: []lab.Route{{To: "default", Via: "192.0.2.1"}}}, {Name: "gateway", Forward: true}, {Name: "sink"}},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "source", Iface: "eth0", GRO: true, Addresses: []string{"192.0.2.2/24"}},
				B: lab.End{Node: "gateway", Iface: "lan0", GRO: true, Addresses: []string{"192.0.2.1/24"}}},
			{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24"}},
				B: lab.End{Node: "sink", Iface: "eth0", GRO: true, Addresses: []string{"198.51.100.2/24"}}},
		}})
	swallow(b, l.Node("sink"))
	node := l.Node("gateway")
	nft := node.Command(b.Context(), "nft", "table ip t { chain p { type nat hook postrouting priority 100; oifname wan0 masquerade; }; }")
	if out, err := nft.CombinedOutput(); err != nil {
		b.Fatalf("nft: %v: %s", err, out)
	}
	g := &gateway{path: node.Path()}
	if err := node.Do(func() (err error) {
		g.wan, err = os.Open("/proc/thread-self/net/dev")
		return err
	}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { g.wan.Close() })
	spec := load.PacketSpec{Interface: "eth0", Flows: 50_000}
	for text, to := range map[string]*load.Range{"192.0.2.10+4:1024-65535": &spec.Source, "198.51.100.2:9": &spec.Dest} {
		var err error
		if *to, err = load.ParseRange(text); err != nil {
			b.Fatal(err)
		}
	}
	cpus := make([]int, runtime.NumCPU())
	for i := range cpus {
		cpus[i] = i
	}
	sender, err := load.NewSender(l.Node("source"), spec, cpus)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { sender.Close() })
	ctx, stop := context.WithCancel(context.Background())
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- sender.Run(ctx, started) }()
	b.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
	<-started
	labtest.Eventually(b, 30*time.Second, "packets at the far end", func() error {
		if n := g.packets(b); n < 100_000 {
			return fmt.Errorf("%d packets", n)
		}
		return nil
	})
	return g
}

// swallow has the node take every IPv4 packet without a drop (TC_ACT_STOLEN).
func swallow(b *testing.B, node *lab.Node) {
	b.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, int32(netlink.TC_ACT_STOLEN)), asm.Return()}})
	if err != nil {
		b.Fatal(err)
	}
	defer prog.Close() // the filter keeps it
	err = node.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		hook := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
		if err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: hook, QdiscType: "clsact"}); err != nil {
			return err
		}
		return netlink.FilterAdd(&netlink.BpfFilter{Fd: prog.FD(), Name: "swallow", DirectAction: true,
			FilterAttrs: netlink.FilterAttrs{LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_IP}})
	})
	if err != nil {
		b.Fatal(err)
	}
}

// packets is how many wan0 has taken.
func (g *gateway) packets(b *testing.B) uint64 {
	b.Helper()
	text := make([]byte, 4096)
	n, _ := g.wan.ReadAt(text, 0)
	for line := range strings.Lines(string(text[:n])) {
		if name, numbers, found := strings.Cut(line, ":"); found && strings.TrimSpace(name) == "wan0" {
			sent, err := strconv.ParseUint(strings.Fields(numbers)[9], 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return sent
		}
	}
	b.Fatalf("no wan0 in %q", text[:n])
	return 0
}

// round counts packets for a round of the doctor.
func (g *gateway) round(b *testing.B, w *watching) (counts []count) {
	b.Helper()
	last, packets, cpu := time.Now(), g.packets(b), w.cpu()
	for end := last.Add(roundLength); time.Now().Before(end); {
		time.Sleep(slice)
		now, n, used := time.Now(), g.packets(b), w.cpu()
		c := count{at: now, packets: float64(n-packets) / now.Sub(last).Seconds()}
		for i := range used {
			c.cpu[i] = used[i] - cpu[i]
		}
		counts = append(counts, c)
		last, packets, cpu = now, n, used
	}
	return counts
}

// watching are the two programs, and when the doctor ended its examinations.
type watching struct {
	programs [2]*exec.Cmd
	stop     func()
	mu       sync.Mutex // protects ends
	ends     []time.Time
}

// watchers starts both programs and lets them begin.
func watchers(b *testing.B, binary, netns string) *watching {
	b.Helper()
	terminal, err := openTerminal()
	if err != nil {
		b.Fatal(err)
	}
	w := &watching{}
	for i, args := range [][]string{{"doctor", "--watch", "--netns", netns}, {"top", "--netns", netns}} {
		cmd := exec.Command(binary, args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
		cmd.Env = append(os.Environ(), "TERM=xterm")
		if i == 0 {
			cmd.Stdout = w
		}
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		w.programs[i] = cmd
	}
	w.stop = sync.OnceFunc(func() {
		for _, p := range w.programs {
			_ = p.Process.Signal(syscall.SIGTERM)
			_ = p.Wait()
		}
		terminal.Close()
	})
	b.Cleanup(w.stop)
	time.Sleep(6 * time.Second) // the first round of both is behind them
	return w
}

// Write notes that the doctor has said something.
func (w *watching) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends = append(w.ends, time.Now())
	return len(p), nil
}

// mark marks the slices in the doctor's windows.
func (w *watching) mark(counts []count) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range counts {
		for _, end := range w.ends {
			if at := counts[i].at; at.After(end.Add(-observe.DefaultWindow-time.Second)) && at.Before(end.Add(slice)) {
				counts[i].probed = true
			}
		}
	}
}

// cpu reads the CPU time of both, the kernel's part included.
func (w *watching) cpu() (used [2]time.Duration) {
	for i, p := range w.programs {
		const ofProcess = 2 // CPUCLOCK_SCHED (linux/posix-timers.h)
		var t unix.Timespec
		_ = unix.ClockGettime(int32(^p.Process.Pid<<3|ofProcess), &t)
		used[i] = time.Duration(t.Nano())
	}
	return used
}

// openTerminal returns a terminal. Its output is discarded.
func openTerminal() (*os.File, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		return nil, err
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		return nil, err
	}
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	go func() {
		_, _ = io.Copy(io.Discard, master)
		master.Close()
	}()
	return terminal, nil
}
