// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// SamplesPerSecond is how often each CPU is looked at: an odd number, so that it
// does not keep step with timers, and 0.2 % of a core at 2 µs a stack.
const SamplesPerSecond = 997

// Profile is where the CPUs spent their time during a window.
type Profile struct {
	Window  time.Duration  `json:"window_ns"`
	Rate    int            `json:"samples_per_second"` // for each CPU
	CPUs    int            `json:"cpus"`
	Samples uint64         `json:"samples"`
	Lost    uint64         `json:"lost"` // samples lost because a map was full
	Packets uint64         `json:"packets"`
	Counted string         `json:"packets_counted"` // description of what Packets counts
	Phases  []PhaseShare   `json:"phases"`
	Stacks  []ProfileStack `json:"-"`
	Limits  []string       `json:"limits,omitempty"`
	// divisor is the number of packets forwarded by all namespaces. Samples do not identify a
	// namespace, so each namespace gets the share of its packets.
	divisor uint64
	// Busiest is the CPU that worked most, and its share of the window.
	Busiest      int     `json:"busiest_cpu"`
	BusiestShare float64 `json:"busiest_share"`
}

// PhaseShare is the time of one phase.
type PhaseShare struct {
	Phase   string  `json:"phase"`
	Color   string  `json:"color"`
	Network bool    `json:"network"` // a part of the network stack
	Samples uint64  `json:"samples"`
	Share   float64 `json:"share"` // of all CPUs' time in the window
	// MicrosPerPacket is CPU time per packet: of a namespace, its part of the time by its part
	// of all packets. 0 without packets.
	MicrosPerPacket float64 `json:"us_per_packet"`
}

// ProfileStack is one distinct stack with its samples.
type ProfileStack struct {
	Program string   // Command name of the running task.
	Frames  []string // Innermost first; empty in user space.
	Phase   Phase
	Samples uint64
}

// TakeProfile samples all CPUs for the given window, which begins when the program
// is loaded, or until ctx ends; 0 waits for ctx alone. Packets are counted in the
// given namespaces: those forwarded, or, where nothing is forwarded, those received.
func TakeProfile(ctx context.Context, window time.Duration, namespaces []netdev.Namespace) (*Profile, error) {
	return ProfileWhile(ctx, namespaces, func() error {
		wait := ctx
		if window > 0 {
			var cancel context.CancelFunc
			wait, cancel = context.WithTimeout(ctx, window)
			defer cancel()
		}
		<-wait.Done()
		return nil
	})
}

// ProfileWhile loads the BPF program that samples, then calls f, and samples all CPUs until f returns.
func ProfileWhile(ctx context.Context, namespaces []netdev.Namespace, f func() error) (*Profile, error) {
	if _, err := recentSymbols(); err != nil {
		return nil, fmt.Errorf("profile: %w", err)
	}
	var objects profileObjects
	if err := loadProfileObjects(&objects, nil); err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("profile: %w: run as root, or with CAP_BPF and CAP_PERFMON", os.ErrPermission)
		}
		return nil, fmt.Errorf("profile: load program: %w", err)
	}
	defer objects.Close()
	p := &Profile{Rate: SamplesPerSecond}
	var everywhere []netdev.Namespace
	if len(namespaces) > 0 {
		everywhere, _ = netdev.Namespaces()
	}
	before, elsewhere := readForwarded(ctx, namespaces), readForwarded(ctx, everywhere)
	stop, cpus, err := sampleCPUs(objects.ProfileCpu)
	if err != nil {
		return nil, err
	}
	p.CPUs = cpus
	start, times := time.Now(), cpuTimes()
	err = f()
	stop()
	if err != nil {
		return nil, err
	}
	p.setBusiestCPU(CPUsBetween(times, cpuTimes()))
	p.Window = time.Since(start)
	p.countPackets(readForwarded(context.WithoutCancel(ctx), namespaces), before, readForwarded(context.WithoutCancel(ctx), everywhere).Sub(elsewhere))
	symbols, err := recentSymbols()
	if err != nil {
		return nil, fmt.Errorf("profile: %w", err)
	}
	all := *symbols
	all.programs = loadedPrograms() // including programs loaded meanwhile
	if err := p.collect(&objects, &all); err != nil {
		return nil, err
	}
	return p, nil
}

// sampleCPUs makes the program run at every tick of a clock event on each online CPU.
func sampleCPUs(program *ebpf.Program) (stop func(), cpus int, err error) {
	var fds []int
	stop = func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	for _, cpu := range onlineCPUs() {
		attr := unix.PerfEventAttr{
			Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_CPU_CLOCK,
			Sample: uint64(time.Second) / SamplesPerSecond, // a period of CPU time in ns
		}
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err == nil {
			fds = append(fds, fd)
			err = unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, program.FD())
		}
		if err == nil {
			err = unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0)
		}
		if err != nil {
			stop()
			return nil, 0, fmt.Errorf("profile: clock event on CPU %d: %w (needs CAP_PERFMON or kernel.perf_event_paranoid ≤ 0)", cpu, err)
		}
	}
	return stop, len(fds), nil
}

// onlineCPUs reads lists such as "0-3,6".
func onlineCPUs() []int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	var cpus []int
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		from, to, ok := strings.Cut(part, "-")
		if !ok {
			to = from
		}
		lo, err1 := strconv.Atoi(from)
		hi, err2 := strconv.Atoi(to)
		if err != nil || err1 != nil || err2 != nil {
			continue
		}
		for cpu := lo; cpu <= hi; cpu++ {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) == 0 {
		for cpu := range runtime.NumCPU() {
			cpus = append(cpus, cpu)
		}
	}
	return cpus
}

// readForwarded sums the counters of forwarded packets.
func readForwarded(ctx context.Context, namespaces []netdev.Namespace) Counters {
	sum := Counters{}
	for _, ns := range namespaces {
		c, _, err := ReadCounters(ctx, ns)
		if err != nil {
			continue
		}
		sum["forwarded"] += c["Ip.ForwDatagrams"] + c["Ip6OutForwDatagrams"]
		sum["received"] = c["softnet.processed"] // the same in every namespace
	}
	return sum
}

func (p *Profile) countPackets(after, before, all Counters) {
	delta := after.Sub(before)
	p.divisor = all["forwarded"]
	p.Packets, p.Counted = delta["forwarded"], "forwarded packets"
	if p.Packets == 0 {
		p.Packets, p.Counted = delta["received"], "packets received by the network stack"
	}
}

// collect reads the samples and adds them up by phase.
func (p *Profile) collect(objects *profileObjects, symbols *Symbols) error {
	index := newPhaseIndex()
	shares := map[string]*PhaseShare{}
	merged := map[string]*ProfileStack{}
	var key profileProfileKey
	var raw profileProfileStack
	entries := objects.ProfileStacks.Iterate()
	for entries.Next(&key, &raw) {
		s := ProfileStack{Program: cString(key.Comm[:]), Phase: phaseUser, Samples: raw.Samples}
		for _, address := range raw.Ips[:min(int(raw.Frames), len(raw.Ips))] {
			s.Frames = append(s.Frames, symbols.Find(address).Name)
		}
		if len(s.Frames) > 0 {
			s.Phase = index.ofStack(s.Frames)
		}
		p.Samples += s.Samples
		share := shares[s.Phase.Name]
		if share == nil {
			share = &PhaseShare{Phase: s.Phase.Name, Color: s.Phase.Color, Network: isNetwork(s.Phase)}
			shares[s.Phase.Name] = share
		}
		share.Samples += s.Samples
		// Addresses within one function are one stack.
		id := s.Program + ";" + strings.Join(s.Frames, ";")
		if m := merged[id]; m != nil {
			m.Samples += s.Samples
		} else {
			merged[id] = &s
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("profile: read samples: %w", err)
	}
	var lost []uint64
	if objects.ProfileLost.Lookup(uint32(0), &lost) == nil {
		for _, n := range lost {
			p.Lost += n
		}
	}
	for _, s := range merged {
		p.Stacks = append(p.Stacks, *s)
	}
	slices.SortFunc(p.Stacks, func(a, b ProfileStack) int {
		return cmp.Or(cmp.Compare(b.Samples, a.Samples), slices.Compare(a.Frames, b.Frames))
	})
	p.finish(shares)
	return nil
}

// finish turns samples into shares and microseconds.
func (p *Profile) finish(shares map[string]*PhaseShare) {
	// A CPU in deep sleep may skip ticks. Missing ticks were idle.
	expected := float64(p.Rate) * p.Window.Seconds()
	total := max(expected*float64(p.CPUs), float64(p.Samples+p.Lost))
	if missing := uint64(total) - p.Samples - p.Lost; missing > 0 {
		idle := shares[phaseIdle.Name]
		if idle == nil {
			idle = &PhaseShare{Phase: phaseIdle.Name, Color: phaseIdle.Color}
			shares[phaseIdle.Name] = idle
		}
		idle.Samples += missing
	}
	for _, s := range shares {
		s.Share = float64(s.Samples) / total
		if p.Packets > 0 {
			s.MicrosPerPacket = float64(s.Samples) / float64(p.Rate) / float64(max(p.Packets, p.divisor)) * 1e6
		}
		p.Phases = append(p.Phases, *s)
	}
	slices.SortFunc(p.Phases, func(a, b PhaseShare) int {
		return cmp.Or(cmp.Compare(b.Samples, a.Samples), cmp.Compare(a.Phase, b.Phase))
	})
}

func isNetwork(p Phase) bool {
	return p.Name != phaseIdle.Name && p.Name != phaseUser.Name && p.Name != phaseOther.Name
}

// setBusiestCPU sets the CPU with the least idle time in the window.
func (p *Profile) setBusiestCPU(window []CPUTime) {
	for _, c := range window {
		if share := 1 - float64(min(c.Idle, c.Total))/float64(c.Total); share > p.BusiestShare {
			p.Busiest, p.BusiestShare = c.CPU, share
		}
	}
}

// cpuTimes reads the time of each CPU by activity since boot.
func cpuTimes() []CPUTime {
	text, _ := os.ReadFile("/proc/stat")
	return ParseCPUs(string(text))
}

// Share returns the part of all CPUs' time that the named phases took.
func (p *Profile) Share(names ...string) float64 {
	sum := 0.0
	for _, s := range p.Phases {
		if slices.Contains(names, s.Phase) {
			sum += s.Share
		}
	}
	return sum
}

var foldable = strings.NewReplacer(";", ":", "\n", " ")

// Folded returns the stacks as lines "program;outermost;...;innermost count", the input format of
// flame graph tools. Separators inside a program's name are replaced.
func (p *Profile) Folded() string {
	lines := make([]string, 0, len(p.Stacks))
	for _, s := range p.Stacks {
		var b strings.Builder
		b.WriteString(cmp.Or(foldable.Replace(s.Program), "?"))
		if len(s.Frames) == 0 {
			b.WriteString(";[" + s.Phase.Name + "]")
		}
		for _, f := range slices.Backward(s.Frames) {
			b.WriteString(";" + f)
		}
		fmt.Fprintf(&b, " %d\n", s.Samples)
		lines = append(lines, b.String())
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
