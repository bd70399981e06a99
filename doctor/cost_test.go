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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
)

// BenchmarkWatched measures what 'sluice doctor --watch' and 'sluice top' together
// take from a gateway that has nothing to spare: every CPU forwards packets of
// 50,000 connections through nftables masquerade. Windows with and without them
// follow each other, long enough for a whole round of both; each iteration is one
// window of each kind.
//
//	go test -run xxx -bench Watched -benchtime 6x ./doctor
//
// packets-lost-% is the loss of packets a second, the median of the ratios of
// neighbouring windows; noise-% is half the distance between their quartiles. On a
// machine that does other work, too, own-CPU-% is the quieter figure: the CPU time
// of the two programs as a share of that of all CPUs; and path-lost-% what a
// packet costs more by their probes and locks, by the CPU time of the packet path.
func BenchmarkWatched(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF, labtest.Conntrack, labtest.Nftables, labtest.Tool("nft"), labtest.Tool("go"))
	binary := filepath.Join(b.TempDir(), "sluice")
	if out, err := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice").CombinedOutput(); err != nil {
		b.Fatalf("build: %v\n%s", err, out)
	}
	g := busyGateway(b)
	var lost, path, own []float64
	for b.Loop() {
		without := g.window(b)
		stop := watchers(b, binary, g.path)
		with := g.window(b)
		cpu := stop()
		lost = append(lost, 100*(1-with.packets/without.packets))
		path = append(path, 100*(1-with.packets/with.cpu.Seconds()/(without.packets/without.cpu.Seconds())))
		own = append(own, 100*cpu.Seconds()/windowLength.Seconds()/float64(runtime.NumCPU()))
		b.Logf("%.0f and %.0f packets/s: %.2f %% lost, %.2f %% by CPU time; the programs took %.2f %% of all CPUs",
			without.packets/windowLength.Seconds(), with.packets/windowLength.Seconds(), lost[len(lost)-1], path[len(path)-1], own[len(own)-1])
	}
	median, noise := spread(lost)
	b.ReportMetric(median, "packets-lost-%")
	b.ReportMetric(noise, "noise-%")
	median, noise = spread(path)
	b.ReportMetric(median, "path-lost-%")
	b.ReportMetric(noise, "path-noise-%")
	median, _ = spread(own)
	b.ReportMetric(median, "own-CPU-%")
}

// spread returns the median and half the distance between the quartiles.
func spread(v []float64) (median, noise float64) {
	v = slices.Sorted(slices.Values(v))
	at := func(q float64) float64 {
		x := q * float64(len(v)-1)
		low := int(math.Floor(x))
		return v[low] + (x-float64(low))*(v[min(low+1, len(v)-1)]-v[low])
	}
	return at(0.5), (at(0.75) - at(0.25)) / 2
}

// windowLength is one round of 'doctor --watch' as it is by default.
const windowLength = 15 * time.Second

// gateway forwards as much as it can.
type gateway struct {
	path   string // of its network namespace
	sender *load.Sender
	sink   *load.Sink
}

// measured is what passed in one window, and the CPU time of the packet path.
type measured struct {
	packets float64
	cpu     time.Duration
}

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
	nft := l.Node("gateway").Command(b.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader("table ip t {\n chain p {\n type nat hook postrouting priority 100\n oifname wan0 masquerade\n }\n}\n")
	if out, err := nft.CombinedOutput(); err != nil {
		b.Fatalf("nft: %v: %s", err, out)
	}
	sink, err := load.NewSink(load.SinkOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { sink.Close() })
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		b.Fatal(err)
	}
	spec := load.PacketSpec{Interface: "eth0", Flows: 50_000}
	for text, to := range map[string]*load.Range{"192.0.2.10+4:1024-65535": &spec.Source, "198.51.100.2:9": &spec.Dest} {
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
	g := &gateway{l.Node("gateway").Path(), sender, sink}
	labtest.Eventually(b, 30*time.Second, "packets at the far end", func() error {
		if r, err := sink.Read(); err != nil || r.Packets < 100_000 {
			return fmt.Errorf("%d packets, %w", r.Packets, err)
		}
		return nil
	})
	return g
}

func (g *gateway) window(b *testing.B) measured {
	b.Helper()
	before, err := g.sink.Read()
	if err != nil {
		b.Fatal(err)
	}
	cpu, start := g.sender.CPUTime(), time.Now()
	time.Sleep(windowLength)
	after, err := g.sink.Read()
	if err != nil {
		b.Fatal(err)
	}
	scale := windowLength.Seconds() / time.Since(start).Seconds()
	return measured{float64(after.Packets-before.Packets) * scale, time.Duration(float64(g.sender.CPUTime()-cpu) * scale)}
}

// watchers starts both programs and lets them begin. stop ends them and returns
// the CPU time that they have used since.
func watchers(b *testing.B, binary, netns string) (stop func() time.Duration) {
	b.Helper()
	terminal, err := openTerminal()
	if err != nil {
		b.Fatal(err)
	}
	var programs []*exec.Cmd
	for _, args := range [][]string{{"doctor", "--watch", "--netns", netns}, {"top", "--netns", netns}} {
		cmd := exec.Command(binary, args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
		cmd.Env = append(os.Environ(), "TERM=xterm")
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		programs = append(programs, cmd)
	}
	time.Sleep(6 * time.Second) // the first round of both is behind them
	used := func() (sum time.Duration) {
		for _, p := range programs {
			sum += cpuTime(p.Process.Pid)
		}
		return sum
	}
	before := used()
	return func() time.Duration {
		cpu := used() - before
		for _, p := range programs {
			_ = p.Process.Signal(syscall.SIGTERM)
			_ = p.Wait()
		}
		terminal.Close()
		return cpu
	}
}

// cpuTime reads the CPU time of a process, the kernel's part included.
func cpuTime(pid int) time.Duration {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * time.Second / 100 // USER_HZ
}

// openTerminal makes a terminal whose output nobody reads.
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
