// SPDX-License-Identifier: Apache-2.0

package api

import (
	"crypto/tls"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRemote sends requests to daemons over TCP. An error names the cause and the next step.
func TestRemote(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		at := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(at, []byte(text), 0o600), os.Chmod(at, mode)); err != nil {
			t.Fatal(err)
		}
		return at
	}
	const secret = "correct-horse-battery-staple"
	token := file("token", secret+"\n", 0o600)
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != "/api/v1/status":
			t.Errorf("asked for %s", r.URL.Path)
		case r.Header.Get("Authorization") == "":
			w.WriteHeader(401)
			_, _ = io.WriteString(w, `{"status":401,"detail":"no token was sent"}`)
		case r.Header.Get("Authorization") != "Bearer "+secret:
			w.WriteHeader(401)
			_, _ = io.WriteString(w, `{"status":401,"detail":"the token is not known"}`)
		default:
			_, _ = io.WriteString(w, `{"version":"v7"}`)
		}
	})
	serve := func(c *tls.Config, h http.Handler) *httptest.Server {
		s := httptest.NewUnstartedServer(h)
		s.TLS = c
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.StartTLS()
		t.Cleanup(s.Close)
		return s
	}
	secure := serve(&tls.Config{}, answer)
	wants := serve(&tls.Config{ClientAuth: tls.RequireAnyClientCert}, answer)
	moved := serve(&tls.Config{}, http.RedirectHandler(secure.URL+"/api/v1/status", http.StatusTemporaryRedirect))
	clear := httptest.NewServer(answer)
	t.Cleanup(clear.Close)
	gone := httptest.NewServer(answer)
	gone.Close()
	ca := file("ca", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})), 0o644)
	for _, c := range []struct {
		name   string
		remote Remote
		says   string // error text; "" if the daemon answers
	}{
		{"TLS", Remote{Server: secure.URL, CA: ca, Tokens: token}, ""},
		{"a path that is none", Remote{Server: secure.URL + "/", CA: ca, Tokens: token}, ""},
		{"loopback without TLS", Remote{Server: clear.URL, Tokens: token}, ""},
		{"no token", Remote{Server: secure.URL, CA: ca}, "no token was sent: name a file that holds it with --token-file FILE"},
		{"wrong token", Remote{Server: secure.URL, CA: ca, Tokens: file("wrong", "another-token-of-some-length", 0o600)}, "the token is not known"},
		{"unknown CA", Remote{Server: secure.URL, Tokens: token}, "name who signed its certificate with --ca FILE"},
		{"another name", Remote{Server: strings.Replace(secure.URL, "127.0.0.1", "localhost", 1), CA: ca, Tokens: token}, "use a name or address that its certificate has"},
		{"certificate wanted", Remote{Server: wants.URL, CA: ca, Tokens: token}, "show a certificate that its --client-ca has signed"},
		{"TLS wanted of none", Remote{Server: "https" + strings.TrimPrefix(clear.URL, "http"), CA: ca, Tokens: token}, "it listens without TLS: write http://"},
		{"elsewhere", Remote{Server: moved.URL, CA: ca, Tokens: token}, "307"},
		{"nobody", Remote{Server: gone.URL, Tokens: token}, "no daemon answers on " + gone.URL + ": run one there with --listen"},
		{"in clear", Remote{Server: "http://192.0.2.1:9443", Tokens: token}, "--server: \"http://192.0.2.1:9443\": the token would be sent in clear"},
		{"in clear by name", Remote{Server: "http://localhost:9443", Tokens: token}, "in clear"},
		{"no URL", Remote{Server: "192.0.2.1:9443"}, "write https://HOST:PORT"},
		{"no scheme", Remote{Server: "gw1"}, "write https://HOST:PORT"},
		{"a path", Remote{Server: secure.URL + "/sluice"}, "write https://HOST:PORT"},
		{"a name and password", Remote{Server: "https://a:b@192.0.2.1:9443"}, "write https://HOST:PORT"},
		{"no host", Remote{Server: "https://:9443"}, "write https://HOST:PORT"},
		{"no such port", Remote{Server: "https://gw1:65536"}, "ports are 1 to 65535"},
		{"others read the key", Remote{Server: secure.URL, Cert: ca, Key: file("key", "", 0o604)}, "mode 0604"},
		{"others read the token", Remote{Server: secure.URL, CA: ca, Tokens: file("open", secret, 0o644)}, "mode 0644"},
		{"two tokens", Remote{Server: secure.URL, CA: ca, Tokens: file("two", secret+"\n"+secret, 0o600)}, "it holds 2 tokens"},
		{"no CA", Remote{Server: secure.URL, CA: token}, "it holds no certificate"},
	} {
		client, err := NewRemote(c.remote)
		var status *Status
		if err == nil {
			status, err = client.Status(t.Context())
		}
		if c.says == "" && (err != nil || status.Version != "v7") || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.says)
		}
		if noDaemon := c.name == "nobody"; errors.Is(err, ErrNoDaemon) != noDaemon {
			t.Errorf("%s: %v is ErrNoDaemon: %t", c.name, err, !noDaemon)
		}
	}
}

// TestClosedWithoutAnswer: the message names a daemon that refuses further clients, or ends.
func TestClosedWithoutAnswer(t *testing.T) {
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	if _, err := NewClient(at).Status(t.Context()); err == nil || !strings.Contains(err.Error(), "daemon on "+at+": it closed the connection without an answer") {
		t.Error(err)
	}
}
