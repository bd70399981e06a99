// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/packet"
)

// wire is the far end of every link of a gateway: it sends frames, records what arrives and answers
// address resolution as the hosts on the links would.
type wire struct {
	fd      int
	links   map[string]int // interface index by link
	names   map[int]string
	silent  map[station]bool       // hosts that answer nothing
	moved   map[station]packet.MAC // hosts with another hardware address
	arrived []frame                // not compared yet

	unanswered time.Time // of the last question for an address that no host has
}

// station is one address on a link.
type station struct {
	link    string
	address netip.Addr
}

// frame is one that a gateway sent on a link.
type frame struct {
	link  string
	bytes []byte
}

// newWire opens the far ends. It must run in their namespace.
func newWire(links map[string]int) (*wire, error) {
	const everything = 0x0003 // ETH_P_ALL
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(swap16(everything)))
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	w := &wire{fd: fd, links: links, names: map[int]string{}}
	w.reset()
	for name, index := range links {
		w.names[index] = name
	}
	const ignoreOutgoing = 23 // PACKET_IGNORE_OUTGOING
	if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, ignoreOutgoing, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	return w, nil
}

func swap16(v uint16) uint16 { return v<<8 | v>>8 }

func (w *wire) reset() {
	w.silent, w.moved = map[station]bool{}, map[station]packet.MAC{}
}

// virtioHeader is the length in bytes of struct virtio_net_hdr (linux/virtio_net.h), which precedes each frame of the
// socket.
const virtioHeader = 10

// send sends a complete frame.
func (w *wire) send(link string, b []byte) error {
	return w.sendWith(make([]byte, virtioHeader), link, b)
}

// sendWith sends a frame with a virtio header, which requests checksum and segmentation offloads.
func (w *wire) sendWith(header []byte, link string, b []byte) error {
	index, ok := w.links[link]
	if !ok {
		return fmt.Errorf("no link %q", link)
	}
	err := unix.Sendto(w.fd, append(header, b...), 0, &unix.SockaddrLinklayer{Ifindex: index, Halen: 6})
	// ENETDOWN: the link is down. ENOBUFS: the frame is larger than the gateway's end takes.
	if errors.Is(err, unix.ENETDOWN) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOBUFS) {
		return nil
	}
	return err
}

// completed fills in the checksum that the sender left to the network card.
func completed(header, b []byte) []byte {
	if header[0]&unix.VIRTIO_NET_HDR_F_NEEDS_CSUM == 0 {
		return b
	}
	start, offset := int(binary.NativeEndian.Uint16(header[6:])), int(binary.NativeEndian.Uint16(header[8:]))
	if start+offset+2 > len(b) {
		return b
	}
	binary.BigEndian.PutUint16(b[start+offset:], packet.Checksum(b[start:])) // the field has the sum of the pseudo header
	return b
}

// drain reads the received frames, and answers address resolution.
func (w *wire) drain() error {
	b := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(w.fd, b, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENETDOWN):
			continue
		case err != nil:
			return fmt.Errorf("packet socket: %w", err)
		}
		link := w.names[from.(*unix.SockaddrLinklayer).Ifindex]
		if link == "" { // the loopback interface of the far namespace
			continue
		}
		if n < virtioHeader {
			continue
		}
		f := frame{link, completed(b[:virtioHeader], slices.Clone(b[virtioHeader:n]))}
		w.arrived = append(w.arrived, f)
		if answer := w.answer(f); answer != nil {
			if err := w.send(f.link, answer); err != nil {
				return err
			}
		} else if asks(packet.Parse(f.bytes)) {
			w.unanswered = time.Now()
		}
	}
}

// await waits until something arrives, for at most d.
func (w *wire) await(d time.Duration) {
	p := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_, _ = unix.Ppoll(p, &ts, nil)
}

// answer is what the host that is asked for replies to address resolution; nil when there is none.
func (w *wire) answer(f frame) []byte {
	p := packet.Parse(f.bytes)
	eth, ok := packet.Find[*packet.Ethernet](p)
	if !ok {
		return nil
	}
	if a, ok := packet.Find[*packet.ARP](p); ok && a.Operation == 1 {
		mac, ok := w.macOf(f.link, a.Target)
		if !ok {
			return nil
		}
		return packet.Packet{&packet.Ethernet{Src: mac, Dst: eth.Src},
			&packet.ARP{Operation: 2, SenderMAC: mac, Sender: a.Target, TargetMAC: a.SenderMAC, Target: a.Sender}}.Build()
	}
	i, ok := packet.Find[*packet.ICMP](p)
	ip, ok6 := packet.Find[*packet.IPv6](p)
	d, hasTarget := packet.Find[*packet.Data](p)
	if !ok || !ok6 || !hasTarget || !i.V6 || i.Type != 135 || len(d.Bytes) < 16 || ip.Src.IsUnspecified() {
		return nil
	}
	target := netip.AddrFrom16([16]byte(d.Bytes[:16]))
	mac, ok := w.macOf(f.link, target)
	if !ok {
		return nil
	}
	const solicitedOverride = 0x60000000
	body := append(append([]byte(nil), d.Bytes[:16]...), 2, 1)
	body = append(body, mac[:]...)
	return packet.Packet{&packet.Ethernet{Src: mac, Dst: eth.Src}, &packet.IPv6{Src: target, Dst: ip.Src, HopLimit: 255},
		&packet.ICMP{V6: true, Type: 136, Rest: solicitedOverride}, &packet.Data{Bytes: body}}.Build()
}

// macOf returns the hardware address of a host on a link; false when no host answers.
func (w *wire) macOf(link string, a netip.Addr) (packet.MAC, bool) {
	s := station{link, a}
	if w.silent[s] {
		return packet.MAC{}, false
	}
	if mac, ok := w.moved[s]; ok {
		return mac, true
	}
	return hostMAC(link, a)
}

// answers reports whether a host on a link has a hardware address.
func (w *wire) answers(link string, mac packet.MAC) bool {
	for _, a := range neighbours[link] {
		if has, ok := w.macOf(link, netip.MustParseAddr(a)); ok && has == mac {
			return true
		}
	}
	return false
}

// hostMAC is the hardware address that a host of the topology has; false where there is none.
func hostMAC(link string, a netip.Addr) (packet.MAC, bool) {
	b := a.AsSlice()
	last := b[len(b)-1]
	on := func(prefix string) bool { return netip.MustParsePrefix(prefix).Contains(a) }
	here := false
	for _, prefix := range networks[link] {
		here = here || on(prefix)
	}
	if !here || last < 2 || last > 19 {
		return packet.MAC{}, false
	}
	return packet.MAC{2, 0, 0, 0, linkNumber[link], last}, true
}
