// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
)

const (
	secret = "correct-horse-battery-staple"
	second = "another-token-that-is-long-enough"
)

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })

// TestTCPNeedsProofs: settings that would serve clients without authentication, or send the token in clear text,
// are refused.
func TestTCPNeedsProofs(t *testing.T) {
	both := Files{Cert: "c", Key: "k"}
	with := func(f Files, ca, tokens string) Files {
		f.ClientCA, f.Tokens = ca, tokens
		return f
	}
	for _, c := range []struct {
		address string
		files   Files
		says    string
	}{
		{"127.0.0.1:9443", Files{}, "--listen 127.0.0.1:9443: whoever reaches it would be served: name --token-file FILE, or --client-ca FILE"},
		{"192.0.2.1:9443", both, "whoever reaches it would be served"},
		{"127.0.0.1:9443", Files{ClientCA: "ca"}, "--client-ca ca: certificates are a part of TLS: name --tls-cert"},
		{"127.0.0.1:9443", with(Files{Cert: "c"}, "", "t"), "belong together"},
		{"127.0.0.1:9443", with(Files{Key: "k"}, "ca", "t"), "belong together"},
		{"192.0.2.1:9443", Files{Tokens: "t"}, "--listen 192.0.2.1:9443: the token would be sent in clear"},
		{"[::]:9443", Files{Tokens: "t"}, "in clear"},
		{"0.0.0.0:9443", Files{Tokens: "t"}, "in clear"},
		{":9443", Files{Tokens: "t"}, "in clear"},
		{"localhost:9443", Files{Tokens: "t"}, "write ADDRESS:PORT"},
		{"127.0.0.1", Files{Tokens: "t"}, "write ADDRESS:PORT"},
		{"127.0.0.1:http", Files{Tokens: "t"}, "write ADDRESS:PORT"},
		{"127.0.0.1:9443", Files{Tokens: "t"}, ""},
		{"127.9.9.9:9443", Files{Tokens: "t"}, ""},
		{"[::1]:9443", Files{Tokens: "t"}, ""},
		{":9443", with(both, "", "t"), ""},
		{"192.0.2.1:9443", with(both, "ca", ""), ""},
		{"[2001:db8::1]:9443", with(both, "ca", "t"), ""},
	} {
		err := TCPOptions{Address: c.address, Files: c.files}.Check()
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s %+v: %v, want %q", c.address, c.files, err, c.says)
		}
	}
	if _, err := ListenTCP(t.Context(), TCPOptions{Address: "127.0.0.1:0"}); err == nil {
		t.Error("it listens unchecked")
	}
}

// TestTCPRefusesFiles: the daemon refuses to start with a faulty file, and names the fault.
func TestTCPRefusesFiles(t *testing.T) {
	for _, c := range []struct {
		name  string
		wrong func(d *tcpDaemon)
		says  string
	}{
		{"others read the token", func(d *tcpDaemon) { d.write("tokens", []byte(secret), 0o604) }, "tokens: its mode 0604 lets others than its owner use it: chmod 0600 "},
		{"a group reads the token", func(d *tcpDaemon) { d.write("tokens", []byte(secret), 0o640) }, "tokens: its mode 0640"},
		{"short", func(d *tcpDaemon) { d.write("tokens", []byte(secret+"\nfifteen-letters"), 0o600) }, "tokens: token 2 has 15 bytes, at least 16"},
		{"empty", func(d *tcpDaemon) { d.write("tokens", []byte(" \n"), 0o600) }, "tokens: it is empty: write a token"},
		{"no header carries it", func(d *tcpDaemon) { d.write("tokens", []byte("grüße-aus-der-ferne"), 0o600) }, "no header carries"},
		{"huge", func(d *tcpDaemon) { d.write("tokens", bytes.Repeat([]byte("x"), 1<<20+1), 0o600) }, "larger than"},
		{"no token", func(d *tcpDaemon) { os.Remove(d.at("tokens")) }, "tokens: no such file"},
		{"a pipe", func(d *tcpDaemon) { os.Remove(d.at("tokens")); _ = syscall.Mkfifo(d.at("tokens"), 0o600) }, "no regular file"},
		{"others read the key", func(d *tcpDaemon) { os.Chmod(d.at("key"), 0o644) }, "key " /* the object */},
		{"no certificate", func(d *tcpDaemon) { os.Remove(d.at("cert")) }, "certificate "},
		{"another key", func(d *tcpDaemon) {
			_, key := d.servers.issue(3, time.Hour)
			d.write("key", key, 0o640)
		}, "private key does not match public key"},
		{"no CA in PEM", func(d *tcpDaemon) { d.write("ca", d.clients.cert.Raw, 0o644) }, "ca: it holds no certificate in PEM"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newTCPDaemon(t)
			c.wrong(d)
			tcp, err := ListenTCP(t.Context(), TCPOptions{Address: "127.0.0.1:0", Files: d.files("tls ca tokens"), Log: slog.New(slog.DiscardHandler)})
			if err == nil {
				tcp.Close()
				t.Fatal("taken")
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

// TestTCPServesWhoProves tries every way of authentication, valid and invalid.
func TestTCPServesWhoProves(t *testing.T) {
	bearer := func(token string) []string { return []string{"Authorization", "Bearer " + token} }
	none := func(*tls.Config) {}
	old := func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }
	mine := func(d *tcpDaemon) func(*tls.Config) { return shows(d.clients.pair(x509.ExtKeyUsageClientAuth)) }
	strange := func(d *tcpDaemon) func(*tls.Config) {
		return shows(newSigner(d.t, "clients").pair(x509.ExtKeyUsageClientAuth))
	}
	server := func(d *tcpDaemon) func(*tls.Config) { return shows(d.clients.pair(x509.ExtKeyUsageServerAuth)) }
	late := func(d *tcpDaemon) func(*tls.Config) {
		pair, err := tls.X509KeyPair(d.clients.issue(9, -time.Minute, x509.ExtKeyUsageClientAuth))
		if err != nil {
			d.t.Fatal(err)
		}
		return shows(pair)
	}
	plain := func(f func(*tls.Config)) func(*tcpDaemon) func(*tls.Config) {
		return func(*tcpDaemon) func(*tls.Config) { return f }
	}
	for _, c := range []struct {
		name, files string
		tls         func(*tcpDaemon) func(*tls.Config)
		header      []string
		code        int // 0: no TLS connection is established
		says        string
	}{
		{"token", "tls tokens", plain(none), bearer(secret), 200, ""},
		{"second token", "tls tokens", plain(none), bearer(second), 200, ""},
		{"token without TLS", "tokens", plain(none), bearer(secret), 200, ""},
		{"scheme in small letters", "tls tokens", plain(none), []string{"Authorization", "bearer " + secret}, 200, ""},
		{"nothing", "tls tokens", plain(none), nil, 401, "no token was sent"},
		{"basic", "tls tokens", plain(none), []string{"Authorization", "Basic " + secret}, 401, "no token was sent"},
		{"wrong token", "tls tokens", plain(none), bearer(secret[1:]), 401, "the token is not known"},
		{"both tokens as one", "tls tokens", plain(none), bearer(secret + " " + second), 401, "not known"},
		{"empty token", "tokens", plain(none), bearer(""), 401, ""},
		{"certificate", "tls ca", mine, nil, 200, ""},
		{"no certificate", "tls ca", plain(none), nil, 0, ""},
		{"certificate of another CA of that name", "tls ca", strange, nil, 0, ""},
		{"certificate of a server", "tls ca", server, nil, 0, ""},
		{"expired certificate", "tls ca", late, nil, 0, ""},
		{"a token in place of a certificate", "tls ca", plain(none), bearer(secret), 0, ""},
		{"both", "tls ca tokens", mine, bearer(second), 200, ""},
		{"certificate alone of both", "tls ca tokens", mine, nil, 401, "no token was sent"},
		{"token alone of both", "tls ca tokens", plain(none), bearer(secret), 0, ""},
		{"TLS 1.2", "tls tokens", plain(old), bearer(secret), 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newTCPDaemon(t)
			d.open(c.files, false, hello)
			resp, text, err := d.ask(d.client(c.tls(d)), "GET", "/metrics", c.header...)
			if c.code == 0 {
				if err == nil {
					t.Fatalf("answered %d %s", resp.StatusCode, text)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var p api.Problem
			switch _ = json.Unmarshal([]byte(text), &p); {
			case resp.StatusCode != c.code, c.code == 200 && text != "hello", c.code != 200 && (p.Status != c.code || !strings.Contains(p.Detail, c.says)):
				t.Errorf("%d %s", resp.StatusCode, text)
			case c.code == 401 && (resp.Header.Get("WWW-Authenticate") == "" || !resp.Close):
				t.Errorf("refused with %v", resp.Header)
			case c.code == 401 && (!strings.Contains(d.log.take(), "a client was refused") || d.tcp.Refused() != 1):
				t.Errorf("the log says nothing, or %d were refused", d.tcp.Refused())
			}
		})
	}
}

// TestTCPReadsOnly sends every request of the API to a read-only listener. Only GET requests and the plan reach
// a handler.
func TestTCPReadsOnly(t *testing.T) {
	requests := map[string]bool{"PATCH /api/v1/plan": false, "OPTIONS /metrics": false, "POST /api/v1/plan/x": false} // requests that change nothing
	for path, item := range build(http.NewServeMux(), Options{}).OpenAPI().Paths {
		for method, there := range map[string]bool{"GET": item.Get != nil, "PUT": item.Put != nil, "POST": item.Post != nil, "DELETE": item.Delete != nil, "PATCH": item.Patch != nil} {
			if there {
				requests[method+" "+path] = method == "GET" || path == "/api/v1/plan"
			}
		}
	}
	if len(requests) < 15 {
		t.Fatalf("%d requests", len(requests))
	}
	for _, changes := range []bool{false, true} {
		d := newTCPDaemon(t)
		d.open("tokens", changes, hello)
		c := d.client()
		for request, reads := range requests {
			method, path, _ := strings.Cut(request, " ")
			resp, text, err := d.ask(c, method, path, "Authorization", "Bearer "+secret)
			if err != nil {
				t.Fatal(err)
			}
			if served := text == "hello"; served != (reads || changes) {
				t.Errorf("changes %t: %s: %d %s", changes, request, resp.StatusCode, text)
			}
			if resp.StatusCode != 200 && (resp.StatusCode != 403 || !strings.Contains(text, "--listen-changes")) {
				t.Errorf("%s: %d %s", request, resp.StatusCode, text)
			}
		}
		if said := strings.Contains(d.log.take(), `"a client asks for a change"`); said != changes {
			t.Errorf("changes %t: the log tells of one: %t", changes, said)
		}
		if resp, text, err := d.ask(c, "POST", "/api/v1/plan", "Authorization", "Bearer "+secret, "Sec-Fetch-Site", "cross-site", "Origin", "https://evil.example"); err != nil || resp.StatusCode != 403 || !strings.Contains(text, "evil.example") {
			t.Errorf("a page of another site: %v %s", err, text)
		}
	}
}

// TestTCPFollowsFiles renews all files under an open connection.
func TestTCPFollowsFiles(t *testing.T) {
	d := newTCPDaemon(t)
	d.open("tls ca tokens", false, hello)
	mine := shows(d.clients.pair(x509.ExtKeyUsageClientAuth))
	kept := d.client(mine)
	// serial is the serial number of the connection's certificate; fresh opens a new connection.
	get := func(c *http.Client, token string) (code int, serial int64) {
		t.Helper()
		resp, _, err := d.ask(c, "GET", "/", "Authorization", "Bearer "+token)
		if err != nil {
			return 0, 0
		}
		return resp.StatusCode, resp.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	want := func(when string, c *http.Client, token string, code int, serial int64) {
		t.Helper()
		if gotCode, gotSerial := get(c, token); gotCode != code || gotSerial != serial {
			t.Errorf("%s: %d by certificate %d, want %d by %d", when, gotCode, gotSerial, code, serial)
		}
	}
	want("before", kept, secret, 200, 2)
	if left := time.Until(d.tcp.Expires()); left <= 0 || left > time.Hour {
		t.Errorf("the certificate expires in %v", left)
	}

	const renewed = "the-token-of-the-next-year"
	d.write("tokens", []byte(renewed), 0o600)
	want("new token", kept, renewed, 200, 2)
	want("old token", d.client(mine), secret, 401, 2)
	if said := d.log.take(); strings.Count(said, "were read again") != 1 {
		t.Errorf("the log: %s", said)
	}

	cert, key := d.servers.issue(3, time.Hour, x509.ExtKeyUsageServerAuth)
	d.write("cert", cert, 0o644) // its key does not exist yet
	want("half a renewal", d.client(mine), renewed, 200, 2)
	want("half a renewal, again", d.client(mine), renewed, 200, 2)
	if said := d.log.take(); strings.Count(said, "those in force stay") != 1 || !strings.Contains(said, d.at("cert")) {
		t.Errorf("the log: %s", said)
	}
	d.tcp.Reread()
	if said := d.log.take(); strings.Count(said, "those in force stay") != 1 {
		t.Errorf("the log after Reread: %s", said)
	}
	d.write("key", key, 0o600)
	want("the other half", d.client(mine), renewed, 200, 3)

	for name, spoil := range map[string]func(){
		"others read the tokens": func() { d.write("tokens", []byte(secret), 0o644) },
		"no tokens":              func() { os.Remove(d.at("tokens")) },
		"empty tokens":           func() { d.write("tokens", nil, 0o600) },
	} {
		spoil()
		d.log.take()
		want(name, kept, renewed, 200, 2)
		if said := d.log.take(); !strings.Contains(said, "those in force stay") {
			t.Errorf("%s: the log: %s", name, said)
		}
	}
	d.write("tokens", []byte(renewed), 0o600)

	next := newSigner(t, "clients")
	d.write("ca", next.pem, 0o644)
	want("an open connection of a certificate that counts no more", kept, renewed, 401, 2)
	want("a new connection with it", d.client(mine), renewed, 0, 0)
	want("one of the new CA", d.client(shows(next.pair(x509.ExtKeyUsageClientAuth))), renewed, 200, 3)

	cert, key = d.servers.issue(4, -time.Minute, x509.ExtKeyUsageServerAuth)
	d.write("key", key, 0o600)
	d.write("cert", cert, 0o644)
	d.log.take()
	d.tcp.Reread()
	if said := d.log.take(); !strings.Contains(said, "has expired") {
		t.Errorf("the log of an expired certificate: %s", said)
	}
}

// TestTCPBounds checks the limits for unauthenticated clients.
func TestTCPBounds(t *testing.T) {
	t.Run("header", func(t *testing.T) {
		d := newTCPDaemon(t)
		d.open("tls tokens", false, hello)
		if resp, _, err := d.ask(d.client(), "GET", "/", "Authorization", "Bearer "+strings.Repeat("x", 64<<10)); err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("64 KiB of header: %v %v", resp, err)
		}
	})
	silent := func(d *tcpDaemon) net.Conn {
		c, err := net.Dial("tcp", d.tcp.Addr().String())
		if err != nil {
			d.t.Fatal(err)
		}
		d.t.Cleanup(func() { c.Close() })
		return c
	}
	t.Run("connections", func(t *testing.T) {
		d := newTCPDaemon(t)
		d.silence = time.Hour
		d.open("tls tokens", false, hello)
		var held []net.Conn
		for range maxOfClient {
			held = append(held, silent(d))
		}
		get := func() error {
			_, _, err := d.ask(d.client(), "GET", "/", "Authorization", "Bearer "+secret)
			return err
		}
		if err := get(); err == nil {
			t.Error("there is no bound")
		}
		if said := d.log.take(); !strings.Contains(said, "too many connections of this client") {
			t.Errorf("the log: %s", said)
		}
		held[0].Close()
		for deadline := time.Now().Add(time.Minute); get() != nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the place of a connection that has ended is not given to others")
			}
		}
	})
	t.Run("bodies", func(t *testing.T) {
		d := newTCPDaemon(t)
		begun, end := make(chan bool, maxBodies+1), make(chan bool)
		d.open("tokens", false, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.Method == "POST" {
				begun <- true
				<-end
			}
		}))
		c, token := d.client(), "Bearer "+secret
		c.Timeout = time.Minute
		codes := make(chan int)
		for range maxBodies {
			go func() {
				resp, _, err := d.ask(c, "POST", "/api/v1/plan", "Authorization", token)
				if err != nil {
					t.Error(err)
					resp = &http.Response{}
				}
				codes <- resp.StatusCode
			}()
			<-begun
		}
		for method, code := range map[string]int{"GET": 200, "POST": 503} {
			if resp, text, err := d.ask(c, method, "/api/v1/plan", "Authorization", token); err != nil || resp.StatusCode != code {
				t.Errorf("%s beside %d plans: %v %v %s", method, maxBodies, err, resp, text)
			}
		}
		close(end)
		for range maxBodies {
			if code := <-codes; code != 200 {
				t.Errorf("a plan within the bound: %d", code)
			}
		}
	})
	for kind, files := range map[string]string{"silence before the handshake": "tls tokens", "silence before the request": "tokens"} {
		t.Run(kind, func(t *testing.T) {
			d := newTCPDaemon(t)
			d.open(files, false, hello)
			if d.tcp.http.ReadHeaderTimeout <= 0 || d.tcp.http.IdleTimeout <= 0 {
				t.Fatal("silent clients may stay")
			}
			d = newTCPDaemon(t)
			d.silence = 10 * time.Millisecond
			d.open(files, false, hello)
			c := silent(d)
			if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a silent client may stay")
			}
		})
	}
}

// TestMetricsToken: a token with the role metrics reads the metrics page and nothing else.
func TestMetricsToken(t *testing.T) {
	d := newTCPDaemon(t)
	d.write("tokens", []byte("prometheus:metrics:"+secret+"\nadmin:"+second), 0o600)
	d.open("tokens", true, hello)
	c := d.client()
	for _, op := range operations(t) {
		if resp, text, err := d.ask(c, op.method, op.path, "Authorization", "Bearer "+secret); err != nil || resp.StatusCode != 403 || !strings.Contains(text, "may read /metrics alone") {
			t.Errorf("%s %s: %v %s", op.method, op.path, err, text)
		}
	}
	for method, want := range map[string]int{"GET": 200, "HEAD": 200, "POST": 403, "DELETE": 403} {
		if resp, _, err := d.ask(c, method, "/metrics", "Authorization", "Bearer "+secret); err != nil || resp.StatusCode != want {
			t.Errorf("%s /metrics: %v", method, err)
		}
	}
	for _, path := range []string{"/openapi.json", "/metrics/", "//metrics", "/metrics/../api/v1/config"} {
		if resp, _, err := d.ask(c, "GET", path, "Authorization", "Bearer "+secret); err != nil || resp.StatusCode != 403 {
			t.Errorf("%s: %v", path, err)
		}
	}
	if resp, _, err := d.ask(c, "GET", "/api/v1/status", "Authorization", "Bearer "+second); err != nil || resp.StatusCode != 200 {
		t.Errorf("the other token: %v", err)
	}
	d.write("tokens", []byte("prometheus:reader:"+secret), 0o600)
	if _, err := api.ReadTokens(d.at("tokens")); err == nil || !strings.Contains(err.Error(), "the only role is metrics") {
		t.Errorf("an unknown role: %v", err)
	}
}
