// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// bench is a lab with a datapath on its gateway.
type bench struct {
	testing.TB
	lab     *lab.Lab
	gateway *lab.Node
	d       *Datapath
	rev     uint64
}

// newBench builds a topology and opens the datapath on its node "gateway".
func newBench(t testing.TB, topology lab.Topology) *bench {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	topology.Name = "nft"
	l := labtest.New(t, topology)
	b := &bench{TB: t, lab: l, gateway: l.Node("gateway")}
	b.d = b.open()
	return b
}

func (b *bench) open() *Datapath {
	b.Helper()
	var d *Datapath
	err := b.gateway.Do(func() (err error) {
		d, err = Open()
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = d.Close() })
	return d
}

// snapshot makes a snapshot of services (all backends up), NAT and firewall rules.
func (b *bench) snapshot(c *config.Config) *datapath.Snapshot {
	b.rev++
	s := &datapath.Snapshot{Revision: b.rev, Config: c}
	for i := range c.Services {
		s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: make([]datapath.State, len(c.Services[i].Backends))})
	}
	for i := range c.NAT {
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	for i := range c.Firewall.Rules {
		s.Rules = append(s.Rules, &c.Firewall.Rules[i])
	}
	return s
}

// apply applies a configuration with all backends up.
func (b *bench) apply(c *config.Config) *datapath.Snapshot {
	b.Helper()
	s := b.snapshot(c)
	b.applySnapshot(s)
	return s
}

func (b *bench) applySnapshot(s *datapath.Snapshot) *datapath.Change {
	b.Helper()
	change, err := b.d.Apply(context.Background(), s)
	if err != nil {
		b.Fatalf("apply: %v", err)
	}
	return change
}

// ruleset returns nft's listing of the gateway.
func (b *bench) ruleset() string {
	b.Helper()
	labtest.Require(b, labtest.Tool("nft"))
	out, err := b.gateway.Command(context.Background(), "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		b.Fatalf("nft list ruleset: %v\n%s", err, out)
	}
	return string(out)
}

// tcpServers answer every connection to addr with "NAME CLIENT\n", where CLIENT
// is the address that the server sees; the node's name is NAME.
func (b *bench) tcpServers(port int, nodes ...string) {
	b.Helper()
	for _, name := range nodes {
		l, err := b.lab.Node(name).Listen(fmt.Sprintf("[::]:%d", port))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					fmt.Fprintf(c, "%s %s\n", name, unmap(c.RemoteAddr().(*net.TCPAddr).AddrPort()))
					_, _ = io.Copy(c, c)
				}()
			}
		}()
	}
}

// udpServers answer every datagram with "NAME CLIENT PAYLOAD".
func (b *bench) udpServers(port int, nodes ...string) {
	b.Helper()
	b.udpServersAt(fmt.Sprintf("[::]:%d", port), nodes...)
}

func (b *bench) udpServersAt(at string, nodes ...string) {
	b.Helper()
	for _, name := range nodes {
		pc, err := b.lab.Node(name).ListenPacket(at)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { pc.Close() })
		go func() {
			buf := make([]byte, 65536)
			for {
				n, from, err := pc.ReadFrom(buf)
				if err != nil {
					return
				}
				fmt.Fprintf(packetTo{pc, from}, "%s %s %s", name, unmap(from.(*net.UDPAddr).AddrPort()), buf[:n])
			}
		}()
	}
}

type packetTo struct {
	net.PacketConn
	to net.Addr
}

func (p packetTo) Write(b []byte) (int, error) { return p.WriteTo(b, p.to) }

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// answer is the name of the server, and the client address that it saw.
type answer struct {
	server string
	client netip.AddrPort
}

// tcp opens a connection from the node, optionally from a source, and returns the answer.
func (b *bench) tcp(node, from, to string) (answer, error) {
	c, err := b.dial("tcp", node, from, to)
	if err != nil {
		return answer{}, err
	}
	defer c.Close()
	line, err := bufio.NewReader(c).ReadString('\n')
	return parseAnswer(line, err)
}

// echo sends a line over an open connection and waits until it is back.
func echo(c net.Conn) error {
	if _, err := c.Write([]byte("ping\n")); err != nil {
		return err
	}
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		if lines.Text() == "ping" { // after the server's first line
			return nil
		}
	}
	return cmp.Or(lines.Err(), io.ErrUnexpectedEOF)
}

// udp sends a datagram and returns the answer.
func (b *bench) udp(node, from, to string) (answer, error) {
	c, err := b.dial("udp", node, from, to)
	if err != nil {
		return answer{}, err
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return answer{}, err
	}
	buf := make([]byte, 2000)
	n, err := c.Read(buf)
	return parseAnswer(string(buf[:n]), err)
}

func parseAnswer(line string, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	f := strings.Fields(line)
	if len(f) < 2 {
		return answer{}, fmt.Errorf("answer %q", line)
	}
	client, err := netip.ParseAddrPort(f[1])
	return answer{f[0], client}, err
}

// trafficTimeout is the timeout for an answer in a lab. If no answer is expected, the test waits for silence
// only.
const trafficTimeout, silence = 30 * time.Second, 500 * time.Millisecond

// dial connects from a node; from is "", an address or an address with port.
func (b *bench) dial(network, node, from, to string) (net.Conn, error) {
	return b.dialWithin(trafficTimeout, network, node, from, to)
}

// dialWithin is dial with a timeout for the connection and its answer.
func (b *bench) dialWithin(timeout time.Duration, network, node, from, to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	d := &net.Dialer{}
	if from != "" {
		local, err := netip.ParseAddrPort(from)
		if err != nil {
			a, err := netip.ParseAddr(from)
			if err != nil {
				return nil, err
			}
			local = netip.AddrPortFrom(a, 0)
		}
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(local)
		} else {
			d.LocalAddr = net.TCPAddrFromAddrPort(local)
		}
	}
	c, err := b.lab.Node(node).Dial(ctx, d, network, to)
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Now().Add(timeout))
}

// spread makes n connections and counts them by server.
func (b *bench) spread(n int, ask func(i int) (answer, error)) map[string]int {
	b.Helper()
	count := make(map[string]int)
	for i := range n {
		a, err := ask(i)
		if err != nil {
			b.Fatalf("request %d of %d: %v\n%s", i+1, n, err, b.ruleset())
		}
		count[a.server]++
	}
	return count
}

// Shorthand for configurations.

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func listen(address string, ports ...string) config.Listen {
	l := config.Listen{Address: addr(address)}
	for _, p := range ports {
		r, err := flow.ParsePorts(p)
		if err != nil {
			panic(err)
		}
		l.Ports = append(l.Ports, r)
	}
	return l
}

func backend(name, address string, port uint16) config.Backend {
	return config.Backend{Name: name, Address: addr(address), Port: port, Weight: 1, Priority: 1}
}

func one(s config.Service) *config.Config { return &config.Config{Services: []config.Service{s}} }

// udpChecksum is udp, optionally without a checksum (SO_NO_CHECK).
func (b *bench) udpChecksum(node, from, to string, without bool) (answer, error) {
	c, err := b.dial("udp", node, from, to)
	if err != nil {
		return answer{}, err
	}
	defer c.Close()
	if without {
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return answer{}, err
		}
		var opt error
		err = raw.Control(func(fd uintptr) { opt = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_NO_CHECK, 1) })
		if err := errors.Join(err, opt); err != nil {
			return answer{}, err
		}
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		return answer{}, err
	}
	buf := make([]byte, 2000)
	n, err := c.Read(buf)
	return parseAnswer(string(buf[:n]), err)
}

// flows counts the connections that the gateway tracks.
func (b *bench) flows() int {
	b.Helper()
	n := 0
	err := b.gateway.Do(func() error {
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		n += len(list)
		if err != nil {
			return err
		}
		list, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET6)
		n += len(list)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// ping sends an ICMP echo request and waits for the answer.
func (b *bench) ping(node, to string) error { return b.pingFor(trafficTimeout, node, to) }

func (b *bench) pingFor(timeout time.Duration, node, to string) error {
	network, protocol, request, reply := "ip4:icmp", 1, icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply)
	if addr(to).Is6() {
		network, protocol, request, reply = "ip6:ipv6-icmp", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	var c net.PacketConn
	err := b.lab.Node(node).Do(func() (err error) {
		c, err = net.ListenPacket(network, "")
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	echo := icmp.Message{Type: request, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("sluice")}}
	wire, err := echo.Marshal(nil) // the kernel fills in the checksum of ICMPv6
	if err != nil {
		return err
	}
	if _, err := c.WriteTo(wire, &net.IPAddr{IP: addr(to).AsSlice()}); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		if m, err := icmp.ParseMessage(protocol, buf[:n]); err == nil && m.Type == reply {
			if from.String() != to {
				return fmt.Errorf("answer from %v", from)
			}
			return nil
		}
	}
}

// prefixT shortens tables of prefixes.
type prefixT = netip.Prefix

// dialIf is dialFor with a long timeout if the connection is expected to open, and a short one otherwise.
func (b *bench) dialIf(opens bool, network, node, from, to string) (net.Conn, error) {
	if opens {
		return b.dialFor(trafficTimeout, network, node, from, to)
	}
	return b.dialFor(silence, network, node, from, to)
}

// dialFor is dial with a timeout, for connections without an expected answer.
func (b *bench) dialFor(timeout time.Duration, network, node, from, to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	d := &net.Dialer{}
	if from != "" {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr(from), 0))
	}
	c, err := b.lab.Node(node).Dial(ctx, d, network, to)
	if err == nil {
		b.Cleanup(func() { c.Close() })
	}
	return c, err
}

// tracked lists the IPv4 connections that the gateway tracks.
func (b *bench) tracked() (list []*netlink.ConntrackFlow) {
	b.Helper()
	err := b.gateway.Do(func() (err error) {
		list, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return list
}

func (b *bench) eventually(what string, condition func() bool) {
	b.Helper()
	labtest.Eventually(b, time.Minute, what, func() error {
		if !condition() {
			return errors.New("not yet")
		}
		return nil
	})
}

// segment sends one TCP segment that belongs to no connection.
func (b *bench) segment(node, from, to string, flags byte) error {
	src, dst := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h[0:], src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	h[12], h[13], h[15] = 5<<4, flags, 100
	return b.raw(node, "tcp", src.Addr(), dst.Addr(), h, 16)
}

// datagram sends one UDP datagram from a port that may be in use.
func (b *bench) datagram(node, from, to string) error {
	src, dst := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	h := append(make([]byte, 8), "hello!"...)
	binary.BigEndian.PutUint16(h[0:], src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	h[5] = byte(len(h))
	return b.raw(node, "udp", src.Addr(), dst.Addr(), h, 6)
}

// raw sends a TCP or UDP packet and fills in the checksum.
func (b *bench) raw(node, protocol string, src, dst netip.Addr, h []byte, check int) error {
	number, network := map[string]byte{"tcp": 6, "udp": 17}[protocol], "ip4:"+protocol
	if src.Is6() {
		network = "ip6:" + protocol
	}
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, number, 0, byte(len(h)))
	binary.BigEndian.PutUint16(h[check:], ^onesSum(append(pseudo, h...)))
	var c *net.IPConn
	err := b.lab.Node(node).Do(func() (err error) {
		c, err = net.DialIP(network, &net.IPAddr{IP: src.AsSlice()}, &net.IPAddr{IP: dst.AsSlice()})
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Write(h)
	return err
}

// npt66 implements RFC 6296 section 3.1 for prefixes of up to 48 bits, independently of the code.
func npt66(a netip.Addr, from, to netip.Prefix) netip.Addr {
	sum := func(a netip.Addr) (s uint32) {
		b := a.As16()
		for i := 0; i < 16; i += 2 {
			s += uint32(binary.BigEndian.Uint16(b[i:]))
		}
		return s % 0xffff
	}
	out := a.As16()
	prefix := to.Addr().As16()
	copy(out[:6], prefix[:6])
	word := uint32(binary.BigEndian.Uint16(out[6:])) + sum(from.Addr()) + 0xffff - sum(to.Addr())
	binary.BigEndian.PutUint16(out[6:], uint16(word%0xffff))
	return netip.AddrFrom16(out)
}
