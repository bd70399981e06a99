// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func netnsInode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// processesIn returns the processes in the node's network namespace.
func processesIn(t *testing.T, n *lab.Node) (pids []int) {
	t.Helper()
	want := netnsInode(t, n.Path())
	paths, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		var st unix.Stat_t
		if unix.Stat(p, &st) != nil || st.Ino != want {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(p, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

func TestDoRunsInsideAndComesBack(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	n := l.Node("s1")
	inside := netnsInode(t, n.Path())

	runtime.LockOSThread() // to look at the same thread before and after
	defer runtime.UnlockOSThread()
	home := netnsInode(t, "/proc/thread-self/ns/net")
	check := func(t *testing.T) {
		t.Helper()
		if got := netnsInode(t, "/proc/thread-self/ns/net"); got != home {
			t.Fatalf("the thread is in namespace %d after Do, want %d", got, home)
		}
	}
	failure := errors.New("a failure")
	err := n.Do(func() error {
		if got := netnsInode(t, "/proc/thread-self/ns/net"); got != inside {
			t.Errorf("f ran in namespace %d, want %d", got, inside)
		}
		return failure
	})
	if !errors.Is(err, failure) || !strings.Contains(err.Error(), "node s1") {
		t.Errorf("got %v, want the failure with the node's name", err)
	}
	check(t)

	// Nested, as when a callback uses another node.
	err = n.Do(func() error {
		if err := l.Node("s2").Do(func() error { return nil }); err != nil {
			return err
		}
		if got := netnsInode(t, "/proc/thread-self/ns/net"); got != inside {
			t.Errorf("after an inner Do the thread is in namespace %d, want %d", got, inside)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	check(t)

	func() {
		defer func() {
			if recover() == nil {
				t.Error("a panic in f was swallowed")
			}
		}()
		_ = n.Do(func() error { panic("in f") })
	}()
	check(t)
}

func TestSocketsStayInTheirNamespace(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	server, err := l.Node("s2").Listen("10.0.2.3:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, c.RemoteAddr().String())
			c.Close()
		}
	}()
	d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("10.64.9.9"), Port: 4321}}
	c, err := l.Node("client").Dial(t.Context(), d, "tcp", "10.0.2.3:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	seen, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	if string(seen) != "10.64.9.9:4321" {
		t.Errorf("the server saw %s, want 10.64.9.9:4321", seen)
	}
	if _, err := l.Node("client").Dial(t.Context(), nil, "tcp", "localhost:80"); err == nil {
		t.Error("a name was accepted: it would be resolved in another namespace")
	}
}

func TestCommandRunsInside(t *testing.T) {
	labtest.Require(t, labtest.Tool("sh"))
	l := labtest.New(t, lab.Balancer())
	n := l.Node("gateway")
	out, err := n.Command(t.Context(), "sh", "-c", "stat -L -c %i /proc/self/ns/net; cd /sys/class/net; ls -d ?an0").CombinedOutput() // the tunnels of loaded modules are everywhere
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := strconv.FormatUint(netnsInode(t, n.Path()), 10) + "\nlan0\nwan0\n"
	if string(out) != want {
		t.Errorf("got %q, want namespace and interfaces of the gateway %q", out, want)
	}

	cmd := n.Command(t.Context(), "no-such-program")
	if err := cmd.Run(); err == nil || !strings.Contains(err.Error(), "no-such-program") {
		t.Errorf("a missing program: got %v", err)
	}
}

func TestCommandKeepsPinsPerGateway(t *testing.T) {
	labtest.Require(t, labtest.BPF, labtest.Tool("sh"))
	l := labtest.New(t, lab.TwoGateways())
	run := func(node, script string) (string, error) {
		out, err := l.Node(node).Command(t.Context(), "sh", "-c", script).CombinedOutput()
		return string(out), err
	}
	if out, err := run("gw1", "stat -f -c %t /sys/fs/bpf && mkdir /sys/fs/bpf/sluice"); err != nil || out != "cafe4a11\n" {
		t.Fatalf("gw1: %v, %q: want a bpffs at /sys/fs/bpf", err, out)
	}
	if out, err := run("gw1", "test -d /sys/fs/bpf/sluice"); err != nil {
		t.Errorf("gw1: the pin did not survive its process: %v %s", err, out)
	}
	if _, err := run("gw2", "test -d /sys/fs/bpf/sluice"); err == nil {
		t.Error("gw2 sees the pins of gw1")
	}
	if _, err := os.Stat("/sys/fs/bpf/sluice/gw1"); err == nil {
		t.Error("the host sees the pins of gw1")
	}
}

func TestOffloads(t *testing.T) {
	labtest.Require(t, labtest.Tool("ethtool"))
	end := func(node, addr string) lab.End {
		return lab.End{Node: node, Iface: "eth0", Addresses: []string{addr}}
	}
	a, b := end("a", "192.0.2.1/24"), end("b", "192.0.2.2/24")
	a.NoTxChecksum, a.GRO, a.MAC = true, true, "02:00:00:00:00:0a"
	l := labtest.New(t, lab.Topology{
		Name:  "offloads",
		Nodes: []lab.NodeSpec{{Name: "a"}, {Name: "b"}},
		Links: []lab.LinkSpec{{A: a, B: b, MTU: 1400}},
	})
	features := func(node string) string {
		out, err := l.Node(node).Command(t.Context(), "ethtool", "-k", "eth0").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return string(out)
	}
	for node, want := range map[string][]string{
		"a": {"tx-checksumming: off", "generic-receive-offload: on"},
		"b": {"tx-checksumming: on", "generic-receive-offload: off"},
	} {
		got := features(node)
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("node %s: no %q in\n%s", node, w, got)
			}
		}
	}
	iface, err := l.Node("a").Interface("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if iface.HardwareAddr.String() != a.MAC || iface.MTU != 1400 {
		t.Errorf("interface a/eth0: %s MTU %d, want %s MTU 1400", iface.HardwareAddr, iface.MTU, a.MAC)
	}
}

func TestDownEndsProcesses(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("sh"))
	l := up(t, lab.IPv6Only())
	stubborn := l.Node("client").Command(t.Context(), "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 60; done")
	out, err := stubborn.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := stubborn.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if err := stubborn.Wait(); err == nil {
		t.Error("a process that ignores SIGTERM ended by itself")
	}
}
