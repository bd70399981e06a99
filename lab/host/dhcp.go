// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

// DHCP emulates any number of DHCP clients (RFC 2131) at one interface of a node, each with a hardware address of its
// own. It asks for broadcast answers, so that the interface needs no address.
type DHCP struct {
	conn net.PacketConn

	mu      sync.Mutex // protects waiting and next
	waiting map[uint32]chan dhcpReply
	next    uint32 // transaction id
}

// Lease is an address that a DHCP server has assigned to a client.
type Lease struct {
	Client  net.HardwareAddr
	Address netip.Prefix
	Router  netip.Addr
	DNS     netip.Addr
	Server  netip.Addr
	Time    time.Duration
}

// dhcpReply is one message of a server.
type dhcpReply struct {
	kind  byte
	lease Lease
}

// Message types and options of RFC 2132.
const (
	dhcpDiscover, dhcpOffer, dhcpRequest, dhcpAck, dhcpNak = 1, 2, 3, 5, 6

	optMask, optRouter, optDNS, optAddress, optLeaseTime, optKind, optServer, optParameters, optEnd = 1, 3, 6, 50, 51, 53, 54, 55, 255
)

// dhcpCookie precedes the options of a message.
var dhcpCookie = []byte{99, 130, 83, 99}

// dhcpHeader is the length of a message before the cookie.
const dhcpHeader = 236

// dhcpTimeout is the wait for an answer before the message is repeated.
const dhcpTimeout = time.Second

// OpenDHCP opens the clients' socket at an interface.
func OpenDHCP(n *lab.Node, iface string) (*DHCP, error) {
	control := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var set error
		err := raw.Control(func(fd uintptr) {
			set = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
				unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, iface))
		})
		return errors.Join(err, set)
	}}
	d := &DHCP{waiting: map[uint32]chan dhcpReply{}, next: uint32(time.Now().UnixNano())}
	err := n.Do(func() (err error) {
		d.conn, err = control.ListenPacket(context.Background(), "udp4", "0.0.0.0:68")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dhcp clients at %s: %w", iface, err)
	}
	go d.receive()
	return d, nil
}

// Close ends all clients; their leases stay at the server.
func (d *DHCP) Close() error { return d.conn.Close() }

// Lease obtains an address for a client: discover, offer, request, acknowledgement. It waits until ctx ends.
func (d *DHCP) Lease(ctx context.Context, client net.HardwareAddr) (Lease, error) {
	offer, err := d.exchange(ctx, Lease{Client: client}, dhcpDiscover, dhcpOffer)
	if err != nil {
		return Lease{}, err
	}
	return d.exchange(ctx, offer, dhcpRequest, dhcpAck)
}

// Renew extends a lease by a request from the leased address to its server. The address must belong to the node.
func (d *DHCP) Renew(ctx context.Context, l Lease) (Lease, error) {
	return d.exchange(ctx, l, dhcpRequest|renewal, dhcpAck)
}

// renewal marks a request for an address in use.
const renewal = 0x80

// exchange sends a message until it is answered.
func (d *DHCP) exchange(ctx context.Context, l Lease, kind, want byte) (Lease, error) {
	answers := make(chan dhcpReply, 4)
	d.mu.Lock()
	d.next++
	id := d.next
	d.waiting[id] = answers
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.waiting, id)
		d.mu.Unlock()
	}()
	to := &net.UDPAddr{IP: net.IPv4bcast, Port: 67}
	if kind&renewal != 0 {
		to.IP = l.Server.AsSlice()
	}
	for {
		if _, err := d.conn.WriteTo(dhcpMessage(id, l, kind), to); err != nil {
			return Lease{}, fmt.Errorf("dhcp client %s: %w", l.Client, err)
		}
		repeat := time.After(dhcpTimeout)
	wait:
		for {
			select {
			case a := <-answers:
				if a.kind == dhcpNak {
					return Lease{}, fmt.Errorf("dhcp client %s: %s is refused", l.Client, l.Address)
				}
				if a.kind == want {
					a.lease.Client = l.Client
					return a.lease, nil
				}
			case <-repeat:
				break wait
			case <-ctx.Done():
				return Lease{}, fmt.Errorf("dhcp client %s: no answer: %w", l.Client, ctx.Err())
			}
		}
	}
}

// dhcpMessage encodes a message of a client.
func dhcpMessage(id uint32, l Lease, kind byte) []byte {
	m := make([]byte, dhcpHeader, 300)
	m[0], m[1], m[2] = 1, 1, 6 // request, Ethernet, length of its addresses
	binary.BigEndian.PutUint32(m[4:], id)
	copy(m[28:], l.Client)
	m = append(m, dhcpCookie...)
	m = append(m, optKind, 1, kind&^renewal, optParameters, 3, optMask, optRouter, optDNS)
	switch {
	case kind&renewal != 0:
		copy(m[12:16], l.Address.Addr().AsSlice())
	default:
		m[10] = 0x80 // broadcast the answer
		if kind == dhcpRequest {
			m = append(append(m, optAddress, 4), l.Address.Addr().AsSlice()...)
			m = append(append(m, optServer, 4), l.Server.AsSlice()...)
		}
	}
	m = append(m, optEnd)
	return append(m, make([]byte, 300-len(m))...) // the minimum of BOOTP (RFC 1542, section 2.1)
}

// receive passes answers to the clients that wait for them.
func (d *DHCP) receive() {
	packet := make([]byte, 2048)
	for {
		n, _, err := d.conn.ReadFrom(packet)
		if err != nil {
			return // closed
		}
		id, reply, ok := parseDHCP(packet[:n])
		if !ok {
			continue
		}
		d.mu.Lock()
		answers := d.waiting[id]
		d.mu.Unlock()
		select {
		case answers <- reply: // nil for a stranger's or a repeated answer
		default:
		}
	}
}

// parseDHCP decodes a message of a server.
func parseDHCP(m []byte) (id uint32, r dhcpReply, ok bool) {
	if len(m) < dhcpHeader+len(dhcpCookie) || m[0] != 2 || !bytes.Equal(m[dhcpHeader:][:4], dhcpCookie) {
		return 0, r, false
	}
	address, bits := netip.AddrFrom4([4]byte(m[16:20])), 32
	for rest := m[dhcpHeader+len(dhcpCookie):]; len(rest) > 0 && rest[0] != optEnd; {
		if rest[0] == 0 { // padding
			rest = rest[1:]
			continue
		}
		if len(rest) < 2 || len(rest) < 2+int(rest[1]) {
			return 0, r, false
		}
		code, value := rest[0], rest[2:2+int(rest[1])]
		rest = rest[2+len(value):]
		switch {
		case code == optKind && len(value) == 1:
			r.kind = value[0]
		case len(value) < 4:
		case code == optMask:
			bits, _ = net.IPMask(value[:4]).Size()
		case code == optRouter:
			r.lease.Router = netip.AddrFrom4([4]byte(value[:4]))
		case code == optDNS:
			r.lease.DNS = netip.AddrFrom4([4]byte(value[:4]))
		case code == optServer:
			r.lease.Server = netip.AddrFrom4([4]byte(value[:4]))
		case code == optLeaseTime:
			r.lease.Time = time.Duration(binary.BigEndian.Uint32(value)) * time.Second
		}
	}
	r.lease.Address = netip.PrefixFrom(address, bits)
	return binary.BigEndian.Uint32(m[4:]), r, true
}
