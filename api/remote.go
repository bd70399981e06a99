// SPDX-License-Identifier: Apache-2.0

package api

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Remote is a daemon that listens on TCP, and the client's credentials.
type Remote struct {
	Server string // https://HOST:PORT; http:// for a loopback address.
	Tokens string // File with the token; "" sends none.
	CA     string // PEM file of the CA of the daemon's certificate; "" uses the system's.
	Cert   string // The client's certificate, PEM; "" for none.
	Key    string // Its key.
}

// connectTimeout limits the wait for a host that does not answer.
const connectTimeout = 10 * time.Second

// NewRemote returns a client for the daemon. It reads the files but does not connect. Connections
// use no proxy.
func NewRemote(r Remote) (*Client, error) {
	base, err := ServerURL(r.Server)
	if err != nil {
		return nil, fmt.Errorf("--server: %w", err)
	}
	c := &Client{base: base, at: base, remote: true}
	if r.Tokens != "" {
		tokens, err := ReadTokens(r.Tokens)
		if err != nil {
			return nil, err
		}
		if len(tokens) != 1 {
			return nil, fmt.Errorf("token file %s: it holds %d tokens: a client has one", r.Tokens, len(tokens))
		}
		c.token = tokens[0].Secret
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS13}
	if r.CA != "" {
		raw, err := ReadSecret(r.CA, 0)
		if err != nil {
			return nil, fmt.Errorf("CA %w", err)
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(raw) {
			return nil, fmt.Errorf("CA %s: it holds no certificate in PEM", r.CA)
		}
	}
	if r.Cert != "" || r.Key != "" {
		pair, err := readPair(r.Cert, r.Key)
		if err != nil {
			return nil, err
		}
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	c.http = &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: conf, TLSHandshakeTimeout: connectTimeout, DialContext: (&net.Dialer{Timeout: connectTimeout}).DialContext,
			MaxConnsPerHost: maxConns, MaxIdleConnsPerHost: maxConns, IdleConnTimeout: idleTimeout,
		},
		// The API never redirects, and a token belongs to this server only.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c, nil
}

// ServerURL returns the URL of a daemon up to the port, or an error.
func ServerURL(server string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", fmt.Errorf("%q: write https://HOST:PORT", server)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", fmt.Errorf("%q: ports are 1 to 65535", server)
		}
	}
	if u.Scheme == "http" {
		if at, err := netip.ParseAddr(u.Hostname()); err != nil || !at.IsLoopback() {
			return "", fmt.Errorf("%q: the token would be sent in clear: write https://, or the loopback address 127.0.0.1 or [::1]", server)
		}
	}
	return u.Scheme + "://" + u.Host, nil
}

// readPair reads a certificate and its key, both PEM. It refuses a key readable by users outside
// its owner and group. Debian has a group for keys.
func readPair(certFile, keyFile string) (tls.Certificate, error) {
	cert, certErr := ReadSecret(certFile, 0)
	key, keyErr := ReadSecret(keyFile, 0o007)
	switch {
	case certErr != nil:
		return tls.Certificate{}, fmt.Errorf("certificate %w", certErr)
	case keyErr != nil:
		return tls.Certificate{}, fmt.Errorf("key %w", keyErr)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("certificate %s with key %s: %w: both are PEM, the key without a passphrase", certFile, keyFile, err)
	}
	return pair, nil
}

// explainRemote adds the cause and the next step to an error of a TCP connection.
func (c *Client) explainRemote(err error) error {
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	switch said := err.Error(); {
	case errors.As(err, &authority):
		return fmt.Errorf("%w: name who signed its certificate with --ca FILE", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w: use a name or address that its certificate has", err)
	case strings.Contains(said, "remote error: tls:"):
		return fmt.Errorf("%w: show a certificate that its --client-ca has signed, with --cert FILE and --key FILE", err)
	case strings.Contains(said, "server gave HTTP response to HTTPS client"):
		return fmt.Errorf("%w: it listens without TLS: write http://", err)
	}
	return err
}
