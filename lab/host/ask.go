// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/lab"
)

// Ask sends one request from the node to a server and returns the answer. It uses the source address and port; the
// zero AddrPort or port 0 leaves the choice to the kernel. It waits until ctx ends.
type Ask func(ctx context.Context, n *lab.Node, source, target netip.AddrPort) (Answer, error)

// AskWeb sends one HTTP request on a new connection. A status other than 200 is an error.
func AskWeb(ctx context.Context, n *lab.Node, source, target netip.AddrPort) (Answer, error) {
	c, err := dial(ctx, n, "tcp", source, target)
	if err != nil {
		return Answer{}, err
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", target); err != nil {
		return Answer{}, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return Answer{}, fmt.Errorf("status %s", resp.Status)
	}
	return parseAnswer(string(body))
}

// AskDatagram sends one datagram and waits for the answer. It does not retransmit.
func AskDatagram(ctx context.Context, n *lab.Node, source, target netip.AddrPort) (Answer, error) {
	reply, err := exchange(ctx, n, source, target, []byte("sluice"))
	if err != nil {
		return Answer{}, err
	}
	return parseAnswer(string(reply))
}

// AskDNS sends one question by UDP and waits for the answer. It does not retransmit.
func AskDNS(ctx context.Context, n *lab.Node, source, target netip.AddrPort) (Answer, error) {
	var q, r dns.Msg
	q.SetQuestion("name.example.", dns.TypeTXT)
	query, err := q.Pack()
	if err != nil {
		return Answer{}, err
	}
	reply, err := exchange(ctx, n, source, target, query)
	if err != nil {
		return Answer{}, err
	}
	if err := r.Unpack(reply); err != nil {
		return Answer{}, err
	}
	if r.Id != q.Id || len(r.Answer) != 1 {
		return Answer{}, errors.New("dns: not the answer to the question")
	}
	txt, ok := r.Answer[0].(*dns.TXT)
	if !ok || len(txt.Txt) != 1 {
		return Answer{}, errors.New("dns: not a TXT record")
	}
	return parseAnswer(txt.Txt[0])
}

func exchange(ctx context.Context, n *lab.Node, source, target netip.AddrPort, datagram []byte) ([]byte, error) {
	c, err := dial(ctx, n, "udp", source, target)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if _, err := c.Write(datagram); err != nil {
		return nil, err
	}
	buf := make([]byte, 65535)
	size, err := c.Read(buf)
	return buf[:size], err
}

// dial connects. The end of ctx interrupts the connection.
func dial(ctx context.Context, n *lab.Node, network string, source, target netip.AddrPort) (net.Conn, error) {
	d := &net.Dialer{}
	switch {
	case !source.IsValid():
	case network == "tcp":
		d.LocalAddr = net.TCPAddrFromAddrPort(source)
	default:
		d.LocalAddr = net.UDPAddrFromAddrPort(source)
	}
	c, err := n.Dial(ctx, d, network, target.String())
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

// Line is one long-lived connection to a [Lines] server.
type Line struct {
	conn net.Conn
	in   *bufio.Reader
}

// DialLine opens a connection that stays open until Close.
func DialLine(ctx context.Context, n *lab.Node, source, target netip.AddrPort) (*Line, error) {
	c, err := dial(ctx, n, "tcp", source, target)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		c.Close()
		return nil, err
	}
	return &Line{c, bufio.NewReader(c)}, nil
}

// Ask sends one line and waits for its answer until the timeout.
func (l *Line) Ask(timeout time.Duration) (Answer, error) {
	if err := l.conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return Answer{}, err
	}
	if _, err := io.WriteString(l.conn, "who\n"); err != nil {
		return Answer{}, err
	}
	s, err := l.in.ReadString('\n')
	if err != nil {
		return Answer{}, err
	}
	return parseAnswer(s)
}

// Close ends the connection.
func (l *Line) Close() error { return l.conn.Close() }
