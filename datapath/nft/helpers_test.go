// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// The published server of these tests, its published address, the gateway's address towards it, and the client.
const (
	helped    = "10.1.10.3"
	published = "211.155.226.121"
	inner     = "10.1.10.1"
	caller    = "203.0.113.1"
)

// TestHelpers speaks each helper's protocol through the gateway, as far as the helper parses it. An address
// announced in the payload must be usable for the other side. Without the helper, the same exchange must fail.
func TestHelpers(t *testing.T) {
	for _, c := range []struct {
		helper   config.Helper
		protocol flow.Protocol
		port     uint16
		fullnat  bool // the helper supports clients with a translated source
		talk     func(*peers) error
	}{
		{"ftp", flow.TCP, 21, false, (*peers).ftp},
		{"tftp", flow.UDP, 69, false, (*peers).tftp},
		{"sip", flow.UDP, 5060, false, (*peers).sip},
		{"irc", flow.TCP, 6667, true, (*peers).irc},
		{"amanda", flow.UDP, 10080, false, (*peers).amanda},
		{"pptp", flow.TCP, 1723, false, (*peers).pptp},
		{"snmp", flow.UDP, 162, true, (*peers).snmp},
	} {
		t.Run(string(c.helper), func(t *testing.T) {
			b := newBench(t, lab.Office())
			conf := func(h config.Helper) *config.Config {
				l := listen(published, strconv.Itoa(int(c.port)))
				if c.fullnat {
					return one(config.Service{
						Name: "published", Protocol: c.protocol, Mode: config.ModeFullNAT, Scheduler: config.SchedulerRR,
						Listen: []config.Listen{l}, Backends: []config.Backend{backend("a", helped, 0)}, Helper: h,
					})
				}
				return &config.Config{NAT: []config.NATRule{{
					Name: "published", Type: config.NATPortForward, Listen: &l, Protocol: c.protocol,
					To: config.Target{Address: addr(helped), Port: c.port}, Helper: config.Helpers(h),
				}}}
			}
			for _, h := range []config.Helper{"", c.helper} {
				b.apply(conf(h))
				p := &peers{bench: b, port: c.port, timeout: trafficTimeout}
				if h == "" {
					p.timeout = silence
				}
				err := c.talk(p)
				p.close()
				switch {
				case h == "" && err == nil:
					t.Error("it works without the helper, so the test shows nothing")
				case h == "":
					t.Logf("without the helper: %v", err)
				case err != nil:
					t.Errorf("%v\n%s", err, b.ruleset())
				}
			}
		})
	}
}

// TestHelpersOfInsideHosts: for hosts behind masquerade and snat, a server outside answers from another port
// (TFTP), or connects to the port that the client has named (FTP's PORT). Both work only with a helper.
func TestHelpersOfInsideHosts(t *testing.T) {
	b := newBench(t, lab.Office())
	snat := config.NATRule{Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", To: snatTo("211.155.226.121")}
	masquerade := snat
	masquerade.Type, masquerade.To = config.NATMasquerade, config.Target{}
	for _, n := range []config.NATRule{masquerade, snat} {
		for _, helper := range []config.Helpers{"", "tftp,ftp"} {
			t.Run(string(n.Type)+" "+string(helper), func(t *testing.T) {
				n.Helper = helper
				b.apply(&config.Config{NAT: []config.NATRule{n}})
				p := &peers{bench: b, timeout: trafficTimeout}
				if helper == "" {
					p.timeout = silence
				}
				defer p.close()
				for name, talk := range map[string]func() error{"tftp": p.tftpOut, "ftp": p.ftpOut} {
					if err := talk(); (err == nil) != (helper != "") {
						t.Errorf("%s: %v\n%s", name, err, b.ruleset())
					}
				}
			})
		}
	}
}

// tftpOut reads a file from a server outside, which answers from another port.
func (p *peers) tftpOut() error {
	server, err := p.packet("outside", "udp", hostPort(caller, 69))
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := p.packet("ftp", "udp", helped+":0")
	if err != nil {
		return err
	}
	_, seen, err := pass(client, udpAddr(hostPort(caller, 69)), []byte("\x00\x01file\x00octet\x00"), server)
	if err != nil {
		return err
	}
	transfer, err := p.packet("outside", "udp", caller+":0")
	if err == nil {
		_, _, err = pass(transfer, seen, []byte("\x00\x03\x00\x01data"), client)
	}
	return err
}

// ftpOut lets the server outside connect to the port that the client has named.
func (p *peers) ftpOut() error {
	client, server, err := p.connect("ftp", helped, hostPort(caller, 21), "outside", hostPort(caller, 21))
	if err != nil {
		return err
	}
	var line string
	lines := bufio.NewReader(server)
	for _, say := range []string{"USER anonymous\r\n", "PORT 10,1,10,3,156,66\r\n"} { // the kernel's helper parses lines after the first one
		if _, err = client.Write([]byte(say)); err != nil {
			return err
		}
		if line, err = lines.ReadString('\n'); err != nil {
			return err
		}
	}
	var a, b, c, d, high, low int
	if _, err = fmt.Sscanf(line, "PORT %d,%d,%d,%d,%d,%d", &a, &b, &c, &d, &high, &low); err != nil {
		return fmt.Errorf("%q: %w", line, err)
	}
	to := hostPort(fmt.Sprintf("%d.%d.%d.%d", a, b, c, d), uint16(high<<8|low))
	_, _, err = p.connect("outside", caller, to, "ftp", hostPort(helped, 40002))
	return err
}

// peers are the two ends of an exchange: the client at caller, the server at helped.
type peers struct {
	*bench
	port    uint16
	timeout time.Duration
	open    []io.Closer
}

func (p *peers) close() {
	for _, c := range p.open {
		c.Close()
	}
}

// mortal limits the life of a socket to the peers' timeout.
func mortal[C interface {
	io.Closer
	SetDeadline(time.Time) error
}](p *peers, c C, err error) (C, error) {
	if err != nil {
		return c, err
	}
	p.open = append(p.open, c)
	return c, c.SetDeadline(time.Now().Add(p.timeout))
}

// packet opens a datagram or raw socket in a node.
func (p *peers) packet(node, network, address string) (c net.PacketConn, err error) {
	err = p.lab.Node(node).Do(func() (err error) {
		c, err = net.ListenPacket(network, address)
		return err
	})
	return mortal(p, c, err)
}

// datagrams opens the client's socket and the server's.
func (p *peers) datagrams() (client, server net.PacketConn, err error) {
	if server, err = p.packet("ftp", "udp", hostPort(helped, p.port)); err == nil {
		client, err = p.packet("outside", "udp", caller+":0")
	}
	return client, server, err
}

// streams connects the client to the published server.
func (p *peers) streams() (client, server net.Conn, err error) {
	client, server, err = p.connect("outside", caller, hostPort(published, p.port), "ftp", hostPort(helped, p.port))
	return client, server, err
}

// connect opens a TCP connection that must reach the listener at another address.
func (p *peers) connect(node, from, to, atNode, at string) (client, server net.Conn, err error) {
	l, err := p.lab.Node(atNode).Listen(at)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	client, err = p.dialFor(p.timeout, "tcp", node, from, to)
	if client, err = mortal(p, client, err); err != nil {
		return nil, nil, err
	}
	if err = l.(*net.TCPListener).SetDeadline(time.Now().Add(p.timeout)); err == nil {
		server, err = l.Accept()
	}
	server, err = mortal(p, server, err)
	return client, server, err
}

func hostPort(host string, port uint16) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

func udpAddr(a string) net.Addr { return net.UDPAddrFromAddrPort(netip.MustParseAddrPort(a)) }

// pass sends a datagram and returns the received payload and its source.
func pass(from net.PacketConn, to net.Addr, payload []byte, at net.PacketConn) ([]byte, net.Addr, error) {
	if _, err := from.WriteTo(payload, to); err != nil {
		return nil, nil, err
	}
	buf := make([]byte, 2000)
	n, sender, err := at.ReadFrom(buf)
	return buf[:n], sender, err
}

// ftp asks for a passive data connection (RFC 959 section 4.1.2, PASV).
func (p *peers) ftp() error {
	client, server, err := p.streams()
	if err != nil {
		return err
	}
	r := bufio.NewReader(client)
	fmt.Fprint(server, "220 ready\r\n") // the helper parses lines after the first one
	if _, err := r.ReadString('\n'); err != nil {
		return err
	}
	fmt.Fprintf(server, "227 Entering Passive Mode (%s,%d,%d)\r\n", strings.ReplaceAll(helped, ".", ","), 40001>>8, 40001&255)
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	var n [6]byte
	if _, err := fmt.Sscanf(line[strings.Index(line, "("):], "(%d,%d,%d,%d,%d,%d)", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5]); err != nil {
		return err
	}
	to := fmt.Sprintf("%d.%d.%d.%d:%d", n[0], n[1], n[2], n[3], int(n[4])<<8|int(n[5]))
	if !strings.HasPrefix(to, published+":") {
		return fmt.Errorf("the client is told to connect to %s", to)
	}
	_, _, err = p.connect("outside", caller, to, "ftp", hostPort(helped, 40001))
	return err
}

// tftp reads a file: the server answers from another port (RFC 1350 section 4).
func (p *peers) tftp() error {
	client, server, err := p.datagrams()
	if err != nil {
		return err
	}
	_, from, err := pass(client, udpAddr(hostPort(published, p.port)), []byte("\x00\x01file\x00octet\x00"), server)
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	transfer, err := p.packet("ftp", "udp", helped+":0")
	if err != nil {
		return err
	}
	_, sender, err := pass(transfer, from, []byte("\x00\x03\x00\x01a file"), client)
	if err != nil {
		return fmt.Errorf("data: %w", err)
	}
	if host, _, _ := net.SplitHostPort(sender.String()); host != published {
		return fmt.Errorf("data came from %s", sender)
	}
	if _, _, err = pass(client, sender, []byte("\x00\x04\x00\x01"), transfer); err != nil {
		return fmt.Errorf("acknowledgement: %w", err)
	}
	return nil
}

// sip invites the server to a call (RFC 3261, RFC 4566). A media datagram must then reach the address in the
// answer, and another one must return.
func (p *peers) sip() error {
	client, server, err := p.datagrams()
	if err != nil {
		return err
	}
	me := client.LocalAddr().String()
	message := func(first, contact string, sound int) []byte {
		sdp := fmt.Sprintf("v=0\r\no=- 1 1 IN IP4 %[1]s\r\ns=-\r\nc=IN IP4 %[1]s\r\nt=0 0\r\nm=audio %[2]d RTP/AVP 0\r\n", contact, sound)
		return fmt.Appendf(nil, "%s\r\nVia: SIP/2.0/UDP %s;branch=z9hG4bK1\r\nFrom: <sip:a@%[2]s>;tag=1\r\nTo: <sip:b@%[3]s>\r\n"+
			"Call-ID: %[2]s\r\nCSeq: 1 INVITE\r\nContact: <sip:x@%[4]s>\r\nContent-Type: application/sdp\r\nContent-Length: %[5]d\r\n\r\n%[6]s",
			first, me, published, contact, len(sdp), sdp)
	}
	_, from, err := pass(client, udpAddr(hostPort(published, p.port)), message("INVITE sip:b@"+published+" SIP/2.0", caller, 4000), server)
	if err != nil {
		return fmt.Errorf("invitation: %w", err)
	}
	answer, _, err := pass(server, from, message("SIP/2.0 200 OK", helped, 6000), client)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	host, port := "", 0
	for line := range strings.Lines(string(answer)) {
		if rest, ok := strings.CutPrefix(line, "c=IN IP4 "); ok {
			host = strings.TrimSpace(rest)
		}
		if rest, ok := strings.CutPrefix(line, "m=audio "); ok {
			_, err = fmt.Sscan(rest, &port)
		}
	}
	if err != nil || host != published {
		return fmt.Errorf("the client is told to send sound to %s port %d, %v", host, port, err)
	}
	speaker, err := p.packet("outside", "udp", caller+":4000")
	if err != nil {
		return err
	}
	listener, err := p.packet("ftp", "udp", helped+":6000")
	if err != nil {
		return err
	}
	to := udpAddr(hostPort(host, uint16(port)))
	_, from, err = pass(speaker, to, []byte("\x80\x00sound"), listener)
	if err != nil {
		return fmt.Errorf("sound to the server: %w", err)
	}
	if _, sender, err := pass(listener, from, []byte("\x80\x00sound"), speaker); err != nil || sender.String() != to.String() {
		return fmt.Errorf("sound to the client: from %v, %v", sender, err)
	}
	return nil
}

// irc offers a file: the other user connects to the address in the offer. For clients behind fullnat it is the
// gateway's address (the DCC extension of CTCP).
func (p *peers) irc() error {
	client, server, err := p.streams()
	if err != nil {
		return err
	}
	const port = 40002
	fmt.Fprintf(client, "PRIVMSG bob :\x01DCC SEND file %d %d 6\x01\r\n", binary.BigEndian.Uint32(addr(caller).AsSlice()), port)
	line, err := bufio.NewReader(server).ReadString('\n')
	if err != nil {
		return err
	}
	var ip uint32
	var offered uint16
	if _, err := fmt.Sscanf(line, "PRIVMSG bob :\x01DCC SEND file %d %d", &ip, &offered); err != nil {
		return fmt.Errorf("%q: %w", line, err)
	}
	at := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, ip)))
	if at != addr(inner) {
		return fmt.Errorf("the server is told to connect to %s", at)
	}
	_, _, err = p.connect("ftp", helped, hostPort(at.String(), offered), "outside", hostPort(caller, port))
	return err
}

// amanda requests a backup from a host, which answers with the ports for the data connections.
func (p *peers) amanda() error {
	client, server, err := p.datagrams()
	if err != nil {
		return err
	}
	_, from, err := pass(client, udpAddr(hostPort(published, p.port)), []byte("Amanda 2.6 REQ HANDLE 000-0 SEQ 0\nSERVICE sendbackup\n"), server)
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	answer, _, err := pass(server, from, []byte("Amanda 2.6 REP HANDLE 000-0 SEQ 0\nCONNECT DATA 50001 MESG 50002 INDEX 50003\n"), client)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	for i, word := range []string{"DATA ", "MESG ", "INDEX "} {
		_, rest, _ := bytes.Cut(answer, []byte(word))
		var port uint16
		if _, err := fmt.Sscan(string(rest), &port); err != nil {
			return fmt.Errorf("%q: %w", answer, err)
		}
		if _, _, err := p.connect("outside", caller, hostPort(published, port), "ftp", hostPort(helped, uint16(50001+i))); err != nil {
			return fmt.Errorf("%s: %w", word, err)
		}
	}
	return nil
}

// snmp sends an SNMPv2 trap (RFC 3416 section 4.2.6) with the variable snmpTrapAddress (RFC 3584 section
// 5.2.2.1). Its value must be the source address of the packet.
func (p *peers) snmp() error {
	client, server, err := p.datagrams()
	if err != nil {
		return err
	}
	ber := func(tag byte, parts ...string) string { // basic encoding rules, up to 127 bytes
		body := strings.Join(parts, "")
		return string([]byte{tag, byte(len(body))}) + body
	}
	const sequence, integer, octets, object, ipAddress, trap = 0x30, 0x02, 0x04, 0x06, 0x40, 0xa7
	variable := ber(sequence, ber(object, "\x2b\x06\x01\x06\x03\x12\x01\x03\x00"), ber(ipAddress, string(addr(caller).AsSlice())))
	message := ber(sequence, ber(integer, "\x01"), ber(octets, "public"),
		ber(trap, ber(integer, "\x07"), ber(integer, "\x00"), ber(integer, "\x00"), ber(sequence, variable)))
	got, from, err := pass(client, udpAddr(hostPort(published, p.port)), []byte(message), server)
	if err != nil {
		return err
	}
	if host, _, _ := net.SplitHostPort(from.String()); host != inner || !bytes.HasSuffix(got, addr(inner).AsSlice()) {
		return fmt.Errorf("from %s: % x", from, got)
	}
	return nil
}

// Message types of RFC 2637 section 2.
const (
	pptpStartRequest, pptpStartReply = 1, 2
	pptpCallRequest, pptpCallReply   = 7, 8
)
