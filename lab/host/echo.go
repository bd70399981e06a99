// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/lab"
)

// Lines is a TCP server that answers every line with its [Answer], for any number of lines per connection.
type Lines struct {
	listener net.Listener
	name     string
	conns    connections
	lines    atomic.Uint64
}

// ServeLines starts the server in the node at the address, a literal.
func ServeLines(n *lab.Node, name, addr string) (*Lines, error) {
	l, err := n.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("line server %s: %w", name, err)
	}
	s := &Lines{listener: l, name: name}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if s.conns.add(c) {
				go s.serve(c)
			}
		}
	}()
	return s, nil
}

func (s *Lines) serve(c net.Conn) {
	defer s.conns.remove(c)
	sc := bufio.NewScanner(c)
	for sc.Scan() {
		s.lines.Add(1)
		if _, err := fmt.Fprintln(c, Answer{s.name, c.RemoteAddr().String()}); err != nil {
			return
		}
	}
}

// Stop closes the listener and every open connection.
func (s *Lines) Stop() error {
	err := s.listener.Close()
	s.conns.closeAll()
	return err
}

// Lines returns the number of answered lines.
func (s *Lines) Lines() uint64 { return s.lines.Load() }

// Datagrams is a UDP server that answers every datagram with its [Answer].
type Datagrams struct {
	conn     net.PacketConn
	received atomic.Uint64
}

// ServeDatagrams starts the server in the node at the address, a literal.
func ServeDatagrams(n *lab.Node, name, addr string) (*Datagrams, error) {
	return serveUDP(n, addr, func(_ []byte, from net.Addr) ([]byte, error) {
		return []byte(Answer{name, from.String()}.String()), nil
	})
}

// ServeDNS starts a name server in the node at the address, a literal. It answers every question
// with one TXT record: its [Answer].
func ServeDNS(n *lab.Node, name, addr string) (*Datagrams, error) {
	return serveUDP(n, addr, func(query []byte, from net.Addr) ([]byte, error) {
		var q dns.Msg
		if err := q.Unpack(query); err != nil {
			return nil, err
		}
		var r dns.Msg
		r.SetReply(&q)
		if len(q.Question) == 1 {
			r.Answer = append(r.Answer, &dns.TXT{
				Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET},
				Txt: []string{Answer{name, from.String()}.String()},
			})
		}
		return r.Pack()
	})
}

func serveUDP(n *lab.Node, addr string, answer func(datagram []byte, from net.Addr) ([]byte, error)) (*Datagrams, error) {
	c, err := n.ListenPacket(addr)
	if err != nil {
		return nil, err
	}
	s := &Datagrams{conn: c}
	go func() {
		buf := make([]byte, 65535)
		for {
			size, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			s.received.Add(1)
			if reply, err := answer(buf[:size], from); err == nil {
				_, _ = c.WriteTo(reply, from) // the client detects a lost reply
			}
		}
	}()
	return s, nil
}

// Stop closes the socket.
func (s *Datagrams) Stop() error { return s.conn.Close() }

// Received returns the number of received datagrams, including invalid ones.
func (s *Datagrams) Received() uint64 { return s.received.Load() }
