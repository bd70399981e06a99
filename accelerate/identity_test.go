// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// arrivals waits until the router and the hosts have handled all packets, and returns the frames at both hosts since the
// last call. A frame is in the queue of the CPU that handled the one before it, so there are barriers from each CPU: for
// the packets to the router, for the router's to the hosts, and again, because the router may hold segments back.
func (p *passage) arrivals() (out [2]map[uint16][]string) {
	p.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &all) }() // of the same thread as before
	for range 2 {
		for _, w := range []*wire{p.client, p.server} {
			for cpu, left := 0, all.Count(); left > 0; cpu++ {
				if !all.IsSet(cpu) {
					continue
				}
				left--
				one.Zero()
				one.Set(cpu)
				if err := unix.SchedSetaffinity(0, &one); err != nil {
					p.t.Fatal(err)
				}
				w.barrier()
			}
		}
	}
	for i, w := range []*wire{p.client, p.server} {
		for w.readable(20) {
			w.read(nil)
		}
		out[i], w.arrived = w.arrived, map[uint16][]string{}
	}
	return out
}

// conversation is a connection in the view of both hosts.
type conversation struct {
	proto           byte
	client, service netip.AddrPort
	// outside and server are both endpoints in the view of the server; invalid if the first packet does not arrive.
	outside, server netip.AddrPort
	// passes reports whether established packets arrive at the client and at the server.
	passes [2]bool
}

// translated reports whether a NAT rule applies to the connection.
func (c *conversation) translated() bool {
	return c.server.IsValid() && (c.client != c.outside || c.service != c.server)
}

const (
	flagSYN = 0x02
	flagACK = 0x10
)

// Identifications of the first connection's packets. The packets of exchange have smaller ones, so a delayed frame is
// not taken for another one.
const (
	opening     = 0xf000
	established = 0xf400
	talking     = 0xf800
)

// send sends one packet of each connection, to the server or to the client.
func (p *passage) send(toServer bool, flags byte, first uint16) {
	for i := range p.all {
		c := &p.all[i]
		s := segment{from: c.client, to: c.service, proto: c.proto, id: first + uint16(i), ttl: 64, flags: flags, seq: 1001, ack: 5001}
		if !toServer {
			s.from, s.to, s.seq, s.ack = c.server, c.outside, 5001, 1001
		}
		if flags&flagSYN != 0 {
			s.seq--
		}
		if toServer {
			p.client.send(s.bytes())
		} else if c.server.IsValid() {
			p.server.send(s.bytes())
		}
	}
}

// establish opens the connections, so that connection tracking calls them assured. It records their translations and
// the directions in which established packets pass.
func (p *passage) establish() {
	p.t.Helper()
	for _, name := range []string{"udp_timeout", "udp_timeout_stream"} { // longer than the comparison
		if err := p.router.Sysctl("net.netfilter.nf_conntrack_"+name, "3600"); err != nil {
			p.t.Fatal(err)
		}
	}
	for range 3 { // the first packets may wait for the address resolution of the router
		p.send(true, flagSYN, opening)
		for id, frames := range p.arrivals()[1] {
			if i := int(id) - opening; i >= 0 && i < len(p.all) {
				p.all[i].outside, p.all[i].server = endpoints([]byte(frames[0]))
			}
		}
	}
	p.send(false, flagSYN|flagACK, opening)
	p.arrivals() // the router has handled it before the acknowledgement
	p.send(true, flagACK, opening)
	p.send(false, flagACK, opening)
	p.arrivals()
	assure(p.t, p.router)
	p.send(true, flagACK, established)
	p.send(false, flagACK, established)
	for side, arrived := range p.arrivals() {
		for i := range p.all {
			p.all[i].passes[side] = len(arrived[established+uint16(i)]) > 0
		}
	}
}

// assure makes answered UDP connections assured. The kernel does this for a packet after two seconds.
func assure(t *testing.T, n *lab.Node) {
	t.Helper()
	err := n.Do(func() error {
		c, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		var requests []*nl.NetlinkRequest
		err = c.Dump(t.Context(), nil, func(e *conntrack.Entry) error {
			if e.Protocol != unix.IPPROTO_UDP || e.Status&(conntrack.SeenReply|conntrack.Assured) != conntrack.SeenReply {
				return nil
			}
			number := func(kind int, n uint16) *nl.RtAttr {
				return nl.NewRtAttr(kind, binary.BigEndian.AppendUint16(nil, n))
			}
			source, dest := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
			if e.Family == unix.AF_INET6 {
				source, dest = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
			}
			tuple := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_ORIG, nil)
			ip := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
			ip.AddRtAttr(source, e.Original.Source.Netip().AsSlice())
			ip.AddRtAttr(dest, e.Original.Dest.Netip().AsSlice())
			proto := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
			proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
			proto.AddChild(number(nl.CTA_PROTO_SRC_PORT, e.Original.SourcePort))
			proto.AddChild(number(nl.CTA_PROTO_DST_PORT, e.Original.DestPort))
			r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK)
			r.AddData(&nl.Nfgenmsg{NfgenFamily: e.Family, Version: nl.NFNETLINK_V0})
			r.AddData(tuple)
			r.AddData(nl.NewRtAttr(nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, uint32(e.Status|conntrack.Assured))))
			requests = append(requests, r)
			return nil
		})
		for _, r := range requests {
			_, failed := r.Execute(unix.NETLINK_NETFILTER, 0)
			err = errors.Join(err, failed)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// endpoints returns the source and the destination of a frame without IP options.
func endpoints(frame []byte) (from, to netip.AddrPort) {
	if binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IPV6 {
		at := func(address, port int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(frame[address:])), binary.BigEndian.Uint16(frame[port:]))
		}
		return at(22, 54), at(38, 56)
	}
	at := func(address, port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(frame[address:])), binary.BigEndian.Uint16(frame[port:]))
	}
	return at(26, 34), at(30, 36)
}

// strange returns a random packet of a connection. Most are ordinary.
func strange(r *rand.Rand, from, to netip.AddrPort, proto byte, id uint16, seq, ack uint32) segment {
	s := segment{from: from, to: to, proto: proto, id: id, ttl: 64, flags: 0x10, seq: seq, ack: ack}
	s.payload = make([]byte, r.IntN([]int{1, 20, 200, 1473}[r.IntN(4)]))
	for i := range s.payload {
		s.payload[i] = byte(r.Uint32())
	}
	if from.Addr().Is6() {
		s.payload = s.payload[:min(len(s.payload), 1453)] // one byte above the MTU
	}
	if proto == unix.IPPROTO_TCP {
		s.payload = s.payload[:min(len(s.payload), 1460)]
		s.seq += uint32(r.IntN(30000)) // within the window: the kernel alone drops others
	}
	if r.IntN(2) == 0 {
		s.tos, s.frag = byte(r.IntN(4)), 0x4000 // the bits of ECN
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
	case 12:
		s.tos = byte(r.Uint32())
	case 11:
		if proto == unix.IPPROTO_UDP && len(s.payload) > 1 {
			// A checksum of zero is transmitted as 0xffff.
			binary.BigEndian.PutUint16(s.payload, 0)
			from, to := from.Addr().AsSlice(), to.Addr().AsSlice()
			length := 8 + len(s.payload)
			head := []byte{byte(s.from.Port() >> 8), byte(s.from.Port()), byte(s.to.Port() >> 8), byte(s.to.Port()), byte(length >> 8), byte(length), 0, 0}
			binary.BigEndian.PutUint16(s.payload, sumOf(from, to, []byte{0, proto, byte(length >> 8), byte(length)}, head, s.payload))
		}
	}
	return s
}

// passage is a network between the two hosts of a comparison.
type passage struct {
	t              *testing.T
	router         *lab.Node
	client, server *wire
	all            []conversation
}

// exchange sends the same random packets in both directions and returns the arrivals at both hosts. The packets have
// the identifications from first on.
func (p *passage) exchange(seed uint64, first, packets int) (out [2]map[uint16][]string) {
	r := rand.New(rand.NewPCG(seed, 1))
	for id := first; id < first+packets; id++ {
		c := p.all[r.IntN(len(p.all))]
		if back := r.IntN(2) == 0; back && c.server.IsValid() {
			p.server.send(strange(r, c.server, c.outside, c.proto, uint16(id), 5001, 1001).bytes())
		} else {
			p.client.send(strange(r, c.client, c.service, c.proto, uint16(id), 1001, 5001).bytes())
		}
		if id%32 == 0 { // the queues of veths have 256 places
			p.client.barrier()
			p.server.barrier()
		}
	}
	return p.arrivals()
}

// learnable returns the number of directions that the accelerator learns.
func (p *passage) learnable() (n int) {
	for i := range p.all {
		for _, passes := range p.all[i].passes {
			if passes && p.all[i].translated() {
				n++
			}
		}
	}
	return n
}

// identical sends the same packets of the same connections without and with acceleration, and compares the arrivals
// frame by frame. All translated connections become fast. It returns the packets that took each hook.
func (p *passage) identical(packets int, seed uint64) (by map[string]uint64) {
	t := p.t
	t.Helper()
	p.establish()
	p.exchange(seed+1, packets+1, packets/10) // packets that a rule treats as the first ones
	plain := p.exchange(seed, 1, packets)
	a := begin(t, p.router)
	want := p.learnable()
	labtest.Eventually(t, patience, "fast flows", func() error {
		for range 20 {
			p.send(true, flagACK, talking)
			p.send(false, flagACK, talking)
		}
		s := a.status()
		excluded := 0
		for _, f := range s.Flows {
			if strings.HasPrefix(f.Why, "rule ") {
				excluded++
			}
		}
		if s.Fast+excluded < want {
			return fmt.Errorf("%d flows of %d are fast: %+v", s.Fast, want, s)
		}
		return nil
	})
	p.arrivals()
	before := a.status()
	fast := p.exchange(seed, 1, packets)
	s := a.status()
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
	by = map[string]uint64{hookXDP: s.XDP - before.XDP, hookTC: s.TC - before.TC}
	t.Logf("seed %d: %d of %d packets arrived, %v took the fast path, %d flows of %d connections", seed, arrived, packets, by, want, len(p.all))
	return by
}

// identicalBy is identical with many packets of which a hook forwards most.
func (p *passage) identicalBy(hook string) {
	p.t.Helper()
	const packets = 6000
	by := p.identical(packets, uint64(time.Now().UnixNano()))
	if by[hook] < uint64(packets)/10 { // usually 80 %; fewer if this machine does not run the process for 5 seconds
		p.t.Errorf("%d packets of %d took the fast path of %s", by[hook], packets, hook)
	}
	if p.learnable() != 2*len(p.all) {
		p.t.Errorf("not all connections were established: %+v", p.all)
	}
}

// TestIdenticalPackets compares the packets that both hosts receive behind a masquerading router, with and without
// acceleration.
func TestIdenticalPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	p := passageOf(t, labtest.New(t, router()))
	rules["nft"](t, p.router)
	for i := range 12 {
		p.connect([]byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}[i%2], []string{"10.0.2.2:7", "[fd00:2::2]:7"}[i/6])
	}
	p.identicalBy(hookXDP)
}

// passageOf returns the passage from the client to the server of a router's lab.
func passageOf(t *testing.T, l *lab.Lab) *passage {
	t.Helper()
	n := l.Node("router")
	return &passage{t: t, router: n, client: openWire(t, l.Node("client"), "eth0", macIn(t, n, "lan0")), server: openWire(t, l.Node("server"), "eth0", macIn(t, n, "wan0"))}
}

// connect adds a connection from the client to a service.
func (p *passage) connect(proto byte, service string) {
	to, from := netip.MustParseAddrPort(service), netip.MustParseAddr("10.0.1.2")
	if to.Addr().Is6() {
		from = netip.MustParseAddr("fd00:1::2")
	}
	p.all = append(p.all, conversation{proto: proto, client: netip.AddrPortFrom(from, uint16(40000+len(p.all))), service: to})
}

func macIn(t *testing.T, n *lab.Node, iface string) net.HardwareAddr {
	t.Helper()
	dev, err := n.Interface(iface)
	if err != nil {
		t.Fatal(err)
	}
	return dev.HardwareAddr
}
