// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// Probe opens one connection by a SYN, a datagram or an echo request. Every packet that leaves the
// gateway is answered.
type Probe struct {
	// In is the interface where the probe arrives; empty for a socket of the gateway itself.
	In               string
	FromMAC, ToMAC   packet.MAC
	Src, Dst         netip.Addr
	Protocol         flow.Protocol // TCP, UDP or ICMP.
	SrcPort, DstPort uint16        // SrcPort 0: the next free one.
}

// MarshalText returns the text of String.
func (p Probe) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// String describes the probe for the report.
func (p Probe) String() string {
	from := "of the gateway itself"
	if p.In != "" {
		from = "by " + p.In
	}
	if p.Protocol == flow.ICMP || p.Protocol == flow.ICMPv6 {
		return fmt.Sprintf("ping %s > %s %s", p.Src, p.Dst, from)
	}
	if p.In == "" {
		return fmt.Sprintf("%s > %s %s", p.Protocol, netip.AddrPortFrom(p.Dst, p.DstPort), from)
	}
	return fmt.Sprintf("%s %s > %s %s", p.Protocol, netip.AddrPortFrom(p.Src, p.SrcPort), netip.AddrPortFrom(p.Dst, p.DstPort), from)
}

// probeMSS is the option of the SYNs, in bytes, for an Ethernet MTU.
const probeMSS = 1460

// frame builds the probe's first packet.
func (p Probe) frame() []byte {
	var ip packet.Layer = &packet.IPv4{Src: p.Src, Dst: p.Dst, TTL: 63, ID: 1}
	if p.Dst.Is6() {
		ip = &packet.IPv6{Src: p.Src, Dst: p.Dst, HopLimit: 63}
	}
	list := packet.Packet{&packet.Ethernet{Src: p.FromMAC, Dst: p.ToMAC}, ip}
	switch p.Protocol {
	case flow.TCP:
		option := binary.BigEndian.AppendUint16([]byte{2, 4}, probeMSS)
		list = append(list, &packet.TCP{SrcPort: p.SrcPort, DstPort: p.DstPort, Flags: packet.SYN, Seq: 1000, Window: 65535, Options: option})
	case flow.UDP:
		list = append(list, &packet.UDP{SrcPort: p.SrcPort, DstPort: p.DstPort}, &packet.Data{Bytes: packet.Pattern(8)})
	default:
		kind := uint8(8)
		if p.Dst.Is6() {
			kind = 128
		}
		list = append(list, &packet.ICMP{V6: p.Dst.Is6(), Type: kind, Rest: uint32(p.SrcPort)<<16 | 1}, &packet.Data{Bytes: packet.Pattern(8)})
	}
	return list.Build()
}

// runProbe sends a probe, answers the packets that leave the gateway, and returns all frames as text.
func (g *gateway) runProbe(p Probe, anyPort bool) (seen []string, err error) {
	var out []model.Departure
	if p.In == "" {
		var done func()
		if out, done, err = g.fromInside(p); err != nil {
			return nil, err
		}
		defer done()
	} else if out, err = g.sendFrame(model.Arrival{Interface: p.In, Frame: p.frame()}); err != nil {
		return nil, err
	}
	for _, d := range out {
		if !isARP(d) {
			seen = append(seen, p.describeFrame(d, anyPort))
		}
	}
	for _, d := range out {
		answer, ok := answerTo(d.Frame)
		if !ok {
			continue
		}
		back, err := g.sendFrame(model.Arrival{Interface: d.Interface, Frame: answer})
		if err != nil {
			return nil, err
		}
		for _, d := range back {
			if !isARP(d) {
				seen = append(seen, "answer: "+p.describeFrame(d, anyPort && p.In == ""))
			}
		}
	}
	return seen, nil
}

// fromInside opens a connection from a socket of the gateway. Done closes it.
func (g *gateway) fromInside(p Probe) (out []model.Departure, done func(), err error) {
	fd := -1
	err = g.inNamespace(func() (err error) {
		family, kind := unix.AF_INET, unix.SOCK_DGRAM
		var local, remote unix.Sockaddr = &unix.SockaddrInet4{Port: int(p.SrcPort)}, &unix.SockaddrInet4{Port: int(p.DstPort), Addr: [4]byte{}}
		if p.Dst.Is6() {
			family = unix.AF_INET6
			local, remote = &unix.SockaddrInet6{Port: int(p.SrcPort)}, &unix.SockaddrInet6{Port: int(p.DstPort), Addr: p.Dst.As16()}
		} else {
			remote.(*unix.SockaddrInet4).Addr = p.Dst.As4()
		}
		if p.Protocol == flow.TCP {
			kind = unix.SOCK_STREAM
		}
		if fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
			unix.Bind(fd, local)); err != nil {
			return err
		}
		if kind == unix.SOCK_DGRAM {
			err = unix.Sendto(fd, packet.Pattern(8), 0, remote)
		} else {
			err = unix.Connect(fd, remote)
		}
		if err != nil && !errors.Is(err, unix.EINPROGRESS) {
			return nil // a rule refuses it: nothing leaves
		}
		return nil
	})
	done = func() {
		unix.Close(fd)
		_, _ = g.receivedFrames() // a reset, which is not compared
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, nil, err
	}
	if out, err = g.receivedFrames(); err != nil {
		done()
	}
	return out, done, err
}

// answerTo returns the reply of a host to a SYN, a datagram or an echo request.
func answerTo(frame []byte) ([]byte, bool) {
	p := packet.Parse(frame)
	if len(p) < 3 {
		return nil, false
	}
	eth, ok := p[0].(*packet.Ethernet)
	if !ok {
		return nil, false
	}
	answer := packet.Packet{&packet.Ethernet{Src: eth.Dst, Dst: eth.Src}}
	switch ip := p[1].(type) {
	case *packet.IPv4:
		answer = append(answer, &packet.IPv4{Src: ip.Dst, Dst: ip.Src, TTL: 63, ID: 2})
	case *packet.IPv6:
		answer = append(answer, &packet.IPv6{Src: ip.Dst, Dst: ip.Src, HopLimit: 63})
	default:
		return nil, false
	}
	switch l := p[2].(type) {
	case *packet.TCP:
		if l.Flags != packet.SYN {
			return nil, false
		}
		option := binary.BigEndian.AppendUint16([]byte{2, 4}, probeMSS)
		return append(answer, &packet.TCP{SrcPort: l.DstPort, DstPort: l.SrcPort, Flags: packet.SYN | packet.ACK, Seq: 5000, Ack: l.Seq + 1, Window: 65535, Options: option}).Build(), true
	case *packet.UDP:
		return append(answer, &packet.UDP{SrcPort: l.DstPort, DstPort: l.SrcPort}, &packet.Data{Bytes: packet.Pattern(8)}).Build(), true
	case *packet.ICMP:
		if l.Type != 8 && l.Type != 128 {
			return nil, false
		}
		kind := uint8(0)
		if l.V6 {
			kind = 129
		}
		return append(answer, &packet.ICMP{V6: l.V6, Type: kind, Rest: l.Rest}, &packet.Data{Bytes: packet.Pattern(8)}).Build(), true
	}
	return nil, false
}

// isARP reports whether a frame is ARP. The kernel and the eBPF datapath resolve neighbours at different times.
func isARP(d model.Departure) bool {
	list := packet.Parse(d.Frame)
	if len(list) < 2 {
		return false
	}
	_, is := list[1].(*packet.ARP)
	return is
}

// describeFrame describes a frame by its interface, addresses, ports and kind. With anyPort the source port is
// left out if the source address was replaced.
func (p Probe) describeFrame(d model.Departure, anyPort bool) string {
	list := packet.Parse(d.Frame)
	var src, dst netip.Addr
	if len(list) > 1 {
		switch ip := list[1].(type) {
		case *packet.IPv4:
			src, dst = ip.Src, ip.Dst
		case *packet.IPv6:
			src, dst = ip.Src, ip.Dst
		}
	}
	port := func(n uint16) string {
		if anyPort && src != p.Src {
			return "any"
		}
		return fmt.Sprint(n)
	}
	about := ""
	for _, l := range list[min(len(list), 2):] {
		switch l := l.(type) {
		case *packet.TCP:
			about = fmt.Sprintf("tcp %s > %d flags %s", port(l.SrcPort), l.DstPort, l.Flags)
			if o := l.Options; len(o) >= 4 && o[0] == 2 {
				about += fmt.Sprintf(" mss %d", binary.BigEndian.Uint16(o[2:]))
			}
		case *packet.UDP:
			about = fmt.Sprintf("udp %s > %d", port(l.SrcPort), l.DstPort)
		case *packet.ICMP:
			about = fmt.Sprintf("icmp type %d code %d", l.Type, l.Code)
		default:
			continue
		}
		break
	}
	return fmt.Sprintf("out %s: %s > %s %s", d.Interface, src, dst, about)
}
