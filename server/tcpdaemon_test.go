// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/audit"
)

// signer is a certificate authority.
type signer struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newSigner(t *testing.T, name string) *signer {
	s := &signer{t: t}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	s.cert, s.key, s.pem = s.make(template, template, nil)
	return s
}

func (s *signer) make(template, parent *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	if by == nil {
		by = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		s.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		s.t.Fatal(err)
	}
	return cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// issue signs a certificate for 127.0.0.1 and returns it with its key, both PEM.
func (s *signer) issue(serial int64, lives time.Duration, use ...x509.ExtKeyUsage) (cert, key []byte) {
	_, private, cert := s.make(&x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "one"}, NotAfter: time.Now().Add(lives),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: use}, s.cert, s.key)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		s.t.Fatal(err)
	}
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func (s *signer) pair(use x509.ExtKeyUsage) tls.Certificate {
	pair, err := tls.X509KeyPair(s.issue(7, time.Hour, use))
	if err != nil {
		s.t.Fatal(err)
	}
	return pair
}

// logged is a log for inspection.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// take returns the log lines since the previous call.
func (l *logged) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.buf.Reset()
	return l.buf.String()
}

// tcpDaemon is a server that listens over TCP, with its certificate and token files.
type tcpDaemon struct {
	t       *testing.T
	dir     string
	tcp     *TCP
	log     *logged
	servers *signer // authority of the daemon's certificate
	clients *signer
	silence time.Duration // idle timeout of clients; 0: the default
	timeout time.Duration // timeout of the header and body of a request; 0: the default
	audit   *audit.Log
}

// newTCPDaemon makes the files; open listens.
func newTCPDaemon(t *testing.T) *tcpDaemon {
	d := &tcpDaemon{t: t, dir: t.TempDir(), log: &logged{}, servers: newSigner(t, "servers"), clients: newSigner(t, "clients")}
	cert, key := d.servers.issue(2, time.Hour, x509.ExtKeyUsageServerAuth)
	d.write("cert", cert, 0o644)
	d.write("key", key, 0o600)
	d.write("ca", d.clients.pem, 0o644)
	d.write("tokens", []byte("\n "+secret+"\n"+second+" \n"), 0o600)
	return d
}

func (d *tcpDaemon) at(name string) string { return filepath.Join(d.dir, name) }

// write replaces a file as renewal programs do.
func (d *tcpDaemon) write(name string, text []byte, mode os.FileMode) {
	d.t.Helper()
	if err := os.WriteFile(d.at("new"), text, 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Chmod(d.at("new"), mode); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(d.at("new"), d.at(name)); err != nil {
		d.t.Fatal(err)
	}
}

func (d *tcpDaemon) files(kinds string) Files {
	var f Files
	for kind := range strings.FieldsSeq(kinds) {
		switch kind {
		case "tls":
			f.Cert, f.Key = d.at("cert"), d.at("key")
		case "ca":
			f.ClientCA = d.at("ca")
		case "tokens":
			f.Tokens = d.at("tokens")
		}
	}
	return f
}

func (d *tcpDaemon) open(kinds string, changes bool, h http.Handler) {
	d.t.Helper()
	var err error
	d.tcp, err = ListenTCP(d.t.Context(), TCPOptions{Address: "127.0.0.1:0", Files: d.files(kinds), Changes: changes, Log: slog.New(slog.NewTextHandler(d.log, nil)), Audit: d.audit})
	if err != nil {
		d.t.Fatal(err)
	}
	if d.silence > 0 {
		d.tcp.http.ReadHeaderTimeout = d.silence
	}
	if d.timeout > 0 {
		d.tcp.http.ReadHeaderTimeout, d.tcp.http.ReadTimeout = d.timeout, d.timeout
	}
	done := make(chan error)
	go func() { done <- d.tcp.Serve(d.t.Context(), h) }()
	d.t.Cleanup(func() {
		_ = d.tcp.Close()
		<-done
	})
}

// client returns a client that trusts the daemon's certificate; edit changes its TLS settings.
func (d *tcpDaemon) client(edit ...func(*tls.Config)) *http.Client {
	roots := x509.NewCertPool()
	roots.AddCert(d.servers.cert)
	c := &tls.Config{RootCAs: roots}
	for _, e := range edit {
		e(c)
	}
	transport := &http.Transport{TLSClientConfig: c}
	d.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func shows(c tls.Certificate) func(*tls.Config) {
	return func(conf *tls.Config) {
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &c, nil }
	}
}

func (d *tcpDaemon) ask(c *http.Client, method, path string, header ...string) (*http.Response, string, error) {
	scheme := "https://"
	if d.tcp.opt.Files.Cert == "" {
		scheme = "http://"
	}
	req, err := http.NewRequestWithContext(d.t.Context(), method, scheme+d.tcp.Addr().String()+path, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return resp, string(raw), err
}
