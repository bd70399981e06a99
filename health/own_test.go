// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestAHostWithoutMeans: a lack of files, ports or memory on this host says nothing about the servers, and is
// reported once.
func TestAHostWithoutMeans(t *testing.T) {
	for lack, err := range map[string]error{
		"no file free for this process": &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", unix.EMFILE)},
		"no file free on this host":     &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", unix.ENFILE)},
		"no local port free":            &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", unix.EADDRNOTAVAIL)},
		"no local port, or no process":  &net.OpError{Op: "dial", Net: "udp", Err: os.NewSyscallError("connect", unix.EAGAIN)},
		"packets dropped on this host":  &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("write", unix.EPERM)},
		"no memory free for packets":    &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("write", unix.ENOBUFS)},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServers()
			var told []string
			m := monitor(t, s, Options{OnLack: func(lack string) { told = append(told, lack) }})
			m.Configure(farm(2, tcp(time.Second, 500*time.Millisecond, 2, 3)))
			time.Sleep(5 * time.Second)
			lacks := func() { s.down["b0"], s.down["b1"] = err, err }
			s.set(lacks)
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			st, _ := m.State("web", "b0")
			if !st.Up || st.Failures != 0 || st.Unknown < 200 || !strings.HasPrefix(st.Reason, "unknown: "+lack) || !strings.Contains(st.Reason, "; before: ") {
				t.Errorf("%s: %+v", lack, st)
			}
			if len(told) != 1 || !strings.HasPrefix(told[0], lack) {
				t.Errorf("%s: told %q", lack, told)
			}
			s.set(func() { s.down["b0"], s.down["b1"] = errors.New("connection refused"), nil })
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if st, _ := m.State("web", "b0"); st.Up || !strings.HasSuffix(st.Reason, "in a row failed: connection refused") {
				t.Errorf("%s no more, but no server: %+v", lack, st)
			}
			s.set(lacks)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if len(told) != 2 {
				t.Errorf("%s again: told %q", lack, told)
			}
		})
	}
}

// TestAFullConnectionTable: the kernel does not report a SYN dropped by a full table. During such drops, a probe
// without an answer does not count against the server.
func TestAFullConnectionTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServers()
		begun, full := time.Now(), true
		m := monitor(t, s, Options{TableDrops: func() (uint32, error) {
			if full {
				return uint32(time.Since(begun).Milliseconds() / 100), nil
			}
			return 1 << 20, nil
		}})
		m.Configure(farm(1, tcp(time.Second, 500*time.Millisecond, 2, 3)))
		time.Sleep(5 * time.Second)
		s.set(func() { s.silent["b0"] = true })
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if st, _ := m.State("web", "b0"); !st.Up || st.Unknown == 0 || !strings.HasPrefix(st.Reason, "unknown: the connection table is full") {
			t.Errorf("%+v", st)
		}
		full = false
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if st, _ := m.State("web", "b0"); st.Up || st.Failures < 3 {
			t.Errorf("silent without a full table: %+v", st)
		}
	})
}

// TestNoFileFree: a process at its file limit fails with an error that missingResource knows.
func TestNoFileFree(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var had unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: had.Max}); err != nil {
		t.Fatal(err)
	}
	_, err = dial(t.Context(), "tcp", l.Addr().String(), 0)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	if lack := missingResource(inWords(err, &Target{})); !strings.HasPrefix(lack, "no file free for this process") {
		t.Errorf("%v: %q", err, lack)
	}
}

// TestNoPortFree: a host that has used up its local ports towards a server, or drops its own
// packets, does not take the server for dead, and sees it when it has a port again.
func TestNoPortFree(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	topology := lab.Balancer()
	topology.Name = "health"
	for i := range topology.Nodes {
		if n := &topology.Nodes[i]; n.Name == "gateway" {
			n.Sysctls = map[string]string{"net.ipv4.ip_local_port_range": "40000 40001"}
		}
	}
	l := labtest.New(t, topology)
	gateway := l.Node("gateway")
	inside := func(ctx context.Context, network, address string, mark uint32) (conn net.Conn, err error) {
		err = gateway.Do(func() error { conn, err = dial(ctx, network, address, mark); return err })
		return conn, err
	}
	const server = "10.0.2.2:8080"
	listenIn(t, l.Node("s1"), server)
	var hold []net.Conn
	for range 2 {
		c, err := inside(t.Context(), "tcp", server, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		hold = append(hold, c)
	}
	for _, c := range []struct {
		name   string
		check  config.CheckType
		lack   string
		before func()
		after  func()
	}{
		{"tcp", config.CheckTCP, "no local port free: cannot assign requested address", func() {}, func() {
			for _, c := range hold {
				c.(*net.TCPConn).SetLinger(0) // no TIME_WAIT
				c.Close()
			}
		}},
		{"udp", config.CheckUDP, "packets dropped on this host", func() {
			run(t, gateway, "nft", "table ip t { chain out { type filter hook output priority 0; udp dport 8080 drop; }; }")
		}, func() { run(t, gateway, "nft", "delete table ip t") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.before()
			cfg := &config.Config{Services: []config.Service{{Name: "web", Mode: config.ModeDNAT, Protocol: 6,
				Listen: []config.Listen{{Address: netip.MustParseAddr("192.0.2.10")}},
				Check: &config.Check{Type: c.check, Interval: config.Duration(time.Second), Timeout: config.Duration(900 * time.Millisecond),
					Rise: 1, Fall: 1, Initial: "up"}, // a probe that has no time to lack anything has failed
				Backends: []config.Backend{{Name: "s1", Address: netip.MustParseAddr("10.0.2.2"), Port: 8080}}}}}
			cfg.SetDefaults()
			m := New(Options{TableDrops: func() (uint32, error) { return 0, nil },
				Probers: map[config.CheckType]Prober{config.CheckTCP: tcpProber{inside}, config.CheckUDP: udpProber{inside}}})
			defer m.Close()
			m.Configure(cfg)
			labtest.Eventually(t, time.Minute, "probes that tell nothing", func() error {
				st, _ := m.State("web", "s1")
				if st.Unknown < 3 || !strings.HasPrefix(st.Reason, "unknown: "+c.lack) {
					return fmt.Errorf("%+v", st)
				}
				return nil
			})
			if st, _ := m.State("web", "s1"); !st.Up || st.Known || st.Failures != 0 {
				t.Errorf("%+v", st)
			}
			c.after()
			labtest.Eventually(t, time.Minute, "a probe that tells something", func() error {
				if st, _ := m.State("web", "s1"); !st.Known || strings.HasPrefix(st.Reason, "unknown") {
					return fmt.Errorf("%+v", st)
				}
				return nil
			})
		})
	}
}

// run runs a program in a node's namespace.
func run(t *testing.T, n *lab.Node, program, argument string) {
	t.Helper()
	err := n.Do(func() error {
		out, err := exec.Command(program, argument).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
