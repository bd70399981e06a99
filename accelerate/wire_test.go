// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

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
	// arrived are the frames of the other hosts since the last call of passage.arrivals, by IPv4 identification or IPv6
	// flow label.
	arrived  map[uint16][]string
	barriers uint16
}

func openWire(t *testing.T, n *lab.Node, iface string, gw net.HardwareAddr) *wire {
	t.Helper()
	command(t, n, "table inet silent {\n chain in {\n type filter hook input priority 0; policy drop\n icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept\n}\n}\n", "nft", "-f", "-")
	dev, err := n.Interface(iface)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{t: t, mac: dev.HardwareAddr, gw: gw, arrived: map[uint16][]string{}}
	err = n.Do(func() (err error) {
		w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20),
			unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: dev.Index})) // ETH_P_ALL
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(w.fd) })
	return w
}

// send sends a packet to the router.
func (w *wire) send(ip []byte) {
	w.t.Helper()
	kind := []byte{8, 0}
	if ip[0]>>4 == 6 {
		kind = []byte{0x86, 0xdd}
	}
	w.write(slices.Concat(w.gw, w.mac, kind, ip))
}

func (w *wire) write(frame []byte) {
	w.t.Helper()
	if _, err := unix.Write(w.fd, frame); err != nil && !errors.Is(err, unix.EMSGSIZE) {
		w.t.Fatal(err)
	}
}

// barrier asks the router for its address and reads frames until the answer. The answer is behind the frames that
// earlier packets have caused in the queues of the calling thread's CPU.
func (w *wire) barrier() {
	w.t.Helper()
	w.barriers++
	asker := []byte{2, 0, 0, 0, byte(w.barriers >> 8), byte(w.barriers)}
	question := slices.Concat(w.gw, w.mac, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, asker, make([]byte, 4+6), []byte{10, 0, 1, 1})
	labtest.Eventually(w.t, patience, "an answer of the router", func() error {
		w.write(question) // again if a queue was full
		for w.readable(200) {
			if w.read(asker) {
				return nil
			}
		}
		return errors.New("no answer")
	})
}

// readable waits for a frame for a number of milliseconds.
func (w *wire) readable(milliseconds int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}, milliseconds)
	return n > 0 || errors.Is(err, unix.EINTR)
}

// read reads one frame and reports whether it is the answer to an asker. ICMP is ignored.
func (w *wire) read(asker []byte) bool {
	w.t.Helper()
	b := make([]byte, 4096)
	n, from, err := unix.Recvfrom(w.fd, b, 0)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return false
	}
	if err != nil {
		w.t.Fatal(err)
	}
	if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING || n < 34 {
		return false
	}
	switch kind := binary.BigEndian.Uint16(b[12:]); {
	case kind == unix.ETH_P_ARP:
		return b[21] == 2 && bytes.Equal(b[32:38], asker)
	case kind == unix.ETH_P_IP && b[23] != unix.IPPROTO_ICMP:
		id := binary.BigEndian.Uint16(b[18:])
		w.arrived[id] = append(w.arrived[id], string(b[:n]))
	case kind == unix.ETH_P_IPV6 && b[20] != unix.IPPROTO_ICMPV6:
		id := binary.BigEndian.Uint16(b[16:])
		w.arrived[id] = append(w.arrived[id], string(b[:n]))
	}
	return false
}

// segment is a packet before its bytes.
type segment struct {
	from, to  netip.AddrPort
	proto     byte
	id        uint16
	ttl, tos  byte
	frag      uint16
	options   int // bytes of IP options, or of an extension header
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
	from, to := s.from.Addr().AsSlice(), s.to.Addr().AsSlice()
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
	pseudo := slices.Concat(from, to, []byte{0, s.proto, byte(len(l4) >> 8), byte(len(l4))})
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
	if s.from.Addr().Is6() {
		head := []byte{0x60 | s.tos>>4, s.tos << 4, byte(s.id >> 8), byte(s.id), 0, 0, s.proto, s.ttl}
		var extension []byte
		if s.options > 0 {
			head[6] = unix.IPPROTO_DSTOPTS
			extension = []byte{s.proto, 0, 1, 4, 0, 0, 0, 0} // one option of padding
		}
		binary.BigEndian.PutUint16(head[4:], uint16(len(extension)+len(l4)))
		return slices.Concat(head, from, to, extension, l4, make([]byte, s.padding))
	}
	ip := make([]byte, 20+s.options)
	ip[0], ip[1] = byte(0x40+len(ip)/4), s.tos
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(l4)))
	binary.BigEndian.PutUint16(ip[4:], s.id)
	binary.BigEndian.PutUint16(ip[6:], s.frag)
	ip[8], ip[9] = s.ttl, s.proto
	copy(ip[12:], from)
	copy(ip[16:], to)
	for i := 20; i < len(ip); i++ {
		ip[i] = 1 // no operation
	}
	binary.BigEndian.PutUint16(ip[10:], sumOf(ip))
	if s.badIPSum {
		ip[10] ^= 0x55
	}
	return slices.Concat(ip, l4, make([]byte, s.padding))
}
