// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// ftpTimeout bounds every wait of the FTP server and client.
const ftpTimeout = 30 * time.Second

// FTP is a small FTP server (RFC 959, RFC 2428) for anonymous downloads in active and passive mode. Every file
// contains the server's [Answer], with the client of the data connection. It announces its own local address, which a
// NAT helper must rewrite.
type FTP struct {
	node      *lab.Node
	name      string
	listener  net.Listener
	conns     connections
	transfers atomic.Uint64
}

// ServeFTP starts the server in the node at the address, a literal such as "10.1.10.3:21".
func ServeFTP(n *lab.Node, name, addr string) (*FTP, error) {
	l, err := n.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("ftp server %s: %w", name, err)
	}
	s := &FTP{node: n, name: name, listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if s.conns.add(c) {
				go s.serve(c)
			}
		}
	}()
	return s, nil
}

// Stop closes the listener and every control connection.
func (s *FTP) Stop() error {
	err := s.listener.Close()
	s.conns.closeAll()
	return err
}

// Transfers returns the number of completely sent files.
func (s *FTP) Transfers() uint64 { return s.transfers.Load() }

// ftpSession is one control connection.
type ftpSession struct {
	server  *FTP
	control net.Conn
	passive net.Listener   // Set by PASV and EPSV.
	active  netip.AddrPort // Set by PORT and EPRT.
}

func (s *FTP) serve(c net.Conn) {
	defer s.conns.remove(c)
	session := &ftpSession{server: s, control: c}
	defer session.forget()
	session.reply(220, "the lab's ftp server "+s.name)
	sc := bufio.NewScanner(c)
	for sc.Scan() {
		verb, arg, _ := strings.Cut(strings.TrimSpace(sc.Text()), " ")
		verb = strings.ToUpper(verb)
		session.runCommand(verb, arg)
		if verb == "QUIT" {
			return
		}
	}
}

func (f *ftpSession) reply(code int, text string) {
	_, _ = fmt.Fprintf(f.control, "%d %s\r\n", code, text) // a lost control connection ends the session
}

func (f *ftpSession) runCommand(verb, arg string) {
	switch verb {
	case "USER":
		f.reply(331, "any password will do")
	case "PASS":
		f.reply(230, "welcome")
	case "SYST":
		f.reply(215, "UNIX Type: L8")
	case "PWD":
		f.reply(257, `"/"`)
	case "TYPE", "NOOP", "CWD":
		f.reply(200, "fine")
	case "PASV", "EPSV":
		f.listen(verb)
	case "PORT", "EPRT":
		f.setDataAddress(verb, arg)
	case "RETR", "LIST", "NLST":
		f.send()
	case "QUIT":
		f.reply(221, "bye")
	default:
		f.reply(502, "this server does not know "+verb)
	}
}

// forget resets the state of the last PASV or PORT.
func (f *ftpSession) forget() {
	if f.passive != nil {
		f.passive.Close()
	}
	f.passive, f.active = nil, netip.AddrPort{}
}

func (f *ftpSession) listen(verb string) {
	f.forget()
	own := f.control.LocalAddr().(*net.TCPAddr).AddrPort()
	l, err := f.server.node.Listen(netip.AddrPortFrom(own.Addr(), 0).String())
	if err != nil {
		f.reply(425, err.Error())
		return
	}
	f.passive = l
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	if verb == "EPSV" {
		f.reply(229, fmt.Sprintf("Entering Extended Passive Mode (|||%d|)", port))
		return
	}
	if !own.Addr().Unmap().Is4() {
		f.reply(425, "PASV has no room for an IPv6 address: use EPSV")
		return
	}
	f.reply(227, "Entering Passive Mode ("+hostPort(netip.AddrPortFrom(own.Addr().Unmap(), port))+")")
}

func (f *ftpSession) setDataAddress(verb, arg string) {
	f.forget()
	parse := parseHostPort
	if verb == "EPRT" {
		parse = parseEPRT
	}
	ap, err := parse(arg)
	if err != nil {
		f.reply(501, err.Error())
		return
	}
	f.active = ap
	f.reply(200, "fine")
}

func (f *ftpSession) send() {
	defer f.forget()
	f.reply(150, "here it comes")
	data, err := f.open()
	if err != nil {
		f.reply(425, err.Error())
		return
	}
	_, err = fmt.Fprintln(data, Answer{f.server.name, data.RemoteAddr().String()})
	if closeErr := data.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		f.reply(426, err.Error())
		return
	}
	f.server.transfers.Add(1)
	f.reply(226, "done")
}

// open opens the data connection in the mode requested by the client.
func (f *ftpSession) open() (net.Conn, error) {
	switch {
	case f.passive != nil:
		if err := f.passive.(*net.TCPListener).SetDeadline(time.Now().Add(ftpTimeout)); err != nil {
			return nil, err
		}
		return f.passive.Accept()
	case f.active.IsValid():
		ctx, cancel := context.WithTimeout(context.Background(), ftpTimeout)
		defer cancel()
		return f.server.node.Dial(ctx, nil, "tcp", f.active.String())
	}
	return nil, errors.New("say PASV or PORT first")
}

// hostPort returns an IPv4 endpoint as "h1,h2,h3,h4,p1,p2" (RFC 959 §4.1.2).
func hostPort(ap netip.AddrPort) string {
	a := ap.Addr().As4()
	return fmt.Sprintf("%d,%d,%d,%d,%d,%d", a[0], a[1], a[2], a[3], ap.Port()>>8, ap.Port()&0xff)
}

func parseHostPort(s string) (netip.AddrPort, error) {
	parts := strings.Split(s, ",")
	if len(parts) != 6 {
		return netip.AddrPort{}, fmt.Errorf("%q is not h1,h2,h3,h4,p1,p2", s)
	}
	var b [6]byte
	for i, p := range parts {
		n, err := strconv.ParseUint(strings.TrimSpace(p), 10, 8)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("%q is not h1,h2,h3,h4,p1,p2", s)
		}
		b[i] = byte(n)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(b[4])<<8|uint16(b[5])), nil
}

// parseEPRT parses "|1|192.0.2.1|6446|" (RFC 2428 §2).
func parseEPRT(s string) (netip.AddrPort, error) {
	bad := fmt.Errorf("%q is not |family|address|port|", s)
	if len(s) < 2 {
		return netip.AddrPort{}, bad
	}
	parts := strings.Split(s, s[:1])
	if len(parts) != 5 {
		return netip.AddrPort{}, bad
	}
	a, err := netip.ParseAddr(parts[2])
	if err != nil {
		return netip.AddrPort{}, bad
	}
	port, err := strconv.ParseUint(parts[3], 10, 16)
	if err != nil {
		return netip.AddrPort{}, bad
	}
	return netip.AddrPortFrom(a, uint16(port)), nil
}

// readRest reads the rest of a data connection.
func readRest(c net.Conn) (string, error) {
	if err := c.SetDeadline(time.Now().Add(ftpTimeout)); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}
