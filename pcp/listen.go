// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
)

const port = ":5351" // RFC 6887 §19.1

// Run answers until the context ends, on the interfaces of the network namespace
// that it is called in.
func (s *Server) Run(ctx context.Context) {
	sockets := map[int]*net.UDPConn{} // by the interface's index: a name may come back as another one
	defer func() {
		for _, c := range sockets {
			c.Close()
		}
	}()
	s.Kick()
	said := "" // of what has not worked, once
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-s.kicked:
			if err = s.load(); err == nil {
				err = errors.Join(s.listen(ctx, sockets), s.expire())
			}
		case <-s.tick():
			err = s.expire()
		}
		if err == nil {
			continue
		}
		if err.Error() != said {
			said = err.Error()
			s.log.Warn("pcp", "error", err)
		}
		time.AfterFunc(time.Second, s.Kick)
	}
}

// tick fires in a second, or never when there is nothing that could expire.
func (s *Server) tick() <-chan time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.rules) == 0 && len(s.mappings) == 0 {
		return nil
	}
	return time.After(time.Second)
}

// listen opens and closes sockets so that there is one on each interface that the
// rules' sources live on. It is bound to the interface: nobody else finds it.
func (s *Server) listen(ctx context.Context, sockets map[int]*net.UDPConn) error {
	s.mu.Lock()
	rules := s.rules
	s.mu.Unlock()
	want, err := inside(rules)
	if err != nil {
		return err
	}
	for index, c := range sockets {
		if _, wanted := want[index]; !wanted {
			c.Close()
			delete(sockets, index)
		}
	}
	var errs []error
	for index, name := range want {
		if sockets[index] != nil {
			continue
		}
		c, err := open(ctx, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		sockets[index] = c
		go s.serve(c, name)
	}
	return errors.Join(errs...)
}

// inside names the interfaces of the rules' sources, by index: those that rules name,
// else those with a network of theirs.
func inside(rules []datapath.MappingRule) (map[int]string, error) {
	if len(rules) == 0 {
		return nil, nil
	}
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	want := map[int]string{}
	for _, i := range all {
		addresses, err := i.Addrs()
		if err != nil || i.Flags&net.FlagUp == 0 {
			continue // gone since
		}
		for _, r := range rules {
			if r.Out != i.Name && (r.In == i.Name || r.In == "" && slices.ContainsFunc(addresses, func(a net.Addr) bool { return sourceNetwork(r, a) })) {
				want[i.Index] = i.Name
			}
		}
	}
	return want, nil
}

func open(ctx context.Context, name string) (*net.UDPConn, error) {
	l := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		outer := raw.Control(func(fd uintptr) {
			err = errors.Join(unix.BindToDevice(int(fd), name), unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
		})
		return errors.Join(outer, err)
	}}
	c, err := l.ListenPacket(ctx, "udp", port)
	if err != nil {
		return nil, fmt.Errorf("interface %s: no requests are answered: %w; is another PCP or NAT-PMP server running?", name, err)
	}
	return c.(*net.UDPConn), nil
}

// serve answers what comes in by one socket until it is closed.
func (s *Server) serve(c *net.UDPConn, name string) {
	b, control := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo))
	for {
		n, size, _, from, err := c.ReadMsgUDPAddrPort(b, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(time.Millisecond) // an ICMP error to an earlier answer, or worse
			continue
		}
		client := netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if out := s.answer(b[:n], client.Addr(), name); out != nil {
			// The same control message says where the answer comes from: whom the client asked.
			_, _, _ = c.WriteMsgUDPAddrPort(out, control[:size], from)
		}
	}
}

// sourceNetwork reports whether an interface's address is of a network with sources
// of a rule.
func sourceNetwork(r datapath.MappingRule, a net.Addr) bool {
	n, err := netip.ParsePrefix(a.String())
	return err == nil && slices.ContainsFunc(r.Source, n.Masked().Overlaps)
}
