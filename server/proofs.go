// SPDX-License-Identifier: Apache-2.0

package server

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/api"
)

// Files are the credentials of the daemon and of its clients. An empty name means none.
type Files struct {
	Cert, Key string // The daemon's, PEM; both or neither.
	ClientCA  string // CA of the clients' certificates, PEM.
	Tokens    string // as api.ReadTokens has it
}

// credentials are the parsed certificate, client CAs and tokens.
type credentials struct {
	cert    *tls.Certificate // nil: without TLS.
	clients *x509.CertPool   // nil: no certificate required.
	tokens  []namedToken     // nil: no token required.
}

// namedToken is the hash of a known token.
type namedToken struct {
	name string // Name in the log.
	role string // of package api
	hash [sha256.Size]byte
}

// credentialFiles is the content of the files.
type credentialFiles struct{ cert, key, ca, tokens string }

func (f Files) read() (credentialFiles, error) {
	var c credentialFiles
	var err error
	// Debian lets the group ssl-cert read keys.
	if f.Cert != "" {
		cert, certErr := api.ReadSecret(f.Cert, 0)
		key, keyErr := api.ReadSecret(f.Key, 0o007)
		c.cert, c.key, err = string(cert), string(key), errors.Join(wrapObject("certificate", certErr), wrapObject("key", keyErr))
	}
	if f.ClientCA != "" {
		ca, caErr := api.ReadSecret(f.ClientCA, 0)
		c.ca, err = string(ca), errors.Join(err, wrapObject("client CA", caErr))
	}
	if f.Tokens != "" {
		tokens, tokenErr := api.ReadTokens(f.Tokens)
		for _, t := range tokens {
			c.tokens += t.String() + " "
		}
		err = errors.Join(err, tokenErr)
	}
	return c, err
}

func wrapObject(object string, err error) error {
	if err != nil {
		return fmt.Errorf("%s %w", object, err)
	}
	return nil
}

func (f Files) parse(c credentialFiles) (*credentials, error) {
	p := &credentials{}
	if f.Cert != "" {
		pair, err := tls.X509KeyPair([]byte(c.cert), []byte(c.key))
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w: both are PEM, the key without a passphrase", f.Cert, f.Key, err)
		}
		p.cert = &pair
	}
	if f.ClientCA != "" {
		p.clients = x509.NewCertPool()
		if !p.clients.AppendCertsFromPEM([]byte(c.ca)) {
			return nil, fmt.Errorf("client CA %s: it holds no certificate in PEM", f.ClientCA)
		}
	}
	for i, token := range api.ParseTokens(c.tokens) {
		name := token.Name
		if name == "" {
			name = strconv.Itoa(i + 1)
		}
		p.tokens = append(p.tokens, namedToken{"token " + name, token.Role, sha256.Sum256([]byte(token.Secret))})
	}
	return p, nil
}

// authenticate returns the token of a request, without a name if no token is required, or an error if the request
// is refused. The certificate is verified for every request, because the files may have changed since its
// connection began.
func (p *credentials) authenticate(r *http.Request) (token namedToken, err error) {
	if p.clients != nil {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return token, errors.New("no client certificate was shown")
		}
		chain := x509.VerifyOptions{Roots: p.clients, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		for _, c := range r.TLS.PeerCertificates[1:] {
			chain.Intermediates.AddCert(c)
		}
		if _, err := r.TLS.PeerCertificates[0].Verify(chain); err != nil {
			return token, fmt.Errorf("the client certificate is not in force any more: %w", err)
		}
	}
	if p.tokens == nil {
		return token, nil
	}
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return token, errors.New("no token was sent: Authorization: Bearer TOKEN")
	}
	// Hashes have equal length. The time of the comparison therefore reveals neither the token's
	// length nor a similar token.
	sent := sha256.Sum256([]byte(strings.TrimSpace(secret)))
	for _, t := range p.tokens {
		if subtle.ConstantTimeCompare(sent[:], t.hash[:]) == 1 {
			token = t
		}
	}
	if token.name == "" {
		return token, errors.New("the token is not known")
	}
	return token, nil
}

// credentialStore holds the proofs in force. It reads the files whenever they are needed, so that a
// renewal takes effect with the next connection or request.
type credentialStore struct {
	files Files
	log   *slog.Logger

	mu      sync.Mutex      // Protects the rest.
	held    credentialFiles // of the proofs in force
	inForce *credentials
	told    string // last logged error
}

// open reads the files for the first time.
func (k *credentialStore) open() error {
	c, err := k.files.read()
	if err != nil {
		return err
	}
	p, err := k.files.parse(c)
	if err != nil {
		return err
	}
	k.held, k.inForce = c, p
	k.warnExpired()
	return nil
}

// credentialsInForce returns the credentials from the files, or the previous ones while the files are invalid.
// Each error is logged once.
func (k *credentialStore) credentialsInForce() *credentials {
	k.mu.Lock()
	defer k.mu.Unlock()
	c, err := k.files.read()
	var p *credentials
	if err == nil {
		if c == k.held {
			k.told = ""
			return k.inForce
		}
		p, err = k.files.parse(c)
	}
	if err != nil {
		if said := err.Error(); said != k.told {
			k.told = said
			k.log.Error("new certificates or tokens refused, those in force stay", "error", err)
		}
		return k.inForce
	}
	k.held, k.inForce, k.told = c, p, ""
	k.log.Info("certificates and tokens were read again")
	k.warnExpired()
	return p
}

// reload reads the files now and logs errors again.
func (k *credentialStore) reload() {
	k.mu.Lock()
	k.told = ""
	k.mu.Unlock()
	k.credentialsInForce()
}

// warnExpired logs a certificate that clients will refuse.
func (k *credentialStore) warnExpired() {
	if k.inForce.cert == nil {
		return
	}
	if end := k.inForce.cert.Leaf.NotAfter; end.Before(time.Now()) {
		k.log.Warn("the certificate has expired, clients will refuse it: renew it", "file", k.files.Cert, "expired", end)
	}
}
