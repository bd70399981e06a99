// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
)

// Limits of a request over TCP. The handlers limit the size of bodies.
const (
	readHeaderTimeout = 5 * time.Second // of the TLS handshake too
	idleTimeout       = 2 * time.Minute // Between two requests; longer than the scrape interval of Prometheus.
	maxHeader         = 16 << 10        // Bytes.
	maxBodies         = 2               // Concurrent configurations, which may be large.
)

// TCPOptions are the address, the credentials and the rights of the API over TCP.
type TCPOptions struct {
	Address string // ADDRESS:PORT, or :PORT for all addresses
	Files   Files
	Changes bool       // Otherwise clients may only read.
	Audit   *audit.Log // nil: nothing is recorded.
	Log     *slog.Logger
}

// Check returns an error unless only clients that authenticate are served and tokens are sent encrypted
// or on loopback.
func (o TCPOptions) Check() error {
	f := o.Files
	at, err := parseListen(o.Address)
	switch {
	case err != nil:
		return err
	case (f.Cert == "") != (f.Key == ""):
		return errors.New("--tls-cert FILE and --tls-key FILE belong together: name both")
	case f.ClientCA == "" && f.Tokens == "":
		return fmt.Errorf("--listen %s: whoever reaches it would be served: name --token-file FILE, or --client-ca FILE, by which clients prove who they are", o.Address)
	case f.ClientCA != "" && f.Cert == "":
		return fmt.Errorf("--client-ca %s: certificates are a part of TLS: name --tls-cert FILE and --tls-key FILE", f.ClientCA)
	case f.Cert == "" && !at.Addr().IsLoopback():
		return fmt.Errorf("--listen %s: the token would be sent in clear: name --tls-cert FILE and --tls-key FILE, or listen on 127.0.0.1 or [::1]", o.Address)
	}
	return nil
}

// parseListen parses an address and port; for ":9443" the address is invalid.
func parseListen(s string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err == nil && host == "" {
		host = "::"
	}
	at, parseErr := netip.ParseAddrPort(net.JoinHostPort(host, port))
	if err != nil || parseErr != nil {
		return netip.AddrPort{}, fmt.Errorf("--listen %s: write ADDRESS:PORT as in 192.0.2.1:9443, [2001:db8::1]:9443 or :9443 for all addresses", s)
	}
	return at, nil
}

// TCP serves the API to clients that authenticate.
type TCP struct {
	opt      TCPOptions
	keeper   *credentialStore
	refusals *refusals
	changes  *logLimiter   // of log lines about requests for changes
	bodies   chan struct{} // One element for each active request with a body.
	listener net.Listener
	http     *http.Server
}

// ListenTCP reads the files and listens. Connections wait until Serve.
func ListenTCP(ctx context.Context, opt TCPOptions) (*TCP, error) {
	if err := opt.Check(); err != nil {
		return nil, err
	}
	t := &TCP{opt: opt, keeper: &credentialStore{files: opt.Files, log: opt.Log}, refusals: newRefusals(opt.Log), changes: &logLimiter{now: time.Now}, bodies: make(chan struct{}, maxBodies)}
	t.http = &http.Server{
		ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: log.New(failures{t}, "", 0),
	}
	if err := t.keeper.open(); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", opt.Address, err)
	}
	l, err := (&net.ListenConfig{Control: setFreebind}).Listen(ctx, "tcp", opt.Address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", opt.Address, cause(err))
	}
	if at := l.Addr().(*net.TCPAddr); !hasAddress(at.IP) {
		opt.Log.Warn("nothing can connect yet: no interface has the address that --listen names", "address", at.IP)
	}
	t.listener = newLimited(l, maxConnections, maxOfClient, t.refusals.logRefused)
	if opt.Files.Cert != "" {
		t.listener = tls.NewListener(t.listener, &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: t.tls})
	}
	return t, nil
}

// setFreebind lets the daemon listen before its address exists, for example at boot.
func setFreebind(network, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		if network == "tcp6" {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1)
			return
		}
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
	})
	return errors.Join(err, failed)
}

// hasAddress reports whether this host has the address.
func hasAddress(ip net.IP) bool {
	if ip.IsUnspecified() || ip.IsLoopback() {
		return true // all of 127.0.0.0/8 is local
	}
	addrs, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(ip)
	})
}

// cause removes an address that the message already contains from an error of net.
func cause(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Err
	}
	return err
}

// tls returns the configuration of one connection. Sessions are not resumed, so that every
// connection presents a currently valid certificate. HTTP/2 is off, because it lets unauthenticated
// clients use more resources.
func (t *TCP) tls(*tls.ClientHelloInfo) (*tls.Config, error) {
	p := t.keeper.credentialsInForce()
	c := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*p.cert}, NextProtos: []string{"http/1.1"}, SessionTicketsDisabled: true}
	if p.clients != nil {
		c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, p.clients
	}
	return c, nil
}

// Addr returns the address of the listener.
func (t *TCP) Addr() net.Addr { return t.listener.Addr() }

// Refused returns the number of refused connections and requests: beyond the limits, or
// unauthenticated.
func (t *TCP) Refused() uint64 {
	t.refusals.mu.Lock()
	defer t.refusals.mu.Unlock()
	return t.refusals.total
}

// Expires returns the end of the certificate in force, zero without TLS.
func (t *TCP) Expires() time.Time {
	if cert := t.keeper.credentialsInForce().cert; cert != nil {
		return cert.Leaf.NotAfter
	}
	return time.Time{}
}

// Reread reads the files again now. They are also read whenever they are needed.
func (t *TCP) Reread() { t.keeper.reload() }

// Serve serves requests with the handler until Shutdown or Close, and always returns an error. The
// contexts of requests end with ctx.
func (t *TCP) Serve(ctx context.Context, h http.Handler) error {
	if !t.opt.Changes {
		h = auditRefused(ReadOnly(h), t.opt.Audit)
	}
	origin := http.NewCrossOriginProtection() // a browser presents its certificate for requests of any page
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writeProblem(w, http.StatusForbidden, "the request comes from a page of "+r.Header.Get("Origin"))
	}))
	t.http.Handler = closeAfterRefusal(t.requireCredentials(origin.Handler(h)))
	t.http.BaseContext = func(net.Listener) context.Context { return ctx }
	return t.http.Serve(t.listener)
}

// requireCredentials serves clients that authenticate and closes the connection of others.
func (t *TCP) requireCredentials(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := t.keeper.credentialsInForce()
		token, err := p.authenticate(r)
		if err != nil {
			t.refusals.logRefused(r.RemoteAddr, err.Error())
			if p.tokens != nil {
				w.Header().Set("WWW-Authenticate", `Bearer realm="sluice"`)
			}
			w.Header().Set("Connection", "close")
			writeProblem(w, http.StatusUnauthorized, err.Error())
			return
		}
		if token.role == api.RoleMetrics && (r.URL.Path != "/metrics" || !isReadOnly(r)) {
			t.refusals.logRefused(r.RemoteAddr, token.name+" may read /metrics alone")
			writeProblem(w, http.StatusForbidden, token.name+" may read /metrics alone: its role in the token file is "+api.RoleMetrics)
			return
		}
		if !isReadOnly(r) && t.opt.Changes {
			if others, ok := t.changes.allow(); ok {
				t.opt.Log.Info("a client asks for a change", "client", r.RemoteAddr, "certificate", certificateOf(r), "token", token.name, "method", r.Method, "path", r.URL.EscapedPath(), "others", others)
			}
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			select {
			case t.bodies <- struct{}{}:
				defer func() { <-t.bodies }()
			default:
				w.Header().Set("Retry-After", "1")
				writeProblem(w, http.StatusServiceUnavailable, fmt.Sprintf("%d plans or changes are being worked on over TCP: try again in a moment", maxBodies))
				return
			}
		}
		next.ServeHTTP(w, withClient(r, token.name))
	})
}

// failures converts net/http's log lines about handshakes into refusals.
type failures struct{ t *TCP }

// Write implements io.Writer; net/http calls it once a line.
func (f failures) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	if rest, ok := strings.CutPrefix(text, "http: TLS handshake error from "); ok {
		client, why, _ := strings.Cut(rest, ": ")
		f.t.refusals.logRefused(client, why)
	} else {
		f.t.opt.Log.Error("HTTP over TCP", "error", text)
	}
	return len(line), nil
}

// Shutdown waits for active requests until ctx ends, and closes everything.
func (t *TCP) Shutdown(ctx context.Context) error { return t.http.Shutdown(ctx) }

// Close closes everything at once, also before Serve.
func (t *TCP) Close() error {
	_ = t.listener.Close() // http.Server knows the listener only after Serve, and may have closed it
	return t.http.Close()
}

// isReadOnly reports whether a request changes nothing. A plan only computes.
func isReadOnly(r *http.Request) bool {
	return r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodPost && r.URL.Path == "/api/v1/plan"
}

// ReadOnly passes on requests that change nothing: GET, HEAD, and POST /api/v1/plan.
func ReadOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isReadOnly(r) {
			writeProblem(w, http.StatusForbidden, fmt.Sprintf("%s %s: over TCP this daemon may only be read: use its socket, or run it with --listen-changes", r.Method, r.URL.Path))
			return
		}
		next.ServeHTTP(w, r)
	})
}
