// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/netdev"
)

const port = ":5351" // RFC 6887 §19.1

// link is an interface with a socket. Its name may later belong to another interface, and the interface may be
// renamed.
type link struct {
	index int
	name  string
}

// Run answers requests in the caller's network namespace until the context ends.
func (s *Server) Run(ctx context.Context) {
	sockets := map[link]*net.UDPConn{}
	defer func() {
		for _, c := range sockets {
			c.Close()
		}
	}()
	s.Kick()
	var failed error // failures are logged once and retried every second
	var news announcer
	for {
		before := failed
		select {
		case <-ctx.Done():
			return
		case <-s.kicked:
			failed = s.updateSockets(ctx, sockets)
			news.detectChange(s.currentRules(), s.mapper.Epoch(), s.now())
		case <-news.nextTimer(s.now()):
			s.announceAll(sockets)
			news.next(s.now())
			continue
		case <-s.tick(failed != nil):
			if failed == nil {
				failed = s.expire()
			} else {
				failed = s.updateSockets(ctx, sockets)
				news.detectChange(s.currentRules(), s.mapper.Epoch(), s.now())
			}
		}
		if failed != nil && (before == nil || before.Error() != failed.Error()) {
			s.log.Warn("pcp", "error", failed)
		}
	}
}

// updateSockets updates the server from the datapath's rules and the host's interfaces.
func (s *Server) updateSockets(ctx context.Context, sockets map[link]*net.UDPConn) error {
	if err := s.load(); err != nil {
		return err
	}
	return errors.Join(s.listen(ctx, sockets), s.expire())
}

func (s *Server) currentRules() []datapath.MappingRule {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rules
}

// tick fires in a second, or never if nothing needs a retry or can expire.
func (s *Server) tick(again bool) <-chan time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !again && len(s.rules) == 0 && len(s.mappings) == 0 {
		return nil
	}
	return time.After(time.Second)
}

// listen opens and closes sockets, so that each interface with sources of the rules has one. A socket is bound to its
// interface, so other networks cannot reach it.
func (s *Server) listen(ctx context.Context, sockets map[link]*net.UDPConn) error {
	want, err := insideNetworks(s.currentRules())
	if err != nil {
		return err
	}
	networks := map[string][]netip.Prefix{}
	for l, n := range want {
		networks[l.name] = n
	}
	s.mu.Lock()
	s.networks = networks
	s.mu.Unlock()
	for l, c := range sockets {
		if _, wanted := want[l]; !wanted {
			c.Close()
			delete(sockets, l)
		}
	}
	var errs []error
	for _, l := range slices.SortedFunc(maps.Keys(want), func(a, b link) int { return cmp.Compare(a.index, b.index) }) {
		if sockets[l] != nil {
			continue
		}
		c, err := open(ctx, l.name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		neighbours, err := netdev.OpenNeighbours()
		if err != nil {
			errs = append(errs, errors.Join(err, c.Close()))
			continue
		}
		sockets[l] = c
		go func() {
			defer neighbours.Close()
			s.serve(c, l, resolver(l, want[l], neighbours))
		}()
	}
	return errors.Join(errs...)
}

// insideNetworks returns the interfaces of the rules' sources with their networks. These are the interfaces named by rules,
// else the interfaces with a network of the sources.
func insideNetworks(rules []datapath.MappingRule) (map[link][]netip.Prefix, error) {
	if len(rules) == 0 {
		return nil, nil
	}
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	want := map[link][]netip.Prefix{}
	for _, i := range all {
		addresses, err := i.Addrs()
		if err != nil || i.Flags&net.FlagUp == 0 {
			continue // removed in the meantime
		}
		var networks []netip.Prefix
		for _, a := range addresses {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				networks = append(networks, p.Masked())
			}
		}
		for _, r := range rules {
			lives := func(n netip.Prefix) bool { return slices.ContainsFunc(r.Source, n.Overlaps) }
			if !leavesBy(r, i.Name) && (r.In != "" && r.In.Has(i.Name) || r.In == "" && slices.ContainsFunc(networks, lives)) {
				want[link{i.Index, i.Name}] = networks
			}
		}
	}
	return want, nil
}

// leavesBy reports whether the interface is the outside of the rule.
func leavesBy(r datapath.MappingRule, name string) bool { return r.Out != "" && r.Out.Has(name) }

// open returns a socket for both families, or for IPv4 on a host without IPv6. The family is explicit, because
// package net would select it by the loopback's addresses.
func open(ctx context.Context, name string) (*net.UDPConn, error) {
	c, err := openAs(ctx, "udp6", name)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		c, err = openAs(ctx, "udp4", name)
	}
	if err != nil {
		hint := ""
		if errors.Is(err, unix.EADDRINUSE) {
			hint = "; is another PCP or NAT-PMP server running?"
		}
		return nil, fmt.Errorf("interface %s: no requests are answered: %w%s", name, err, hint)
	}
	return c, nil
}

func openAs(ctx context.Context, network, name string) (*net.UDPConn, error) {
	l := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		outer := raw.Control(func(fd uintptr) {
			err = unix.BindToDevice(int(fd), name)
			if network == "udp4" {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1))
				return
			}
			err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
		})
		return errors.Join(outer, err)
	}}
	c, err := l.ListenPacket(ctx, network, port)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// resolver returns a function that reports whether the kernel sends a packet to a client at once. Clients
// behind a router are taken for resolved, because the router is.
func resolver(l link, networks []netip.Prefix, neighbours *netdev.Neighbours) func(netip.Addr) bool {
	if i, err := net.InterfaceByIndex(l.index); err == nil && (len(i.HardwareAddr) == 0 || i.Flags&net.FlagPointToPoint != 0) {
		return func(netip.Addr) bool { return true }
	}
	return func(client netip.Addr) bool {
		onLink := client.IsLinkLocalUnicast() || slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(client) })
		return !onLink || neighbours.Resolved(netdev.Hop{Ifindex: l.index, Addr: client})
	}
}

// serve answers the requests of one socket until it is closed.
func (s *Server) serve(c *net.UDPConn, l link, resolved func(netip.Addr) bool) {
	b, control := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo))
	for {
		n, size, _, from, err := c.ReadMsgUDPAddrPort(b, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(time.Millisecond) // an ICMP error for an earlier answer, or another error
			continue
		}
		client := netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if out := s.answerMessage(b[:n], client.Addr(), l.name, resolved(client.Addr())); out != nil {
			// The control message of the request selects the source of the reply: the address asked.
			s.send(c, out, control[:size], from)
		}
	}
}

// send sends a message, or drops and counts it if the send buffer is full: replies that wait for the hardware
// addresses of their clients must not make all others wait.
func (s *Server) send(c *net.UDPConn, out, control []byte, to netip.AddrPort) {
	raw, err := c.SyscallConn()
	if err != nil {
		return // the socket was closed
	}
	// A client that misses a reply asks again; other errors are ICMP errors to earlier replies.
	_ = raw.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), out, control, socketAddress(c, to), unix.MSG_DONTWAIT)
	})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) {
		s.countDropped()
	}
}

// socketAddress returns an address in the family of the socket. The socket is bound to its interface, so that
// a zone is not needed.
func socketAddress(c *net.UDPConn, to netip.AddrPort) unix.Sockaddr {
	if local, ok := c.LocalAddr().(*net.UDPAddr); ok && local.IP.To4() != nil {
		return &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().Unmap().As4()}
	}
	return &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
}
