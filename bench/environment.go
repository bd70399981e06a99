// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/doctor/faults"
)

// Environment describes the machine to a reader of the results.
type Environment struct {
	Machine     string            `json:"machine"`              // CPU name from the kernel.
	Family      string            `json:"cpu_family,omitempty"` // Distinguishes CPUs that virtual machines name alike.
	CPUs        int               `json:"cpus"`
	MemoryBytes uint64            `json:"memory_bytes"`
	Kernel      string            `json:"kernel"`
	Virtual     string            `json:"virtualization,omitempty"`
	Clock       string            `json:"clock"`
	Governor    string            `json:"governor,omitempty"`
	Mitigations map[string]string `json:"mitigations"`
	Sysctls     map[string]string `json:"sysctls"`
	Versions    map[string]string `json:"versions"`
	Commit      string            `json:"commit"`
}

// readEnvironment reads the environment once, because it runs several programs with --version.
var readEnvironment = sync.OnceValue(lookAround)

func lookAround() Environment {
	e := Environment{
		CPUs:        runtime.NumCPU(),
		Clock:       readLine("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
		Governor:    readLine("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
		Virtual:     readLine("/sys/class/dmi/id/product_name"),
		Mitigations: map[string]string{}, Sysctls: map[string]string{}, Versions: map[string]string{},
		Commit: commit(),
	}
	e.Machine, e.Family = cpuModel()
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		e.Kernel = unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Version[:])
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		e.MemoryBytes = si.Totalram * uint64(si.Unit)
	}
	files, _ := filepath.Glob("/sys/devices/system/cpu/vulnerabilities/*")
	for _, f := range files {
		if v := readLine(f); v != "Not affected" {
			e.Mitigations[filepath.Base(f)] = v
		}
	}
	for _, key := range []string{
		"net.netfilter.nf_conntrack_max", "net.netfilter.nf_conntrack_buckets", "net.netfilter.nf_conntrack_checksum",
		"net.core.netdev_budget", "net.core.bpf_jit_enable",
	} {
		if v := readLine("/proc/sys/" + strings.ReplaceAll(key, ".", "/")); v != "" {
			e.Sysctls[key] = v
		}
	}
	for name, args := range map[string][]string{
		"nft": {"nft", "--version"}, "iptables": {"iptables-legacy", "--version"}, "haproxy": {"haproxy", "-v"},
		"nginx": {"nginx", "-v"}, "ab": {"ab", "-V"}, "tayga": {"tayga", "--version"}, "nftlb": {"nftlb", "-v"},
	} {
		if v := versionOf(args); v != "" {
			e.Versions[name] = v
		}
	}
	e.Versions["go"] = runtime.Version()
	return e
}

func versionOf(args []string) string {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return "" // not installed, or without a version option
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return strings.TrimSpace(line)
}

// commit returns the revision that the program was built from, if recorded (go build -buildvcs). The working
// directory may hold another revision.
func commit() string {
	rev, dirty := "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				rev = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = " with changes"
			}
		}
	}
	if rev == "" {
		return "unknown"
	}
	return rev[:min(12, len(rev))] + dirty
}

// cpuModel returns the model and the family of the first CPU from /proc/cpuinfo.
func cpuModel() (model, family string) {
	b, _ := os.ReadFile("/proc/cpuinfo")
	first, _, _ := bytes.Cut(b, []byte("\n\n"))
	for line := range strings.Lines(string(first)) {
		switch k, v, _ := strings.Cut(line, ":"); strings.TrimSpace(k) {
		case "model name":
			model = strings.TrimSpace(v)
		case "cpu family":
			family = strings.TrimSpace(v)
		}
	}
	return cmp.Or(model, runtime.GOARCH), family
}

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// machineLoad is the CPU time used so far by all programs and by the benchmark.
type machineLoad struct {
	at          time.Time
	total, ours float64 // Seconds.
	interrupts  float64 // of total, in hard and soft interrupts
}

// clockTicks a second of /proc/stat (USER_HZ, fixed in the kernel's ABI).
const clockTicks = 100

func readLoad() machineLoad {
	l := machineLoad{at: time.Now()}
	line, _, _ := strings.Cut(readLine("/proc/stat"), "\n")
	for i, f := range strings.Fields(line) {
		// cpu user nice system idle iowait irq softirq steal guest guest_nice
		if v, err := strconv.ParseFloat(f, 64); err == nil && i != 4 && i != 5 && i < 9 {
			l.total += v / clockTicks
			if i == 6 || i == 7 {
				l.interrupts += v / clockTicks
			}
		}
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var ru unix.Rusage
		if unix.Getrusage(who, &ru) == nil {
			l.ours += time.Duration(ru.Utime.Nano() + ru.Stime.Nano()).Seconds()
		}
	}
	l.ours += softirqThreads()
	return l
}

// softirqThreads returns the CPU time of the kernel's soft interrupt threads. During a run they process the packets
// of the run.
func softirqThreads() float64 {
	var sum float64
	for _, f := range softirqStats() {
		_, fields := readStat(f)
		if len(fields) < 13 {
			continue
		}
		for _, ticks := range fields[11:13] { // utime, stime
			if v, err := strconv.ParseFloat(ticks, 64); err == nil {
				sum += v / clockTicks
			}
		}
	}
	return sum
}

// softirqStats returns the stat files of the soft interrupt threads, which live as long as the kernel.
var softirqStats = sync.OnceValue(func() (files []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range stats {
		if name, _ := readStat(f); strings.HasPrefix(name, "ksoftirqd/") {
			files = append(files, f)
		}
	}
	return files
})

// readStat reads the name of a thread and the fields after it in /proc/PID/stat (proc_pid_stat(5)).
func readStat(file string) (name string, fields []string) {
	s := readLine(file)
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if open < 0 || end < open {
		return "", nil
	}
	return s[open+1 : end], strings.Fields(s[end+1:])
}

// foreignSince returns the average number of CPUs that other programs have used since l.
func (l machineLoad) foreignSince() float64 {
	now := readLoad()
	foreign := (now.total - l.total) - (now.ours - l.ours)
	return max(foreign/now.at.Sub(l.at).Seconds(), 0)
}

const (
	conntrackMax     = "net.netfilter.nf_conntrack_max"
	conntrackMaxFile = "/proc/sys/net/netfilter/nf_conntrack_max"
)

// needConntrack makes room for n entries in the host's connection table. Only the initial network namespace can write
// the limit, which applies to all namespaces. The trial's cleanup restores it.
func (t *Trial) needConntrack(n int) error {
	if was, err := readConntrackMax(); err != nil || was >= n {
		return nil // no connection tracking, or enough room
	}
	was, err := t.borrowConntrack() // another process may have restored it in the meantime
	if err != nil || was >= n {
		return err
	}
	return writeConntrackMax(n)
}

// setConntrackMax sets the limit during the trial. It lowers the limit only if the user allowed it.
func (t *Trial) setConntrackMax(n int) error {
	was, err := t.borrowConntrack()
	if err != nil {
		return err
	}
	if n < was && !t.lower {
		return fmt.Errorf("%s is the whole host's: it would be %d instead of %d for this run; allow that with --allow-host-sysctl", conntrackMax, n, was)
	}
	return writeConntrackMax(n)
}

// borrowConntrack locks the limit until the trial ends and returns it. The limit is restored even if this program is
// killed.
func (t *Trial) borrowConntrack() (int, error) {
	if !t.borrowed {
		restore, err := faults.Borrow(t, map[string]string{conntrackMax: ""})
		if err != nil {
			return 0, err
		}
		t.borrowed = true
		t.Cleanup(restore)
	}
	return readConntrackMax()
}

func writeConntrackMax(n int) error {
	return os.WriteFile(conntrackMaxFile, []byte(strconv.Itoa(n)), 0o644)
}

func readConntrackMax() (int, error) {
	return strconv.Atoi(readLine(conntrackMaxFile))
}
