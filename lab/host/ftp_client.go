// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// FTPMode selects the data connection of a download.
type FTPMode string

// The data connections of RFC 959 and RFC 2428.
const (
	Passive         FTPMode = "PASV" // The client connects to the server's announced address and port.
	ExtendedPassive FTPMode = "EPSV" // The client connects to the server's announced port.
	Active          FTPMode = "PORT" // The server connects to the client's announced address and port.
	ExtendedActive  FTPMode = "EPRT" // The same for both families.
)

// FTPResult is the result of one download.
type FTPResult struct {
	Answer
	// Announced is the announced endpoint of the data connection, as received after any translation on the path.
	Announced netip.AddrPort
}

// FetchFTP downloads one file through a data connection of the given mode. In passive mode it connects to the
// announced address without a check.
func FetchFTP(ctx context.Context, n *lab.Node, source, target netip.AddrPort, mode FTPMode) (FTPResult, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*ftpTimeout)
	defer cancel()
	c, err := dial(ctx, n, "tcp", source, target)
	if err != nil {
		return FTPResult{}, err
	}
	f := &ftpClient{ctx: ctx, node: n, conn: c, text: textproto.NewConn(c)}
	defer f.text.Close()
	if _, _, err := f.text.ReadResponse(220); err != nil {
		return FTPResult{}, fmt.Errorf("ftp: greeting: %w", err)
	}
	for _, step := range []struct {
		line string
		code int
	}{{"USER anonymous", 331}, {"PASS lab@example.org", 230}, {"TYPE I", 200}} {
		if _, err := f.command(step.code, step.line); err != nil {
			return FTPResult{}, err
		}
	}
	if mode == Active || mode == ExtendedActive {
		return f.fetchActive(mode)
	}
	return f.fetchPassive(mode)
}

type ftpClient struct {
	ctx  context.Context
	node *lab.Node
	conn net.Conn
	text *textproto.Conn
}

func (f *ftpClient) command(want int, line string) (string, error) {
	if err := f.text.PrintfLine("%s", line); err != nil {
		return "", fmt.Errorf("ftp: %s: %w", line, err)
	}
	_, text, err := f.text.ReadResponse(want)
	if err != nil {
		return "", fmt.Errorf("ftp: %s: %w", line, err)
	}
	return text, nil
}

func (f *ftpClient) fetchPassive(mode FTPMode) (FTPResult, error) {
	var r FTPResult
	code := map[FTPMode]int{Passive: 227, ExtendedPassive: 229}[mode]
	text, err := f.command(code, string(mode))
	if err != nil {
		return r, err
	}
	if r.Announced, err = f.parseEndpoint(mode, text); err != nil {
		return r, fmt.Errorf("ftp: %s: %w", mode, err)
	}
	// Use the address of the control connection, because helpers expect no other.
	own := f.conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	data, err := dial(f.ctx, f.node, "tcp", netip.AddrPortFrom(own, 0), r.Announced)
	if err != nil {
		return r, fmt.Errorf("ftp: data connection to %s: %w", r.Announced, err)
	}
	defer data.Close()
	if _, err := f.command(150, "RETR who"); err != nil {
		return r, err
	}
	return f.finish(r, data)
}

// parseEndpoint parses the endpoint in the reply to PASV or EPSV.
func (f *ftpClient) parseEndpoint(mode FTPMode, text string) (netip.AddrPort, error) {
	_, inside, ok := strings.Cut(text, "(")
	inside, _, ok2 := strings.Cut(inside, ")")
	if !ok || !ok2 {
		return netip.AddrPort{}, fmt.Errorf("no endpoint in %q", text)
	}
	if mode == Passive {
		return parseHostPort(inside)
	}
	port, err := strconv.ParseUint(strings.Trim(inside, "|"), 10, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("no port in %q", text)
	}
	peer := f.conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(peer.Addr().Unmap(), uint16(port)), nil
}

func (f *ftpClient) fetchActive(mode FTPMode) (FTPResult, error) {
	var r FTPResult
	own := f.conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	if mode == Active && !own.Is4() {
		return r, errors.New("ftp: PORT has no room for an IPv6 address: use EPRT")
	}
	l, err := f.node.Listen(netip.AddrPortFrom(own, 0).String())
	if err != nil {
		return r, err
	}
	defer l.Close()
	r.Announced = l.Addr().(*net.TCPAddr).AddrPort()
	family := 1
	if own.Is6() {
		family = 2
	}
	line := fmt.Sprintf("EPRT |%d|%s|%d|", family, own, r.Announced.Port())
	if mode == Active {
		line = "PORT " + hostPort(netip.AddrPortFrom(own, r.Announced.Port()))
	}
	if _, err := f.command(200, line); err != nil {
		return r, err
	}
	if _, err := f.command(150, "RETR who"); err != nil {
		return r, err
	}
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(ftpTimeout)); err != nil {
		return r, err
	}
	data, err := l.Accept()
	if err != nil {
		return r, fmt.Errorf("ftp: data connection from the server: %w", err)
	}
	defer data.Close()
	return f.finish(r, data)
}

func (f *ftpClient) finish(r FTPResult, data net.Conn) (FTPResult, error) {
	body, err := readRest(data)
	if err != nil {
		return r, fmt.Errorf("ftp: data connection: %w", err)
	}
	if r.Answer, err = parseAnswer(body); err != nil {
		return r, err
	}
	if _, _, err := f.text.ReadResponse(226); err != nil {
		return r, fmt.Errorf("ftp: end of the file: %w", err)
	}
	_, err = f.command(221, "QUIT")
	return r, err
}
