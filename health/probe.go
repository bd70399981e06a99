// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
)

// Dial opens a connection with the firewall mark on its packets; 0 sets no mark.
type Dial func(ctx context.Context, network, address string, mark uint32) (net.Conn, error)

// newProbers returns the prober of each check type.
func newProbers(d Dial) map[config.CheckType]Prober {
	return map[config.CheckType]Prober{
		config.CheckTCP:   tcpProber{d},
		config.CheckHTTP:  newHTTPProber("http", d),
		config.CheckHTTPS: newHTTPProber("https", d),
		config.CheckUDP:   udpProber{d},
		config.CheckDNS:   dnsProber{d},
		config.CheckICMP:  icmpProber{},
		config.CheckExec:  execProber{},
	}
}

func dial(ctx context.Context, network, address string, mark uint32) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1, Control: markSocket(mark)}
	return d.DialContext(ctx, network, address)
}

// markSocket returns a control function that sets SO_MARK; nil for no mark.
func markSocket(mark uint32) func(network, address string, c syscall.RawConn) error {
	if mark == 0 {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark))
		}); cerr != nil {
			return cerr
		}
		if err != nil {
			return fmt.Errorf("mark %d: %w", mark, err)
		}
		return nil
	}
}

// applyDeadline applies the context's deadline to conn.
func applyDeadline(ctx context.Context, conn net.Conn) (stop func() bool) {
	if t, ok := ctx.Deadline(); ok {
		conn.SetDeadline(t)
	}
	return context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
}

// tcpProber connects, and optionally sends data and expects an answer.
type tcpProber struct{ dial Dial }

// Probe implements Prober.
func (p tcpProber) Probe(ctx context.Context, t *Target) error {
	conn, err := p.dial(ctx, "tcp", t.AddrPort().String(), t.Mark)
	if err != nil {
		return err
	}
	defer conn.Close()
	if t.Check.Send == "" && t.Check.Expect == "" {
		// A reset avoids TIME_WAIT: probes of thousands of backends must not exhaust the gateway's ports.
		if tcp, ok := conn.(*net.TCPConn); ok {
			tcp.SetLinger(0)
		}
		return nil
	}
	defer applyDeadline(ctx, conn)()
	if _, err := io.WriteString(conn, t.Check.Send); err != nil {
		return err
	}
	got := make([]byte, len(t.Check.Expect))
	n, err := io.ReadFull(conn, got)
	if !strings.HasPrefix(t.Check.Expect, string(got[:n])) {
		return unexpectedAnswer(got[:n], t.Check.Expect)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("closed the connection after %q, expected %q", got[:n], t.Check.Expect)
	}
	return err
}

func unexpectedAnswer(got []byte, want string) error {
	const shown = 64
	return fmt.Errorf("answered %q, expected %q", got[:min(len(got), shown)], want[:min(len(want), shown)])
}

// udpProber sends a datagram. With expect, an answer must begin with the expected bytes. Without expect, silence is
// good, and only an ICMP error or a refusal is bad.
type udpProber struct{ dial Dial }

// Probe implements Prober.
func (p udpProber) Probe(ctx context.Context, t *Target) error {
	conn, err := p.dial(ctx, "udp", t.AddrPort().String(), t.Mark)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer applyDeadline(ctx, conn)()
	if _, err := conn.Write([]byte(t.Check.Send)); err != nil {
		return err
	}
	buf := make([]byte, 2048)
	n, err := conn.Read(buf)
	switch {
	case err != nil && t.Check.Expect == "" && errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(ctx.Err(), context.Canceled):
		return nil
	case err != nil:
		return err
	case !bytes.HasPrefix(buf[:n], []byte(t.Check.Expect)):
		return unexpectedAnswer(buf[:n], t.Check.Expect)
	}
	return nil
}
