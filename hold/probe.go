// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Duplicate address detection. RFC 5227 §1.1 waits for seconds, because hundreds of hosts may start at once. A
// service cannot wait that long, and stations on an Ethernet answer within milliseconds.
const (
	probeTimes = 3 // RFC 5227 §1.1, PROBE_NUM
	probeEach  = 200 * time.Millisecond
)

// htons converts a 16-bit number to network byte order.
func htons(v uint16) uint16 { return v<<8 | v>>8 }

// packetSocket is a packet socket on an interface.
type packetSocket struct {
	fd      int
	station probeInterface
}

// openWire opens a wire for frames of a type; 0 opens a socket that only sends.
func openWire(s probeInterface, etherType uint16) (*packetSocket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("interface %s: packet socket: %w", s.name, err)
	}
	w := &packetSocket{fd, s}
	if etherType == 0 {
		return w, nil
	}
	if err := w.listen(etherType); err != nil {
		w.close()
		return nil, fmt.Errorf("interface %s: packet socket: %w", s.name, err)
	}
	return w, nil
}

func (w *packetSocket) listen(etherType uint16) error {
	if etherType == unix.ETH_P_IPV6 {
		// Other stations probe by multicast groups that this host has not joined, and the interface may be busy.
		all := unix.PacketMreq{Ifindex: int32(w.station.ifindex), Type: unix.PACKET_MR_ALLMULTI}
		if err := unix.SetsockoptPacketMreq(w.fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &all); err != nil {
			return err
		}
		if err := unix.SetsockoptSockFprog(w.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, discovery()); err != nil {
			return err
		}
	}
	_ = unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20) // a smaller buffer holds the answers of fewer addresses
	return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: htons(etherType), Ifindex: w.station.ifindex})
}

// discovery is a filter that accepts neighbour solicitations and advertisements.
func discovery() *unix.SockFprog {
	const load, equal, answer = unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	code := []unix.SockFilter{
		{Code: load, K: 14 + 6}, // next header
		{Code: equal, Jf: 4, K: 58},
		{Code: load, K: 14 + 40}, // ICMPv6 type
		{Code: equal, Jt: 1, K: solicitation},
		{Code: equal, Jf: 1, K: advertisement},
		{Code: answer, K: 1 << 16},
		{Code: answer, K: 0},
	}
	return &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
}

func (w *packetSocket) close() { unix.Close(w.fd) }

// send sends a frame. It waits if the queue is full.
func (w *packetSocket) send(frame []byte) error {
	to := &unix.SockaddrLinklayer{Protocol: htons(uint16(frame[12])<<8 | uint16(frame[13])), Ifindex: w.station.ifindex, Halen: 6}
	copy(to.Addr[:], frame[:6])
	for tries := 0; ; tries++ {
		err := unix.Sendto(w.fd, frame, 0, to)
		if tries == 100 || !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// receive reads a frame, or returns nil if none is available.
func (w *packetSocket) receive(b []byte) []byte {
	n, _, err := unix.Recvfrom(w.fd, b, 0)
	if err != nil {
		return nil
	}
	return b[:n]
}

// probe probes on an interface for stations with the addresses. It returns the addresses in use with the hardware
// address of their station. own are the host's own hardware addresses: their frames do not count.
func probe(s probeInterface, addresses []netip.Addr, own map[string]bool) (map[netip.Addr]string, error) {
	asked := map[netip.Addr]bool{}
	types := map[uint16]bool{}
	for _, a := range addresses {
		asked[a] = true
		types[etherTypeOf(a)] = true
	}
	var wires []*packetSocket
	defer func() {
		for _, w := range wires {
			w.close()
		}
	}()
	for t := range types {
		w, err := openWire(s, t)
		if err != nil {
			return nil, err
		}
		wires = append(wires, w)
	}
	taken := map[netip.Addr]string{}
	for range probeTimes {
		for _, a := range addresses {
			if taken[a] != "" {
				continue
			}
			if err := wires[0].send(probeFrame(s.mac, a)); err != nil {
				return nil, fmt.Errorf("interface %s: probe for %s: %w", s.name, a, err)
			}
		}
		receiveFrames(wires, probeEach, func(frame []byte) {
			if a, mac, ok := claimedAddress(frame); ok && asked[a] && !own[mac] {
				taken[a] = net.HardwareAddr(mac).String()
			}
		})
	}
	return taken, nil
}

func etherTypeOf(a netip.Addr) uint16 {
	if a.Is4() {
		return unix.ETH_P_ARP
	}
	return unix.ETH_P_IPV6
}

// receiveFrames calls frame for each received frame during wait.
func receiveFrames(wires []*packetSocket, wait time.Duration, frame func([]byte)) {
	polls := make([]unix.PollFd, len(wires))
	for i, w := range wires {
		polls[i] = unix.PollFd{Fd: int32(w.fd), Events: unix.POLLIN}
	}
	b := make([]byte, 2048)
	for end := time.Now().Add(wait); ; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		if n, err := unix.Poll(polls, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			time.Sleep(left)
			return
		} else if n <= 0 {
			continue
		}
		for _, w := range wires {
			for f := w.receive(b); f != nil; f = w.receive(b) {
				frame(f)
				if time.Now().After(end) {
					return
				}
			}
		}
	}
}
