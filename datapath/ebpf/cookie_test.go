// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// cookieServices cover the modes and families with SYN cookies: NAME, the address and the backends' address.
// Each has port 80 (echo), 25 (the server sends first) and 81 (no listener).
var cookieServices = []struct{ name, mode, listen, backend string }{
	{"dnat4", "mode: dnat, scheduler: maglev", "192.0.2.10", "10.0.2.2"},
	{"dnat6", "mode: dnat, scheduler: rr", "2001:db8::10", "fd00:2::2"},
	{"full44", "mode: fullnat, source-pool: [10.0.2.100]", "192.0.2.44", "10.0.2.2"},
	{"full66", "mode: fullnat, source-pool: ['fd00:2::100']", "2001:db8::66", "fd00:2::2"},
	{"full46", "mode: fullnat, source-pool: ['fd00:2::100']", "192.0.2.46", "fd00:2::2"},
	{"full64", "mode: fullnat, source-pool: [10.0.2.100]", "2001:db8::64", "10.0.2.2"},
}

// cookieYAML has a quota of one handshake. A connection to 192.0.2.9 uses it up, because its backend does not
// exist.
func cookieYAML(transitory string) string {
	var b strings.Builder
	b.WriteString("services:\n  - {name: hole, listen: [{address: 192.0.2.9, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.77}]}\n")
	for _, s := range cookieServices {
		fmt.Fprintf(&b, "  - {name: %s, listen: [{address: '%s', ports: [25, 80, 81]}], protocol: tcp, %s, syn-cookies: true, backends: [{name: a, address: '%s'}]}\n",
			s.name, s.listen, s.mode, s.backend)
	}
	fmt.Fprintf(&b, "timeouts: {tcp-transitory: %s, force: true}\ntables: {flows: 4096, flows6: 4096, half-open: 1}\n", transitory)
	return b.String()
}

// TestSYNCookies connects clients with a real kernel to servers with a real kernel while the quota of handshakes
// is used up.
func TestSYNCookies(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			client, server := l.Node("client"), l.Node("s1")
			mirror(t, server, ":80")
			banner(t, server, ":25")
			d := gateway(t, l.Node("gateway"), hook, cookieYAML("4m"))
			client.Do(func() error { _, err := net.DialTimeout("tcp", "192.0.2.9:80", time.Second); return err })
			if d.t.Control.Values[0].HalfOpen != 1 {
				t.Fatalf("%d handshakes in progress, want 1: %s", d.t.Control.Values[0].HalfOpen, describeReasons(d))
			}
			for _, s := range cookieServices {
				t.Run(s.name, func(t *testing.T) {
					cookies := counted(t, d, "cookie")
					checkEcho(t, client, net.JoinHostPort(s.listen, "80"), d)
					greets(t, client, net.JoinHostPort(s.listen, "25"), d)
					refuses(t, client, net.JoinHostPort(s.listen, "81"), d)
					if n := counted(t, d, "cookie") - cookies; n < 3 {
						t.Errorf("%d SYNs were answered by cookies, want 3: %s", n, describeReasons(d))
					}
				})
			}
			lostSYN(t, l, d)
			kept := transfer(t, client, "192.0.2.46:80")
			if n := d.t.Control.Values[0].HalfOpen; n != 1 {
				t.Errorf("%d handshakes in progress after all, want the one: proofs of cookies are not to count", n)
			}
			apply(t, d, hook, cookieYAML("1s"))
			labtest.Eventually(t, 2*patience, "the end of the handshake", func() error {
				if n := d.t.Control.Values[0].HalfOpen; n != 0 {
					return fmt.Errorf("%d handshakes in progress", n)
				}
				return nil
			})
			c := transfer(t, client, "192.0.2.44:80")
			if optionsOf(t, c) == 0 {
				t.Error("a connection after the flood has no options")
			}
			if err := roundTrip(c); err != nil {
				t.Error(err)
			}
			apply(t, d, hook, strings.ReplaceAll(cookieYAML("4m"), "syn-cookies: true, ", ""))
			if err := roundTrip(kept); err != nil {
				t.Errorf("a connection that a cookie opened, after its service has none any more: %v", err)
			}
		})
	}
}

// checkEcho sends a megabyte from n to the echo server at addr and back at the same time. The client begins.
func checkEcho(t *testing.T, n *lab.Node, addr string, d *Datapath) {
	t.Helper()
	c := transfer(t, n, addr)
	if o := optionsOf(t, c); o != 0 {
		t.Errorf("%s: options %#x were agreed on, as no cookie can", addr, o)
	}
	c.SetDeadline(time.Now().Add(2 * patience))
	sent := make([]byte, 1<<20)
	rand.Read(sent)
	done := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		done <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err := errors.Join(err, <-done); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%s: sent %d bytes, got %d back: %v\n%s", addr, len(sent), len(got), err, describeReasons(d))
	}
}

const bannerText = "220 mail.example.org ready\r\n"

// banner is a server that sends first, then echoes.
func banner(t *testing.T, n *lab.Node, addr string) {
	t.Helper()
	listen(t, n, addr, func(c net.Conn) {
		io.WriteString(c, bannerText)
		io.Copy(c, c)
	})
}

// greets expects the banner, byte for byte, before the client sends anything.
func greets(t *testing.T, n *lab.Node, addr string, d *Datapath) {
	t.Helper()
	c := transfer(t, n, addr)
	c.SetDeadline(time.Now().Add(patience))
	b := make([]byte, len(bannerText))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != bannerText {
		t.Errorf("%s: the server that speaks first: %q, %v\n%s", addr, b, err, describeReasons(d))
		return
	}
	if err := roundTrip(c); err != nil {
		t.Errorf("%s: after the banner: %v", addr, err)
	}
}

// refuses expects the reset of a backend without a listener.
func refuses(t *testing.T, n *lab.Node, addr string, d *Datapath) {
	t.Helper()
	var c net.Conn
	err := n.Do(func() (err error) { c, err = net.DialTimeout("tcp", addr, patience); return err })
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: nobody listens, and the client hears %v, want a reset\n%s", addr, err, describeReasons(d))
	}
}

// lostSYN drops the first SYNs of the backend's connection: the client's window probes must trigger a
// retransmission.
func lostSYN(t *testing.T, l *lab.Lab, d *Datapath) {
	t.Helper()
	nft := func(rules string) {
		cmd := exec.Command("nft", rules)
		if err := l.Node("s1").Do(cmd.Run); err != nil {
			t.Errorf("nft %s: %v", rules, err)
		}
	}
	nft("table ip lost { chain in { type filter hook input priority 0; tcp dport 80 tcp flags syn drop; }; }")
	c := transfer(t, l.Node("client"), "192.0.2.44:80")
	time.AfterFunc(300*time.Millisecond, func() { nft("delete table ip lost") })
	if err := patientTrip(c); err != nil {
		t.Errorf("after a lost SYN: %v\n%s", err, describeReasons(d))
	}
}

// optionsOf returns the negotiated options, TCPI_OPT_* of Linux: timestamps 1, selective acknowledgements 2,
// window scaling 4.
func optionsOf(t *testing.T, c net.Conn) uint8 {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err != nil {
		t.Fatal(err)
	}
	return info.Options
}
