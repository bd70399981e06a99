// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// probe asks address once in the way of check, with the defaults filled in.
func probe(t *testing.T, address string, check config.Check) error {
	t.Helper()
	return probeOf(t, flow.TCP, address, check)
}

// probeOf asks for a service of a protocol.
func probeOf(t *testing.T, protocol flow.Protocol, address string, check config.Check) error {
	t.Helper()
	ap := netip.MustParseAddrPort(address)
	cfg := &config.Config{Services: []config.Service{{Name: "web", Protocol: protocol,
		Listen:   []config.Listen{{Address: netip.MustParseAddr("192.0.2.10")}},
		Backends: []config.Backend{{Name: "a", Address: ap.Addr(), Port: ap.Port()}}, Check: &check}}}
	cfg.SetDefaults()
	m := New(Options{})
	defer m.Close()
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Services[0].Check.Timeout.D())
	defer cancel()
	one := target(&cfg.Services[0], 0)
	return m.runProber(ctx, &one)
}

// expect compares an error with a part of its text; "" wants none.
func expect(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("got %v, want %q", err, want)
	}
}

// Timeouts of checks: those that nothing answers run into short, the others may take long.
const (
	short = config.Duration(300 * time.Millisecond)
	long  = config.Duration(time.Minute)
)

// patience is how long a check waits that is to end as wanted.
func patience(want string) config.Duration {
	if strings.HasPrefix(want, "no answer within") {
		return short
	}
	return long
}

// serveTCP answers every connection with f of the first read.
func serveTCP(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer conn.Close(); f(conn) }()
		}
	}()
	return l.Addr().String()
}

// nobody is a loopback address without a listener.
func nobody(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestProbeTCP(t *testing.T) {
	echo := serveTCP(t, func(c net.Conn) { io.Copy(c, c) })
	mute := serveTCP(t, func(c net.Conn) { io.ReadAll(c) })
	curt := serveTCP(t, func(c net.Conn) { io.WriteString(c, "PO") })
	for name, c := range map[string]struct {
		address string
		check   config.Check
		want    string
	}{
		"connect":        {echo, config.Check{}, ""},
		"refused":        {nobody(t), config.Check{}, "connection refused"},
		"send, expect":   {echo, config.Check{Send: "PING\r\n", Expect: "PING"}, ""},
		"wrong answer":   {echo, config.Check{Send: "PING\r\n", Expect: "PONG"}, `answered "PING", expected "PONG"`},
		"no answer":      {mute, config.Check{Send: "PING\r\n", Expect: "PONG"}, "no answer within 300ms"},
		"short answer":   {curt, config.Check{Expect: "PONG"}, `closed the connection after "PO"`},
		"mark unallowed": {echo, config.Check{Mark: 7}, map[bool]string{true: "", false: "operation not permitted"}[os.Geteuid() == 0]},
	} {
		t.Run(name, func(t *testing.T) {
			c.check.Type, c.check.Timeout = config.CheckTCP, patience(c.want)
			expect(t, probe(t, c.address, c.check), c.want)
		})
	}
}

func TestProbeHTTP(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/moved":
			http.Redirect(w, r, "/", http.StatusFound)
		case "/broken":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/slow":
			<-r.Context().Done()
		case "/long":
			fmt.Fprint(w, strings.Repeat("x", maxBody), "needle")
		default:
			fmt.Fprintf(w, "%s %s host=%s who=%s query=%s", r.Method, r.URL.Path, r.Host, r.Header.Get("X-Who"), r.URL.RawQuery)
		}
	})
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer secure.Close()
	for name, c := range map[string]struct {
		check config.Check
		want  string
	}{
		"default":             {config.Check{Body: "GET / host=127.0.0.1:"}, ""},
		"path and query":      {config.Check{Path: "/a?b=c", Body: "GET /a host=127.0.0.1:"}, ""},
		"host":                {config.Check{Host: "www.example.com", Body: "host=www.example.com"}, ""},
		"headers and method":  {config.Check{Method: "OPTIONS", Headers: map[string]string{"X-Who": "me"}, Body: "OPTIONS / "}, ""},
		"redirect is good":    {config.Check{Path: "/moved"}, ""},
		"status list":         {config.Check{Path: "/moved", Status: []string{"200", "204-206"}}, "status 302, expected 200, 204-206"},
		"bad status":          {config.Check{Path: "/broken"}, "status 503, expected 200-399"},
		"that status is good": {config.Check{Path: "/broken", Status: []string{"503"}}, ""},
		"body":                {config.Check{Body: "elephant"}, `does not hold "elephant"`},
		"body is bounded":     {config.Check{Path: "/long", Body: "needle"}, `body of 65536 bytes does not hold "needle"`},
		"slow":                {config.Check{Path: "/slow"}, "no answer within 300ms"},
	} {
		t.Run(name, func(t *testing.T) {
			c.check.Type, c.check.Timeout = config.CheckHTTP, patience(c.want)
			expect(t, probe(t, plain.Listener.Addr().String(), c.check), c.want)
		})
	}
	https := config.Check{Type: config.CheckHTTPS, Timeout: long}
	expect(t, probe(t, secure.Listener.Addr().String(), https), "certificate: x509:")
	https.InsecureSkipVerify = true
	expect(t, probe(t, secure.Listener.Addr().String(), https), "")
	expect(t, probe(t, nobody(t), config.Check{Type: config.CheckHTTP, Timeout: long}), "connection refused")
}

func TestProbeUDP(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if n > 0 {
				conn.WriteTo(buf[:n], from)
			}
		}
	}()
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	alive := conn.LocalAddr().String()
	for name, c := range map[string]struct {
		address string
		check   config.Check
		want    string
	}{
		"answer":               {alive, config.Check{Send: "ping", Expect: "pi"}, ""},
		"wrong answer":         {alive, config.Check{Send: "ping", Expect: "pong"}, `answered "ping", expected "pong"`},
		"silence is good":      {alive, config.Check{}, ""},
		"silence is not awful": {alive, config.Check{Expect: "pong"}, "no answer within 300ms"},
		"refused":              {closed.LocalAddr().String(), config.Check{}, "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			c.check.Type, c.check.Timeout = config.CheckUDP, patience(c.want)
			if c.check.Send == "" && c.want == "" {
				c.check.Timeout = short // silence is good at its end
			}
			expect(t, probe(t, c.address, c.check), c.want)
		})
	}
}

// bothProtocols listens on one port that is free for TCP and for UDP.
func bothProtocols(t *testing.T) (net.Listener, net.PacketConn) {
	t.Helper()
	for tries := 20; ; tries-- {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.ListenPacket("udp", listener.Addr().String())
		if err == nil {
			return listener, conn
		}
		listener.Close()
		if tries == 0 {
			t.Fatal(err)
		}
	}
}

func TestProbeDNS(t *testing.T) {
	listener, conn := bothProtocols(t)
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		late := new(dns.Msg).SetReply(q)
		late.Id++ // another client's answer is first
		w.WriteMsg(late)
		answer := new(dns.Msg).SetReply(q)
		if q.Question[0].Name == "broken.example." {
			answer.Rcode = dns.RcodeServerFailure
		}
		w.WriteMsg(answer)
	})
	for _, server := range []*dns.Server{{PacketConn: conn, Handler: handler}, {Listener: listener, Handler: handler}} {
		go server.ActivateAndServe()
		defer server.Shutdown()
	}
	address := conn.LocalAddr().String()
	check := config.Check{Type: config.CheckDNS, Timeout: long}
	expect(t, probeOf(t, flow.UDP, address, check), "")
	expect(t, probeOf(t, flow.TCP, address, check), "")
	check.Query, check.QueryType = "broken.example", "aaaa"
	expect(t, probeOf(t, flow.UDP, address, check), "answered SERVFAIL")
	expect(t, probeOf(t, flow.UDP, nobody(t), check), "connection refused")
}

func TestProbeICMP(t *testing.T) {
	check := config.Check{Type: config.CheckICMP, Timeout: long}
	for _, address := range []string{"127.0.0.1:1", "[::1]:1"} {
		err := probe(t, address, check)
		if err != nil && strings.Contains(err.Error(), "ping_group_range") {
			t.Skip("this user may open neither raw nor ping sockets")
		}
		expect(t, err, "")
	}
}

func TestPingSocket(t *testing.T) {
	for _, a := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
		conn, err := pingSocket(a, 0)
		if os.IsPermission(err) || err != nil && strings.Contains(err.Error(), "permission denied") {
			t.Skip("net.ipv4.ping_group_range does not hold this group")
		}
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(long.D()))
		if err := echo(conn, a.Is4()); err != nil {
			t.Error(a, err)
		}
		conn.Close()
	}
}

func TestProbeExec(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, c := range map[string]struct {
		command []string
		want    string
	}{
		"good":        {[]string{"/bin/true"}, ""},
		"bad":         {[]string{"/bin/false"}, "exit status 1"},
		"missing":     {[]string{filepath.Join(dir, "none")}, "no such file"},
		"environment": {[]string{script("env", `test "$SLUICE_SERVICE $SLUICE_BACKEND $SLUICE_ADDRESS $SLUICE_PORT" = "web a 127.0.0.1 80" -a -z "$HOME"`)}, ""},
		"no shell":    {[]string{"/bin/echo", "$(false)"}, ""},
		"last line":   {[]string{script("words", "echo first; echo the disk is full >&2; exit 3")}, "exit status 3: the disk is full"},
		"output":      {[]string{script("loud", "yes | head -c 1000000; echo; echo end; exit 1")}, "exit status 1: end"},
	} {
		t.Run(name, func(t *testing.T) {
			expect(t, probe(t, "127.0.0.1:80", config.Check{Type: config.CheckExec, Timeout: long, Command: c.command}), c.want)
		})
	}
}

// TestProbeExecTimeout: the processes started by a program end with it.
func TestProbeExecTimeout(t *testing.T) {
	dir := t.TempDir()
	pidFile := filepath.Join(dir, "pid")
	// The name appears when the number is in the file.
	slow := filepath.Join(dir, "slow")
	text := "#!/bin/sh\nsleep 600 & echo $! >" + pidFile + ".new; mv " + pidFile + ".new " + pidFile + "; wait\n"
	if err := os.WriteFile(slow, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	// On a busy machine the timeout may be over before the program gets that far.
	var child int
	for timeout := short; child == 0; timeout *= 4 {
		if timeout > long {
			t.Fatal("the program starts nothing")
		}
		err := probe(t, "127.0.0.1:80", config.Check{Type: config.CheckExec, Timeout: timeout, Command: []string{slow}})
		expect(t, err, fmt.Sprintf("no answer within %s", timeout))
		if data, err := os.ReadFile(pidFile); err == nil {
			child, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		}
	}
	defer syscall.Kill(child, syscall.SIGKILL)
	labtest.Eventually(t, time.Minute, "the end of the program's child", func() error {
		if s := state(child); s != "" && s != "Z" {
			return fmt.Errorf("process %d is in state %s", child, s)
		}
		return nil
	})
}

// state is the letter of a process's state; empty when there is no such process.
func state(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(data), ") ")
	return after[:min(1, len(after))]
}

func TestTail(t *testing.T) {
	var out outputTail
	for range 1000 {
		fmt.Fprint(&out, "0123456789\n")
	}
	fmt.Fprint(&out, "the \x1b[31mend\n\n")
	if len(out.kept) > maxOutput || out.lastLine() != "the  [31mend" {
		t.Errorf("%d bytes, %q", len(out.kept), out.lastLine())
	}
}
