// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// numbers is a service with flows that depend on their state: round robin, and source ports of the gateway.
const numbers = `
services:
  - name: numbers
    listen: [{address: 192.0.2.10, ports: [9]}]
    protocol: udp
    mode: fullnat
    source-pool: [10.0.2.100-10.0.2.103]
    scheduler: rr
    backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]
`

// TestUpgradeLosesNothing stops the daemon with --keep while numbered datagrams pass, and starts one with other
// timeouts, which are constants of its programs. Each datagram arrives once, at its flow's server, from its
// flow's port.
func TestUpgradeLosesNothing(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		collectors := []*host.Collector{collect(t, l.Node("s1"), "10.0.2.2:9"), collect(t, l.Node("s2"), "10.0.2.3:9")}
		d := start(t, l.Node("gateway"), force+numbers)
		stream := &host.Stream{From: l.Node("client"), Target: netip.MustParseAddrPort("192.0.2.10:9")}
		if err := stream.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		more := func() {
			t.Helper()
			from := stream.Sent()[0]
			labtest.Eventually(t, patience, "twenty more datagrams", func() error {
				if now := stream.Sent()[0]; now < from+20 {
					return fmt.Errorf("%d", now-from)
				}
				return nil
			})
		}
		more()
		for i := range 3 {
			if err := d.Client.Stop(t.Context(), api.Stop{Keep: true}); err != nil {
				t.Fatal(err)
			}
			if err := d.AwaitEnd(); err != nil {
				t.Fatal(err)
			}
			more()
			next := fmt.Sprintf("%s%stimeouts: {udp: %dm}\n", force, numbers, 6+i)
			if err := os.WriteFile(d.File, []byte(next), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := d.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			more()
		}
		if err := stream.Stop(); err != nil {
			t.Fatal(err)
		}
		sent := stream.Sent()
		arrivals := func() (all []host.Arrival) {
			for _, c := range collectors {
				all = append(all, c.Arrivals()...)
			}
			return all
		}
		labtest.Eventually(t, patience, "every datagram", func() error {
			if missing, _ := host.Missing(sent, arrivals()); len(missing) > 0 {
				return fmt.Errorf("missing, by flow: %v", missing)
			}
			return nil
		})
		if _, twice := host.Missing(sent, arrivals()); twice > 0 {
			t.Errorf("%d datagrams arrived twice", twice)
		}
		met := map[uint32]host.Arrival{}
		servers := map[string]bool{}
		for _, a := range arrivals() {
			servers[a.Server] = true
			was, ok := met[a.Flow]
			if ok && (was.Server != a.Server || was.From != a.From) {
				t.Fatalf("flow %d was led to %s from %s, then to %s from %s", a.Flow, was.Server, was.From, a.Server, a.From)
			}
			met[a.Flow] = a
		}
		if len(servers) != 2 {
			t.Errorf("only %v got datagrams", servers)
		}
		t.Logf("%d datagrams on %d flows, three daemons", len(arrivals()), len(met))
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func collect(t *testing.T, n *lab.Node, addr string) *host.Collector {
	t.Helper()
	c, err := host.Collect(n, n.Short(), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop() })
	return c
}

// machine is a process 1 with a mount namespace of its own. For "ip netns exec" it is another host, whether or
// not this host has a bpffs.
type machine struct{ first *exec.Cmd }

func newMachine(t *testing.T, prepare string) *machine {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Tool("unshare"), labtest.Tool("nsenter"), labtest.Tool("ip"))
	ready := filepath.Join(t.TempDir(), "ready")
	cmd := exec.Command("unshare", "--pid", "--mount", "--propagation", "slave", "--fork", "--kill-child", "--mount-proc", "sh", "-c", prepare+"; touch "+ready+"; exec sleep 3600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // ends process 1 and its namespace
		_ = cmd.Wait()
	})
	labtest.Eventually(t, patience, "process 1", func() error { _, err := os.Stat(ready); return err })
	return &machine{cmd}
}

// command runs a program as a shell of that machine would.
func (m *machine) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.first.Process.Pid, m.first.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return exec.Command("nsenter", append([]string{"--target", strings.Fields(string(children))[0], "--pid", "--mount", "--"}, args...)...)
}

// TestKillUnderIPNetnsExec kills a daemon in the private mount namespace of "ip netns exec". The namespace ends
// with the daemon, and programs and flows must remain.
func TestKillUnderIPNetnsExec(t *testing.T) {
	for name, prepare := range map[string]string{
		"bpffs at its place": "mount -t bpf bpf /sys/fs/bpf",
		"no bpffs":           "umount -l /sys/fs/bpf 2>/dev/null",
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, prepare)
			l := labtest.New(t, lab.Balancer())
			dial := serveWebAndLine(t, l)
			gw := l.Node("gateway")
			file := filepath.Join(t.TempDir(), "test.yaml")
			if err := os.WriteFile(file, []byte("datapath: ebpf\n"+webAndLine), 0o644); err != nil {
				t.Fatal(err)
			}
			in := func(args ...string) *exec.Cmd {
				return m.command(t, append([]string{"ip", "netns", "exec", gw.Name()}, args...)...)
			}
			client := api.NewClient(filepath.Join(gw.StateDir(), "sluice.sock"))
			begin := func() (*api.Status, *exec.Cmd) {
				t.Helper()
				var log strings.Builder
				cmd := in(binary, "run", "-c", file)
				cmd.Stderr = &log
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if t.Failed() {
						t.Log(log.String())
					}
				})
				var status *api.Status
				labtest.Eventually(t, patience, "the daemon", func() (err error) { status, err = client.Status(t.Context()); return err })
				if text := strings.Join(status.Warnings, "\n"); strings.Contains(text, "end with this process") {
					t.Error(text)
				}
				return status, cmd
			}
			status, cmd := begin()
			line := dial()
			mustAsk(t, line, "before")
			if out, err := in("kill", "-KILL", strconv.Itoa(status.PID)).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			_ = cmd.Wait() // "killed"
			mustAsk(t, line, "after kill -9")
			mustAnswer(t, webLoad(l, "192.0.2.10:80", 50))
			_, cmd = begin()
			mustAsk(t, line, "after the restart")
			flows, err := client.Flows(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(fmt.Sprint(flows), "10.64.0.7:7000") {
				t.Errorf("the open connection is not among the adopted flows: %v", flows)
			}
			if err := client.Stop(t.Context(), api.Stop{}); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatal(err)
			}
			left, err := in("sh", "-c", "ls -d "+gw.StateDir()+"/bpf /proc/1/root/sys/fs/bpf/sluice 2>/dev/null; grep "+gw.StateDir()+" /proc/1/mounts; true").CombinedOutput()
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %s (%v)", left, err)
			}
		})
	}
}

// TestPinsWithoutTheRight runs a daemon that may not enter process 1's mount namespace. Its pins end with it,
// and it reports that.
func TestPinsWithoutTheRight(t *testing.T) {
	labtest.Require(t, labtest.Tool("setpriv"))
	m := newMachine(t, "umount -l /sys/fs/bpf 2>/dev/null")
	gw := labtest.New(t, lab.Balancer()).Node("gateway")
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte("datapath: ebpf\n"+webAndLine), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := m.command(t, "setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", "ip", "netns", "exec", gw.Name(), binary, "run", "-c", file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	client := api.NewClient(filepath.Join(gw.StateDir(), "sluice.sock"))
	var status *api.Status
	labtest.Eventually(t, patience, "the daemon", func() (err error) { status, err = client.Status(t.Context()); return err })
	if text := strings.Join(status.Warnings, "\n"); !strings.Contains(text, "end with this process") {
		t.Errorf("warnings: %q", text)
	}
	if err := errors.Join(client.Stop(t.Context(), api.Stop{}), cmd.Wait()); err != nil {
		t.Error(err)
	}
}

// TestRefusedRestart starts a daemon after a killed one. Its file has a part that eBPF accepts and a part that
// nftables refuses. Traffic must continue as before.
func TestRefusedRestart(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	dial := serveWebAndLine(t, l)
	d := start(t, l.Node("gateway"), "datapath: ebpf\n"+webAndLine)
	line := dial()
	if err := d.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = d.AwaitEnd() // "killed"
	refused := webAndLine + "  - {name: far, datapath: nftables, listen: [{address: 192.0.2.10, ports: [98]}], protocol: udp, mode: stateless, scheduler: source-hash, backends: [{name: x, address: 203.0.113.99, port: 9}]}\n" +
		"  - {name: near, datapath: nftables, listen: [{address: 192.0.2.10, ports: [99]}], protocol: udp, mode: dnat, backends: [{name: x, address: 203.0.113.99, port: 9}]}\n"
	if _, err := daemon.Start(t.Context(), l.Node("gateway"), binary, "test.yaml", []byte(refused)); err == nil || !strings.Contains(err.Error(), "service far: answers of 203.0.113.99 port 9 also belong") {
		t.Fatalf("two services for the answers of one server: %v", err)
	}
	mustAsk(t, line, "after a refused restart")
	mustAnswer(t, webLoad(l, "192.0.2.10:80", 50))
	start(t, l.Node("gateway"), "datapath: ebpf\n"+webAndLine)
	mustAsk(t, line, "after the next one")
}

// TestStopForce removes the state of a killed daemon, without a daemon.
func TestStopForce(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		d := start(t, l.Node("gateway"), force+webAndLine)
		line := dial()
		if err := d.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = d.AwaitEnd() // "killed"
		mustAsk(t, line, "after kill -9")
		if out, err := d.Command(t.Context(), "stop").CombinedOutput(); err == nil {
			t.Errorf("a stop without a daemon says %s", out)
		}
		mustAsk(t, line, "after a stop without --force")
		if out, err := d.Command(t.Context(), "stop", "--force").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		none := filepath.Join(t.TempDir(), "none")
		again := l.Node("gateway").Command(t.Context(), binary, "stop", "--force", "--state-dir", none)
		if out, err := again.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "nothing to stop:") {
			t.Errorf("a second stop --force: %v, %s", err, out)
		}
		if _, err := os.Stat(none); !os.IsNotExist(err) {
			t.Errorf("a stop with nothing to remove made its state directory: %v", err)
		}
		gone := webLoad(l, "192.0.2.10:80", 3)
		gone.Timeout = 500 * time.Millisecond
		if tally := gone.Run(t.Context()); tally.Good() != 0 {
			t.Errorf("%d of 3 requests were answered", tally.Good())
		}
	})
}
