// SPDX-License-Identifier: Apache-2.0

// Package sick examines random hosts: each has one known fault, or none, among healthy traffic. It wants the doctor
// to name the fault on its first line, its remedy to heal the host, and no fault to be named on a healthy host.
//
// SLUICE_SICK_COUNT is the number of hosts of each kind, SLUICE_SICK_SEED the first seed.
package sick

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// result is what the doctor said of one host.
type result struct {
	seed  uint64
	kind  kind
	noise []string
	fault *fault
	first doctor.Conclusion
	right bool
	// commands that change something were tried, and healed.
	tried, healed bool
	before, after float64
}

// window is how long each host is watched.
const window = 2500 * time.Millisecond

func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// TestSickHosts examines hosts with one fault each. It reports the confusion matrix, and fails below the required shares.
func TestSickHosts(t *testing.T) {
	results := examineAll(t, func(r *rand.Rand, k kind) *fault {
		var possible []*fault
		for i := range faults {
			if f := &faults[i]; f.kinds == nil || slices.Contains(f.kinds, k) {
				possible = append(possible, f)
			}
		}
		return possible[r.IntN(len(possible))]
	})
	var right, tried, healed int
	for _, r := range results {
		if r.right {
			right++
		}
		if r.tried {
			tried++
		}
		if r.healed {
			healed++
		}
	}
	matrix(t, results)
	t.Logf("first line right: %d of %d; remedies that change something: %d, healed: %d", right, len(results), tried, healed)
	if 10*right < 9*len(results) {
		t.Errorf("the first line names the fault of %d of %d hosts, want 90 %%", right, len(results))
	}
	if 10*healed < 9*tried {
		t.Errorf("%d of %d remedies heal, want 90 %%", healed, tried)
	}
}

// TestHealthyHosts examines hosts without a fault.
func TestHealthyHosts(t *testing.T) {
	results := examineAll(t, func(*rand.Rand, kind) *fault { return nil })
	alarms := 0
	for _, r := range results {
		if !r.right {
			alarms++
			t.Logf("seed %d, %s, %s: %s", r.seed, kindNames[r.kind], strings.Join(r.noise, ", "), r.first)
		}
	}
	t.Logf("false alarms: %d of %d", alarms, len(results))
	if 100*alarms > len(results) {
		t.Errorf("%d false alarms on %d healthy hosts, want at most 1 %%", alarms, len(results))
	}
}

// examineAll makes hosts, some at a time.
func examineAll(t *testing.T, choose func(*rand.Rand, kind) *fault) []result {
	count := number("SLUICE_SICK_COUNT", 0)
	if count == 0 {
		t.Skip("takes 2 s for each host: SLUICE_SICK_COUNT is not set")
	}
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("tc"), labtest.Tool("iptables-nft"))
	first := uint64(number("SLUICE_SICK_SEED", 1))
	only := regexp.MustCompile("(?i)" + cmp.Or(os.Getenv("SLUICE_SICK_ONLY"), "."))
	results := make([]result, count)
	t.Run("hosts", func(t *testing.T) {
		places := make(chan bool, number("SLUICE_SICK_PARALLEL", 4))
		for i := range results {
			seed := first + uint64(i)
			r := rand.New(rand.NewPCG(seed, 0x51c4))
			k := kind(r.IntN(int(kinds)))
			f := choose(r, k)
			if f != nil && !only.MatchString(f.name) {
				continue
			}
			t.Run(fmt.Sprint(seed), func(t *testing.T) {
				t.Parallel()
				places <- true
				defer func() { <-places }()
				results[i] = examine(t, seed, r, k, f)
			})
		}
	})
	return slices.DeleteFunc(results, func(r result) bool { return r.seed == 0 })
}

// noEffect is from which share of answered exchanges on a fault is none on this host: offloads can hide an MTU, for
// example. Such hosts do not count.
const noEffect = 0.9

// stoodStill is from how many windows on the machine was stopped meanwhile. Such hosts do not count.
const stoodStill = 12

// examine makes a host, lets it fall ill, asks the doctor, and applies the remedy.
func examine(t *testing.T, seed uint64, r *rand.Rand, k kind, f *fault) result {
	out := result{seed: seed, kind: k, fault: f}
	h := newHost(t, k)
	defer func() { h.stop() }()
	h.begin()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out.noise = h.noise(ctx, r)
	time.Sleep(500 * time.Millisecond)
	if f != nil {
		for i := 0; i < len(f.scripts); i += 2 {
			h.make(ctx, f, f.scripts[i], f.scripts[i+1])
		}
		time.Sleep(300 * time.Millisecond)
		if name := cmp.Or(f.flow, f.name); h.flows[name] != nil && h.answered(name, 500*time.Millisecond) > noEffect {
			t.Logf("no effect: %s, %s", f.name, kindNames[k])
			cancel()
			return result{}
		}
	}
	ns, err := netdev.NamespaceAt(h.lab.Node("g").Path())
	if err != nil {
		t.Fatal(err)
	}
	report, err := doctor.Examine(ctx, observe.NewLive([]netdev.Namespace{ns}), observe.Options{Window: window})
	if err != nil {
		t.Fatal(err)
	}
	if report.Window > stoodStill*window {
		t.Logf("the machine stood still: watched for %.0f s", report.Window.Seconds())
		cancel()
		return result{}
	}
	out.first = report.Conclusion[0]
	if f == nil {
		out.right = report.Worst < doctor.Warn
		cancel()
		return out
	}
	want := f.want
	for name, value := range h.names {
		want = strings.ReplaceAll(want, "$"+name, regexp.QuoteMeta(value))
	}
	// A line that begins with "Nothing is wrong" is no answer, even if it mentions the connections.
	out.right = out.first.Check != "" && regexp.MustCompile("(?i)"+want).MatchString(out.first.Summary)
	h.heal(f, &out)
	state := "right"
	if !out.right {
		state = "WRONG"
		for _, finding := range report.Findings {
			if finding.Verdict >= doctor.Info {
				t.Logf("%s %s: %s", finding.Check, finding.Verdict, finding.Summary)
			}
		}
	}
	t.Logf("%s: %s, %s, %s: %s; remedy tried %v, healed %v (%.0f %% -> %.0f %%) %q", state, f.name, kindNames[k], strings.Join(out.noise, ", "), out.first, out.tried, out.healed, 100*out.before, 100*out.after, out.first.Commands)
	cancel()
	return out
}

// make runs one step of a fault: a script in a node, or an action of this program.
func (h *host) make(ctx context.Context, f *fault, node, step string) {
	address := outside + ":" + step
	switch node {
	case "probe": // clients of a service that is not there
		h.sh("g", input+"udp dport "+step+" accept")
		h.exchange(ctx, f.name, "s", "udp", func(*rand.Rand) string { return address })
	case "serve":
		h.serve("g", step)
	case "hang":
		h.sh("g", input+"udp dport "+step+" accept")
		c, err := h.lab.Node("g").ListenPacket(address)
		if err != nil {
			h.t.Fatal(err)
		}
		h.closers = append(h.closers, c)
		_ = c.(*net.UDPConn).SetReadBuffer(2048)
		h.exchange(ctx, f.name, "s", "udp", func(*rand.Rand) string { return address })
	case "full":
		h.sh("g", input+"tcp dport "+step+" accept")
		if err := h.lab.Node("g").Do(func() error { return neverAccepts(address, h) }); err != nil {
			h.t.Fatal(err)
		}
		h.exchange(ctx, f.name, "s", "tcp", func(*rand.Rand) string { return address })
	case "unread": // a program that accepts connections of clients and does not read
		node, address, _ := strings.Cut(step, " ")
		h.unread(node, address)
		if node == "g" {
			_, port, _ := strings.Cut(address, ":")
			h.sh("g", input+"tcp dport "+port+" accept")
			h.exchange(ctx, f.name, "s", "tcp", func(*rand.Rand) string { return address })
		}
	case "pairs": // two queries from one socket
		h.repeat(ctx, f.name, func(*rand.Rand) func() bool { return func() bool { return h.askTwice(ctx, step) } })
	case "attempt": // connections of another node
		from, to, _ := strings.Cut(step, " ")
		to = strings.ReplaceAll(to, "$C", h.names["C"])
		h.exchange(ctx, f.name, from, "tcp", func(*rand.Rand) string { return to })
	case "claim": // another host of the uplink announces an address
		h.announce(ctx, step)
	case "wildcard": // a program that answers from the address of the route
		h.echo("g", "0.0.0.0:"+step)
	case "ask":
		h.exchange(ctx, f.name, "s", "udp", func(*rand.Rand) string { return step })
	case "large": // answers of two fragments
		h.swell("s", step)
		h.exchange(ctx, f.name, "c", "udp", func(*rand.Rand) string { return step })
	case "vrrp":
		h.vrrp(ctx)
	default:
		h.sh(node, step)
	}
}

// announce has s send announcements of an address with a hardware address that no host has.
func (h *host) announce(ctx context.Context, address string) {
	to := unix.SockaddrLinklayer{Protocol: 0x0608}
	mac := []byte{2, 0, 0, 0, 0, 0x66}
	a := net.ParseIP(address).To4()
	frame := slices.Concat(bytes.Repeat([]byte{0xff}, 6), mac, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, mac, a, make([]byte, 6), a)
	var fd int
	if err := h.lab.Node("s").Do(func() error {
		in, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		to.Ifindex = in.Index
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		h.t.Fatal(err)
	}
	h.closers = append(h.closers, os.NewFile(uintptr(fd), address))
	h.running.Go(func() {
		for ctx.Err() == nil {
			_ = unix.Sendto(fd, frame, 0, &to)
			time.Sleep(500 * time.Millisecond)
		}
	})
}

// neverAccepts listens and never accepts.
func neverAccepts(address string, h *host) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	h.closers = append(h.closers, os.NewFile(uintptr(fd), address))
	a := netip.MustParseAddrPort(address)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}); err != nil {
		return err
	}
	return unix.Listen(fd, 1)
}

// unread accepts connections, and does not read what fills their small buffers.
func (h *host) unread(node, address string) {
	var l net.Listener
	small := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1024) }), err)
	}}
	if err := h.lab.Node(node).Do(func() (err error) { l, err = small.Listen(context.Background(), "tcp4", address); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.closers = append(h.closers, l)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
}

// vrrp has c send advertisements to a group that g has joined, and drops there.
func (h *host) vrrp(ctx context.Context) {
	group := net.ParseIP("224.0.0.18")
	if err := h.lab.Node("g").Do(func() error {
		c, err := net.ListenMulticastUDP("udp4", nil, &net.UDPAddr{IP: group, Port: 9})
		if err != nil {
			return err
		}
		h.closers = append(h.closers, c)
		in, err := net.InterfaceByName(h.names["IN"])
		if err != nil {
			return err
		}
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptIPMreqn(int(fd), unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreqn{Multiaddr: [4]byte(group.To4()), Ifindex: int32(in.Index)})
		})
	}); err != nil {
		h.t.Fatal(err)
	}
	var c net.PacketConn
	if err := h.lab.Node("c").Do(func() (err error) { c, err = net.ListenPacket("ip4:112", h.names["C"]); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.closers = append(h.closers, c)
	h.running.Go(func() {
		for ctx.Err() == nil {
			_ = h.lab.Node("c").Do(func() error { _, err := c.WriteTo(make([]byte, 20), &net.IPAddr{IP: group}); return err })
			time.Sleep(time.Second)
		}
	})
}

// lookOnly matches commands that change nothing.
var lookOnly = regexp.MustCompile(`^(sluice (drops|conns --|profile|explain|show)|ss |ethtool -[gS]|tc -s|ip -s|ip xfrm |ip route (show|get)|ip (-6 )?(rule|neigh|addr)( show.*)?$|ip -6 addr show|nft -a list|nft list|dmesg|sysctl -w net.netfilter.nf_conntrack_log_invalid)`)

// heal runs the commands of the first line, and sees whether the exchange works again.
func (h *host) heal(f *fault, out *result) {
	name := cmp.Or(f.flow, f.name)
	if h.flows[name] == nil {
		return
	}
	for _, command := range out.first.Commands {
		if lookOnly.MatchString(command) {
			continue
		}
		if strings.HasPrefix(command, "sluice ") {
			if _, err := exec.LookPath("sluice"); err != nil {
				continue
			}
		}
		if !out.tried {
			out.before = h.answered(name, 300*time.Millisecond)
		}
		out.tried = true
		if text, err := h.run("g", command); err != nil {
			h.t.Logf("%s: %v: %s", command, err, text)
		}
	}
	if !out.tried {
		return
	}
	time.Sleep(700 * time.Millisecond)
	out.after = h.answered(name, time.Second)
	out.healed = out.after >= 0.9
}

// matrix reports which check was named for which fault.
func matrix(t *testing.T, results []result) {
	type cell struct{ right, all int }
	rows := map[string]map[string]*cell{}
	for _, r := range results {
		row := rows[r.fault.name]
		if row == nil {
			row = map[string]*cell{}
			rows[r.fault.name] = row
		}
		check := cmp.Or(r.first.Check, "nothing")
		if row[check] == nil {
			row[check] = &cell{}
		}
		row[check].all++
		if r.right {
			row[check].right++
		}
	}
	var text strings.Builder
	for _, f := range faults {
		row := rows[f.name]
		if row == nil {
			continue
		}
		fmt.Fprintf(&text, "| %s | %s |", f.group, f.name)
		var right, wrong []string
		for _, check := range slices.Sorted(maps.Keys(row)) {
			c := row[check]
			if c.right > 0 {
				right = append(right, fmt.Sprintf("%s %d", check, c.right))
			}
			if c.all > c.right {
				wrong = append(wrong, fmt.Sprintf("%s %d", check, c.all-c.right))
			}
		}
		fmt.Fprintf(&text, " %s | %s |\n", strings.Join(right, ", "), strings.Join(wrong, ", "))
	}
	t.Logf("confusion matrix, the check of the first line and its number of hosts:\n| kind | fault | named | other answer |\n|---|---|---|---|\n%s", &text)
}
