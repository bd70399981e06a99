// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// zone answers with records or an error. Over UDP it truncates answers if configured.
type zone struct {
	mu      sync.Mutex
	records []string
	code    int
	cut     bool
	asked   map[string]int // by network
}

func (z *zone) set(code int, records ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.code, z.records = code, records
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	network := w.LocalAddr().Network()
	z.asked[network]++
	m := new(dns.Msg).SetRcode(q, z.code)
	for _, text := range z.records {
		rr, err := dns.NewRR(text)
		if err != nil {
			panic(err)
		}
		if h := rr.Header(); h.Name == q.Question[0].Name && h.Rrtype == q.Question[0].Qtype {
			m.Answer = append(m.Answer, rr)
		}
	}
	if z.cut && network == "udp" {
		m.Answer, m.Truncated = nil, true
	}
	_ = w.WriteMsg(m)
}

// serve serves a zone and returns its address.
func serve(t *testing.T) (*zone, string) {
	t.Helper()
	z := &zone{asked: map[string]int{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := net.ListenPacket("udp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*dns.Server{{Listener: l, Handler: z}, {PacketConn: p, Handler: z}} {
		go func() { _ = s.ActivateAndServe() }()
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return z, l.Addr().String()
}

func TestDNS(t *testing.T) {
	t.Parallel()
	z, server := serve(t)
	z.set(dns.RcodeSuccess, "app.test. 1 A 10.0.0.2", "app.test. 1 A 10.0.0.1", "app.test. 1 AAAA 2001:db8::1")
	f, s := following(t, "", `{dns: app.test, servers: ["127.0.0.1:1", "`+server+`"], port: 8080, hold: 1s}`)
	s.eventually(t, "10.0.0.1:8080", "10.0.0.2:8080") // the first server does not answer; IPv6 is of no use
	z.set(dns.RcodeServerFailure)
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, "it answers SERVFAIL: the last result remains in force"))
	if err := s.has("10.0.0.1:8080", "10.0.0.2:8080"); err != nil {
		t.Error(err)
	}
	z.set(dns.RcodeSuccess, "app.test. 1 A 10.0.0.3", "app.test. 1 A 10.0.0.1")
	s.eventually(t, "10.0.0.1:8080", "10.0.0.3:8080")
	z.set(dns.RcodeNameError)
	labtest.Eventually(t, 10*time.Second, "a warning", warned(f, "1 of 1 backends are not found any more"))
	z.mu.Lock()
	z.cut = true
	z.mu.Unlock()
	z.set(dns.RcodeSuccess, "app.test. 1 A 10.0.0.9")
	s.eventually(t, "10.0.0.9:8080")
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.asked["tcp"] == 0 {
		t.Error("an answer that was cut off was not asked for over TCP")
	}
}

func TestSRV(t *testing.T) {
	t.Parallel()
	z, server := serve(t)
	z.set(dns.RcodeSuccess, "_http._tcp.app.test. 1 SRV 20 0 81 spare.test.", "_http._tcp.app.test. 1 SRV 10 512 80 one.test.", "_http._tcp.app.test. 1 SRV 10 128 8080 two.test.",
		"one.test. 60 A 10.0.0.1", "two.test. 60 A 10.0.0.2", "two.test. 60 A 10.0.0.3", "spare.test. 60 A 10.0.0.4")
	_, s := following(t, "", `{dns: _http._tcp.app.test, servers: ["`+server+`"]}`)
	s.eventually(t, "one.test=10.0.0.1:80*256/1", "spare.test=10.0.0.4:81*1/2", "two.test=10.0.0.2:8080*64/1", "two.test-2=10.0.0.3:8080*64/1")
}

func TestTimeToLive(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		answer, authority string
		want              time.Duration
	}{
		{"a.test. 30 A 10.0.0.1", "", 30 * time.Second},
		{"a.test. 0 A 10.0.0.1", "", time.Second},
		{"a.test. 86400 A 10.0.0.1", "", 5 * time.Minute},
		{"", "test. 60 SOA ns.test. mail.test. 1 2 3 4 20", 20 * time.Second},
		{"", "", 5 * time.Second},
	} {
		m := new(dns.Msg)
		for text, list := range map[string]*[]dns.RR{c.answer: &m.Answer, c.authority: &m.Ns} {
			if text == "" {
				continue
			}
			rr, err := dns.NewRR(text)
			if err != nil {
				t.Fatal(err)
			}
			*list = append(*list, rr)
		}
		if got := timeToLive(m); got != c.want {
			t.Errorf("%q %q: %v, want %v", c.answer, c.authority, got, c.want)
		}
	}
}

// TestDnsmasq follows a name of a real server as it changes.
func TestDnsmasq(t *testing.T) {
	t.Parallel()
	labtest.Require(t, labtest.Tool("dnsmasq"))
	dir := t.TempDir()
	hosts := filepath.Join(dir, "hosts")
	write := func(addresses ...string) {
		t.Helper()
		text := ""
		for _, a := range addresses {
			text += a + " app.test\n"
		}
		if err := os.WriteFile(hosts, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("10.0.0.1", "10.0.0.2")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	start := func() *exec.Cmd {
		t.Helper()
		cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", fmt.Sprintf("--port=%d", port), "--listen-address=127.0.0.1", "--bind-interfaces", "--no-resolv",
			"--no-hosts", "--addn-hosts="+hosts, "--local-ttl=1", "--user=root", "--group=", "--pid-file="+filepath.Join(dir, "pid"), "--srv-host=_http._tcp.app.test,app.test,8080,0,5")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	first := start()
	server := fmt.Sprintf("127.0.0.1:%d", port)
	f, s := following(t, "", `{dns: app.test, servers: ["`+server+`"], hold: 1s}`)
	s.eventually(t, "10.0.0.1", "10.0.0.2")
	write("10.0.0.2", "10.0.0.3")
	if err := first.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	s.eventually(t, "10.0.0.2", "10.0.0.3")
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, 20*time.Second, "a warning", warned(f, "the last result remains in force"))
	if err := s.has("10.0.0.2", "10.0.0.3"); err != nil {
		t.Error(err)
	}
	write("10.0.0.4")
	start()
	s.eventually(t, "10.0.0.4")
	list, _, err := newDNS(sourceSpecOf(&services(t, `{dns: _http._tcp.app.test, servers: ["`+server+`"]}`).Services[0])).find(context.Background())
	if err != nil || len(list) != 1 || list[0].Port != 8080 || list[0].Address.String() != "10.0.0.4" {
		t.Errorf("SRV: %+v, %v", list, err)
	}
}
