// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

// Stream sends numbered datagrams at a constant rate. The number identifies each lost, duplicated or misdirected
// datagram.
type Stream struct {
	From   *lab.Node
	Target netip.AddrPort
	// Flows is the number of sockets, used in turn; 0 means 16.
	Flows int
	// Rate in datagrams per second over all flows; 0 means 2,000.
	Rate int

	conns []net.Conn
	next  []atomic.Uint32 // by flow: next sequence number
	stop  chan struct{}
	ended chan error
}

// Start opens the sockets and starts sending.
func (s *Stream) Start(ctx context.Context) error {
	if s.Flows == 0 {
		s.Flows = 16
	}
	if s.Rate == 0 {
		s.Rate = 2000
	}
	s.next = make([]atomic.Uint32, s.Flows)
	s.stop, s.ended = make(chan struct{}), make(chan error, 1)
	for range s.Flows {
		c, err := s.From.Dial(ctx, nil, "udp", s.Target.String())
		if err != nil {
			s.close()
			return fmt.Errorf("stream to %s: %w", s.Target, err)
		}
		s.conns = append(s.conns, c)
	}
	go func() { s.ended <- s.run() }()
	return nil
}

// run sends the due datagrams every millisecond. A late turn sends more.
func (s *Stream) run() error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	begun, sent := time.Now(), 0
	var b [8]byte
	for {
		select {
		case <-s.stop:
			return nil
		case <-tick.C:
		}
		due := int(time.Since(begun) * time.Duration(s.Rate) / time.Second)
		for end := min(due, sent+100); sent < end; sent++ { // a burst fits every queue on the path
			flow := sent % s.Flows
			binary.BigEndian.PutUint32(b[:4], uint32(flow))
			binary.BigEndian.PutUint32(b[4:], s.next[flow].Load())
			if _, err := s.conns[flow].Write(b[:]); err != nil {
				return fmt.Errorf("stream to %s: datagram %d of flow %d: %w", s.Target, s.next[flow].Load(), flow, err)
			}
			s.next[flow].Add(1)
		}
	}
}

// Sent returns, by flow, the number of datagrams sent so far, which is also the next sequence number.
func (s *Stream) Sent() []uint32 {
	n := make([]uint32, s.Flows)
	for i := range n {
		n[i] = s.next[i].Load()
	}
	return n
}

// Stop stops sending.
func (s *Stream) Stop() error {
	close(s.stop)
	return errors.Join(<-s.ended, s.close())
}

func (s *Stream) close() (err error) {
	for _, c := range s.conns {
		err = errors.Join(err, c.Close())
	}
	s.conns = nil
	return err
}

// Collector receives the datagrams of a [Stream].
type Collector struct {
	conn net.PacketConn
	name string

	mu  sync.Mutex // protects got
	got []Arrival
}

// Arrival is one datagram.
type Arrival struct {
	Server string
	Flow   uint32
	Number uint32
	From   netip.AddrPort
}

// Collect listens in the node at the address, a literal.
func Collect(n *lab.Node, name, addr string) (*Collector, error) {
	c, err := n.ListenPacket(addr)
	if err != nil {
		return nil, fmt.Errorf("collector %s: %w", name, err)
	}
	// The buffer holds ten seconds of datagrams, because the reader may be delayed on a busy machine.
	// Labs run as root, so it may be larger than net.core.rmem_max.
	if err := setReadBuffer(c.(*net.UDPConn), 16<<20); err != nil {
		return nil, errors.Join(fmt.Errorf("collector %s: %w", name, err), c.Close())
	}
	s := &Collector{conn: c, name: name}
	go s.run()
	return s, nil
}

func setReadBuffer(c *net.UDPConn, bytes int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = os.NewSyscallError("SO_RCVBUFFORCE", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes))
	})
	return errors.Join(err, set)
}

func (c *Collector) run() {
	b := make([]byte, 64)
	for {
		n, from, err := c.conn.(*net.UDPConn).ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		if n != 8 {
			continue
		}
		a := Arrival{c.name, binary.BigEndian.Uint32(b[:4]), binary.BigEndian.Uint32(b[4:8]), netip.AddrPortFrom(from.Addr().Unmap(), from.Port())}
		c.mu.Lock()
		c.got = append(c.got, a)
		c.mu.Unlock()
	}
}

// Arrivals returns the received datagrams in order.
func (c *Collector) Arrivals() []Arrival {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Arrival(nil), c.got...)
}

// Stop closes the socket.
func (c *Collector) Stop() error { return c.conn.Close() }

// Missing returns, by flow, the numbers below sent that did not arrive, and the number of duplicates.
func Missing(sent []uint32, arrivals []Arrival) (missing map[int][]uint32, twice int) {
	seen := make([][]bool, len(sent))
	for i, n := range sent {
		seen[i] = make([]bool, n)
	}
	for _, a := range arrivals {
		if int(a.Flow) >= len(sent) || a.Number >= sent[a.Flow] {
			continue // sent after the reading of sent
		}
		if seen[a.Flow][a.Number] {
			twice++
		}
		seen[a.Flow][a.Number] = true
	}
	missing = map[int][]uint32{}
	for flow, numbers := range seen {
		for n, ok := range numbers {
			if !ok {
				missing[flow] = append(missing[flow], uint32(n))
			}
		}
	}
	return missing, twice
}
