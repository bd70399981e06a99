// SPDX-License-Identifier: Apache-2.0

package labtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Etcd is one etcd, which serves only clients with a certificate of its CA.
type Etcd struct {
	URL           string
	CA, Cert, Key string // files of a client

	t       testing.TB
	command func(name string, args ...string) *exec.Cmd
	args    []string
	cmd     *exec.Cmd
	log     strings.Builder
}

// NewEtcd starts an etcd at an address; command creates its process. It ends with the test. It may not answer yet.
func NewEtcd(t testing.TB, command func(name string, args ...string) *exec.Cmd, address string, port int) *Etcd {
	t.Helper()
	dir := t.TempDir()
	e := &Etcd{t: t, command: command, URL: fmt.Sprintf("https://%s:%d", address, port), CA: filepath.Join(dir, "cert.pem"), Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	writeCertificate(t, e.Cert, e.Key, address)
	peer := fmt.Sprintf("http://127.0.0.1:%d", port+1)
	e.args = []string{"--name", "one", "--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", e.URL, "--advertise-client-urls", e.URL,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "one=" + peer,
		"--client-cert-auth", "--trusted-ca-file", e.CA, "--cert-file", e.Cert, "--key-file", e.Key}
	e.Start()
	t.Cleanup(func() {
		e.Kill()
		if t.Failed() {
			t.Logf("etcd: %s", e.log.String()[max(0, e.log.Len()-4000):])
		}
	})
	return e
}

// Start starts it again, with its data, after Kill.
func (e *Etcd) Start() {
	e.t.Helper()
	e.cmd = e.command("etcd", e.args...)
	e.cmd.Stderr = &e.log
	if err := e.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
}

// Kill ends it.
func (e *Etcd) Kill() {
	_ = e.cmd.Process.Kill() // it may have ended
	_ = e.cmd.Wait()
}

// YAML returns cluster.store of a configuration.
func (e *Etcd) YAML() string {
	return fmt.Sprintf("{endpoints: [%q], tls: {ca: %q, cert: %q, key: %q}}", e.URL, e.CA, e.Cert, e.Key)
}

// FreePort returns the first of two ports of the loopback address that no process listens on. They are below those that
// the kernel gives to connections.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		var random [2]byte
		_, _ = rand.Read(random[:]) // never fails
		port := 20000 + 2*(int(random[0])<<8|int(random[1]))%10000
		free := true
		for p := port; p < port+2; p++ {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
			if free = free && err == nil; err == nil {
				l.Close()
			}
		}
		if free {
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

// writeCertificate writes a certificate for servers and clients, signed by itself.
func writeCertificate(t testing.TB, cert, key, address string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "sluice"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.ParseIP(address)}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
