// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// LeasedPrefixes contain the addresses that dnsmasq leases, and no other address of the office. A node that owns them
// can be all clients.
var LeasedPrefixes = []string{"10.1.10.48/28", "10.1.10.64/26", "10.1.10.128/25"}

// Leases is the number of addresses that dnsmasq leases.
const Leases = 200

// dnsmasqConf is DHCP and DNS for the office of [lab.Office]: 200 addresses, leases of two minutes (the minimum of
// dnsmasq), questions forwarded to the server outside. The check of a free address by a ping is off: one node owns
// all addresses of the range in benchmarks, and answers for them.
const dnsmasqConf = `keep-in-foreground
user=root
group=root
pid-file=
log-facility=-
interface=lan0
except-interface=lo
bind-interfaces
no-resolv
no-hosts
server=203.0.113.10
domain=office.example
host-record=router.office.example,10.1.10.1
dhcp-range=10.1.10.50,10.1.10.249,2m
dhcp-leasefile=DIR/leases
dhcp-authoritative
no-ping
`

// StartDnsmasq runs dnsmasq in the office's gateway. Its files are in dir.
func StartDnsmasq(ctx context.Context, gateway *lab.Node, dir string) (*Program, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "dnsmasq.conf")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(dnsmasqConf, "DIR", dir)), 0o644); err != nil {
		return nil, err
	}
	return start(ctx, gateway, "started, version", "dnsmasq", "--conf-file="+file)
}

// Each end of the VPN knows the fingerprint of the other's certificate, so there is no certification authority. DCO is
// a kernel module that Debian 12 does not have.
const (
	openvpnServer = `dev tun0
dev-type tun
topology subnet
server 10.8.0.0 255.255.255.0
local 211.155.226.121
port 1194
proto udp4
dh none
keepalive 10 60
push "route 10.1.10.0 255.255.255.0"
` + openvpnBoth
	openvpnClient = `client
dev tun0
dev-type tun
remote 211.155.226.121 1194 udp4
nobind
` + openvpnBoth
	openvpnBoth = `disable-dco
data-ciphers AES-256-GCM
cert DIR/OWN.crt
key DIR/OWN.key
peer-fingerprint OTHER
verb 3
`
)

// StartOpenVPNServer runs OpenVPN in the office's gateway: UDP port 1194, clients in 10.8.0.0/24 at tun0. The keys of
// both ends are created in dir unless they exist.
func StartOpenVPNServer(ctx context.Context, gateway *lab.Node, dir string) (*Program, error) {
	return startOpenVPN(ctx, gateway, dir, openvpnServer, "server", "client")
}

// StartOpenVPNClient runs OpenVPN in the node outside, with the keys in dir. Its route to the office is the VPN.
func StartOpenVPNClient(ctx context.Context, outside *lab.Node, dir string) (*Program, error) {
	return startOpenVPN(ctx, outside, dir, openvpnClient, "client", "server")
}

func startOpenVPN(ctx context.Context, n *lab.Node, dir, conf, own, other string) (*Program, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if _, err := fingerprint(dir, own); err != nil {
		return nil, err
	}
	print, err := fingerprint(dir, other)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, own+".conf")
	text := strings.NewReplacer("DIR", dir, "OWN", own, "OTHER", print).Replace(conf)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return start(ctx, n, "Initialization Sequence Completed", "openvpn", "--config", file)
}

// fingerprint returns the SHA-256 fingerprint of the certificate NAME.crt in dir, in the notation of OpenVPN. It
// creates the certificate and its key if there is none.
func fingerprint(dir, name string) (string, error) {
	file := filepath.Join(dir, name+".crt")
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = createCertificate(file, filepath.Join(dir, name+".key"), name)
	}
	if err != nil {
		return "", err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return "", fmt.Errorf("%s: no certificate", file)
	}
	sum := sha256.Sum256(block.Bytes)
	return strings.ReplaceAll(fmt.Sprintf("% X", sum[:]), " ", ":"), nil
}

// createCertificate writes a key and a self-signed certificate, valid for one year. It returns the certificate.
func createCertificate(certFile, keyFile, name string) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return cert, errors.Join(
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600),
		os.WriteFile(certFile, cert, 0o644))
}
