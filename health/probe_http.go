// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// maxBody is the number of searched bytes of a response's body.
const maxBody = 64 << 10

// httpProber sends a request over HTTP/1.1, with one connection per probe, and does not follow redirects.
type httpProber struct {
	scheme string
	dial   Dial
}

func newHTTPProber(scheme string, d Dial) httpProber { return httpProber{scheme, d} }

// Probe implements Prober.
func (p httpProber) Probe(ctx context.Context, t *Target) error {
	k := t.Check
	req, err := http.NewRequestWithContext(ctx, k.Method, p.scheme+"://"+t.AddrPort().String()+k.Path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "sluice")
	for name, value := range k.Headers {
		req.Header.Set(name, value)
	}
	if k.Host != "" {
		req.Host = k.Host
	}
	transport := p.transport(t)
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return shortTLS(err, k)
	}
	defer resp.Body.Close()
	if !goodStatus(k.Status, resp.StatusCode) {
		return fmt.Errorf("status %d, expected %s", resp.StatusCode, strings.Join(k.Status, ", "))
	}
	if k.Body == "" {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if bytes.Contains(body, []byte(k.Body)) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("body of %d bytes does not hold %q", len(body), k.Body)
}

func (p httpProber) transport(t *Target) *http.Transport {
	name := t.Check.Host
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return p.dial(ctx, network, address, t.Mark)
		},
		TLSClientConfig:        &tls.Config{ServerName: name, InsecureSkipVerify: t.Check.InsecureSkipVerify},
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxBody,
	}
}

// shortTLS returns the part of a certificate error that names the cause.
func shortTLS(err error, k *config.Check) error {
	var cert *tls.CertificateVerificationError
	switch {
	case !errors.As(err, &cert):
		return err
	case k.Host == "":
		return fmt.Errorf("certificate: %w; write host, the name that it is for, or insecure-skip-verify: true", cert.Err)
	}
	return fmt.Errorf("certificate: %w", cert.Err)
}

func goodStatus(ranges []string, status int) bool {
	for _, s := range ranges {
		if r, err := config.ParseStatus(s); err == nil && r.Contains(status) {
			return true
		}
	}
	return false
}
