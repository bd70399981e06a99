// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// wire is a raw socket on an interface of a host. The stack of the host drops all input.
type wire struct {
	t   *testing.T
	fd  int
	mac net.HardwareAddr
	gw  net.HardwareAddr
}

func openWire(t *testing.T, n *lab.Node, iface string, gw net.HardwareAddr) *wire {
	t.Helper()
	command(t, n, "table ip silent {\n chain in {\n type filter hook input priority 0; policy drop\n}\n}\n", "nft", "-f", "-")
	dev, err := n.Interface(iface)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{t: t, mac: dev.HardwareAddr, gw: gw}
	err = n.Do(func() (err error) {
		w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20),
			unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: 0x0008, Ifindex: dev.Index})) // ETH_P_IP
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(w.fd) })
	return w
}

// send sends an IPv4 packet to the router.
func (w *wire) send(ip []byte) {
	w.t.Helper()
	frame := slices.Concat(w.gw, w.mac, []byte{8, 0}, ip)
	if _, err := unix.Write(w.fd, frame); err != nil && !errors.Is(err, unix.EMSGSIZE) {
		w.t.Fatal(err)
	}
}

// received returns the frames of the other hosts that have arrived, without ICMP, by their IPv4 identification.
func (w *wire) received() map[uint16][]string {
	out := map[uint16][]string{}
	b := make([]byte, 4096)
	for quiet := 0; quiet < 20; {
		n, from, err := unix.Recvfrom(w.fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			quiet++
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if err != nil {
			w.t.Fatal(err)
		}
		quiet = 0
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING || n < 34 || b[23] == unix.IPPROTO_ICMP {
			continue
		}
		id := binary.BigEndian.Uint16(b[18:])
		out[id] = append(out[id], string(b[:n]))
	}
	return out
}

// segment is a packet before its bytes.
type segment struct {
	from, to  netip.AddrPort
	proto     byte
	id        uint16
	ttl, tos  byte
	frag      uint16
	options   int // bytes of IP options
	flags     byte
	seq, ack  uint32
	payload   []byte
	noSum     bool // UDP without checksum
	badSum    bool
	badIPSum  bool
	udpLength int // added to the length field
	padding   int // bytes behind the packet
}

func sumOf(parts ...[]byte) uint16 {
	var s uint32
	for _, p := range parts {
		for i := 0; i < len(p); i += 2 {
			v := uint32(p[i]) << 8
			if i+1 < len(p) {
				v |= uint32(p[i+1])
			}
			s += v
		}
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

func (s segment) bytes() []byte {
	from, to := s.from.Addr().As4(), s.to.Addr().As4()
	var l4 []byte
	at := 6
	if s.proto == unix.IPPROTO_UDP {
		l4 = make([]byte, 8, 8+len(s.payload))
		binary.BigEndian.PutUint16(l4[4:], uint16(8+len(s.payload)+s.udpLength))
	} else {
		at = 16
		l4 = make([]byte, 20, 20+len(s.payload))
		binary.BigEndian.PutUint32(l4[4:], s.seq)
		binary.BigEndian.PutUint32(l4[8:], s.ack)
		l4[12], l4[13] = 5<<4, s.flags
		binary.BigEndian.PutUint16(l4[14:], 65535)
	}
	binary.BigEndian.PutUint16(l4, s.from.Port())
	binary.BigEndian.PutUint16(l4[2:], s.to.Port())
	l4 = append(l4, s.payload...)
	pseudo := slices.Concat(from[:], to[:], []byte{0, s.proto, byte(len(l4) >> 8), byte(len(l4))})
	sum := sumOf(pseudo, l4)
	if s.proto == unix.IPPROTO_UDP && sum == 0 {
		sum = 0xffff
	}
	if s.badSum {
		sum ^= 0x1234
	}
	if !s.noSum {
		binary.BigEndian.PutUint16(l4[at:], sum)
	}
	ip := make([]byte, 20+s.options)
	ip[0], ip[1] = byte(0x40+len(ip)/4), s.tos
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(l4)))
	binary.BigEndian.PutUint16(ip[4:], s.id)
	binary.BigEndian.PutUint16(ip[6:], s.frag)
	ip[8], ip[9] = s.ttl, s.proto
	copy(ip[12:], from[:])
	copy(ip[16:], to[:])
	for i := 20; i < len(ip); i++ {
		ip[i] = 1 // no operation
	}
	binary.BigEndian.PutUint16(ip[10:], sumOf(ip))
	if s.badIPSum {
		ip[10] ^= 0x55
	}
	return slices.Concat(ip, l4, make([]byte, s.padding))
}

// conversation is a connection in the view of both hosts: "there" are the endpoints at the client, "back" at the server.
type conversation struct {
	proto                            byte
	client, service, outside, server netip.AddrPort
}

// establish opens the connections, so that connection tracking calls them assured.
func (p *passage) establish() {
	for round := range 3 {
		for _, c := range p.all {
			there := segment{from: c.client, to: c.service, proto: c.proto, ttl: 64, flags: 0x10, seq: 1001, ack: 5001, id: 0}
			back := segment{from: c.server, to: c.outside, proto: c.proto, ttl: 64, flags: 0x10, seq: 5001, ack: 1001, id: 0}
			if round == 0 {
				there.flags, there.seq, back.flags, back.seq = 0x02, 1000, 0x12, 5000
			}
			p.client.send(there.bytes())
			time.Sleep(time.Millisecond) // the router handles it before the answer
			p.server.send(back.bytes())
		}
		if round == 1 {
			time.Sleep(2200 * time.Millisecond) // the kernel calls UDP assured after two seconds
		}
	}
	p.client.received()
	p.server.received()
}

// talk sends ordinary packets in both directions.
func (p *passage) talk(packets int) {
	for range packets {
		for _, c := range p.all {
			p.client.send(segment{from: c.client, to: c.service, proto: c.proto, ttl: 64, flags: 0x10, seq: 1001, ack: 5001}.bytes())
			p.server.send(segment{from: c.server, to: c.outside, proto: c.proto, ttl: 64, flags: 0x10, seq: 5001, ack: 1001}.bytes())
		}
	}
}

// strange returns a random packet of a connection. Most are ordinary.
func strange(r *rand.Rand, from, to netip.AddrPort, proto byte, id uint16, seq, ack uint32) segment {
	s := segment{from: from, to: to, proto: proto, id: id, ttl: 64, flags: 0x10, seq: seq, ack: ack}
	s.payload = make([]byte, r.IntN([]int{1, 20, 200, 1473}[r.IntN(4)]))
	for i := range s.payload {
		s.payload[i] = byte(r.Uint32())
	}
	if proto == unix.IPPROTO_TCP {
		s.payload = s.payload[:min(len(s.payload), 1460)]
		s.seq += uint32(r.IntN(30000)) // within the window: the kernel alone drops others
	}
	if r.IntN(2) == 0 {
		s.tos, s.frag = byte(r.Uint32()), 0x4000
	}
	switch r.IntN(24) {
	case 0:
		s.ttl = byte(r.IntN(4))
	case 1:
		s.badSum = true
	case 2:
		s.badIPSum = true
	case 3:
		s.noSum = proto == unix.IPPROTO_UDP
	case 4:
		s.options = 4 * r.IntN(4)
	case 5:
		s.padding = r.IntN(40)
	case 6:
		s.udpLength = r.IntN(9) - 4
	case 7:
		if proto == unix.IPPROTO_TCP {
			s.flags = []byte{0x18, 0x30, 0x38, 0x50, 0x90, 0x00, 0x08, 0x20, 0x3a, 0xff}[r.IntN(8)]
		}
	case 8:
		s.ttl = 255
	case 9:
		s.padding, s.payload = 18, s.payload[:0]
	case 10:
		s.frag = 0x8000
	case 11:
		if proto == unix.IPPROTO_UDP && len(s.payload) > 1 {
			// A checksum of zero is transmitted as 0xffff.
			binary.BigEndian.PutUint16(s.payload, 0)
			from, to := from.Addr().As4(), to.Addr().As4()
			length := 8 + len(s.payload)
			head := []byte{byte(s.from.Port() >> 8), byte(s.from.Port()), byte(s.to.Port() >> 8), byte(s.to.Port()), byte(length >> 8), byte(length), 0, 0}
			binary.BigEndian.PutUint16(s.payload, sumOf(from[:], to[:], []byte{0, proto, byte(length >> 8), byte(length)}, head, s.payload))
		}
	}
	return s
}

// passage is a network between the two hosts of a comparison.
type passage struct {
	router         *lab.Node
	client, server *wire
	all            []conversation
}

// exchange sends the same random packets in both directions and returns the arrivals at both hosts.
func (p *passage) exchange(seed uint64, packets int) (out [2]map[uint16][]string) {
	r := rand.New(rand.NewPCG(seed, 1))
	for id := 1; id <= packets; id++ {
		c := p.all[r.IntN(len(p.all))]
		if r.IntN(2) == 0 {
			p.client.send(strange(r, c.client, c.service, c.proto, uint16(id), 1001, 5001).bytes())
		} else {
			p.server.send(strange(r, c.server, c.outside, c.proto, uint16(id), 5001, 1001).bytes())
		}
		if id%64 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	return [2]map[uint16][]string{p.client.received(), p.server.received()}
}

// identical sends packets without and with acceleration and compares them, frame by frame.
func (p *passage) identical(t *testing.T, hook string) {
	packets := 20000
	if testing.Short() {
		packets = 2000
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	p.establish()
	plain := p.exchange(seed, packets)
	flush(t, p.router)
	a := begin(t, p.router)
	p.establish()
	labtest.Eventually(t, patience, "fast flows", func() error {
		p.talk(20)
		if s := a.status(); s.Fast < 2*len(p.all) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	p.client.received()
	p.server.received()
	before := a.status()
	fast := p.exchange(seed, packets)
	s := a.status()
	by := map[string]uint64{hookXDP: s.XDP - before.XDP, hookTC: s.TC - before.TC}
	if by[hook] < uint64(packets)/10 { // usually 80 %; fewer if this machine does not run the process for 5 seconds
		t.Errorf("%d packets of %d took the fast path of %s: %+v", by[hook], packets, hook, s)
	}
	wrong, arrived := 0, 0
	for side, name := range []string{"client", "server"} {
		for id := 1; id <= packets; id++ {
			one, two := plain[side][uint16(id)], fast[side][uint16(id)]
			arrived += len(two)
			if !slices.Equal(one, two) {
				if wrong++; wrong <= 5 {
					t.Errorf("packet %d at the %s:\nwithout acceleration %d %x\nwith                 %d %x", id, name, len(one), one, len(two), two)
				}
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d packets differ", wrong)
	}
	t.Logf("%d of %d packets arrived, %v took the fast path", arrived, packets, by)
	if arrived < packets/2 {
		t.Errorf("only %d of %d packets arrived", arrived, packets)
	}
}

func flush(t *testing.T, n *lab.Node) {
	t.Helper()
	command(t, n, "", "conntrack", "-F")
}

// TestIdenticalPackets compares the packets that both hosts receive behind a masquerading router, with and without
// acceleration.
func TestIdenticalPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("conntrack"))
	l := labtest.New(t, router())
	n := l.Node("router")
	rules["nft"](t, n)
	p := &passage{router: n, client: openWire(t, l.Node("client"), "eth0", macIn(t, n, "lan0")), server: openWire(t, l.Node("server"), "eth0", macIn(t, n, "wan0"))}
	for i := range 6 {
		proto := []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}[i%2]
		from := uint16(40000 + i)
		service := netip.AddrPortFrom(netip.MustParseAddr("10.0.2.2"), 7)
		p.all = append(p.all, conversation{proto: proto, client: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.2"), from),
			service: service, server: service, outside: netip.AddrPortFrom(netip.MustParseAddr("10.0.2.1"), from)})
	}
	p.identical(t, hookXDP)
}

func macIn(t *testing.T, n *lab.Node, iface string) net.HardwareAddr {
	t.Helper()
	dev, err := n.Interface(iface)
	if err != nil {
		t.Fatal(err)
	}
	return dev.HardwareAddr
}
