// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/datapath"
)

// If mappings may be lost, or an outside address has changed, the server announces it by multicast (RFC 6886 §3.2.1,
// RFC 6887 §14.1.3). It sends ten announcements. The second follows after 250 ms, and each further one after twice
// the previous interval.
const (
	announceTimes = 10
	announceFirst = 250 * time.Millisecond
	clientPort    = 5350
)

var allHosts4, allNodes6 = netip.AddrFrom4([4]byte{224, 0, 0, 1}), netip.MustParseAddr("ff02::1")

// announcer schedules announcements.
type announcer struct {
	said  map[string][]netip.Addr // outside addresses of each rule in the last announcement; nil before the first one
	epoch time.Duration
	left  int
	wait  time.Duration
	at    time.Duration // time of the next announcement on the clock of kernel.SinceBoot
}

// detectChange starts announcements if the rules' addresses or the epoch have changed.
func (a *announcer) detectChange(rules []datapath.MappingRule, epoch, now time.Duration) {
	current := map[string][]netip.Addr{}
	same := a.said != nil && len(rules) == len(a.said) && epoch == a.epoch
	for _, r := range rules {
		current[r.Name] = r.Outside
		same = same && slices.Equal(a.said[r.Name], r.Outside)
	}
	if a.said, a.epoch = current, epoch; same {
		return
	}
	a.left, a.wait, a.at = announceTimes, announceFirst, now
	if len(rules) == 0 {
		a.left = 0
	}
}

// nextTimer fires at the time of the next announcement; nil means never.
func (a *announcer) nextTimer(now time.Duration) <-chan time.Time {
	if a.left == 0 {
		return nil
	}
	return time.After(max(a.at-now, 0))
}

// next counts an announcement and sets the time of the following one.
func (a *announcer) next(now time.Duration) {
	a.left--
	a.at, a.wait = now+a.wait, 2*a.wait
}

// announceAll sends an announcement of both protocols on each interface with a socket.
func (s *Server) announceAll(sockets map[link]*net.UDPConn) {
	for l, c := range sockets {
		for _, m := range s.announceMessages(l.name) {
			s.send(c, m.bytes, nil, m.to) // a client that misses it sees the epoch in the next answer
		}
	}
}

type announcement struct {
	bytes []byte
	to    netip.AddrPort
}

// announceMessages returns the messages for the hosts of an interface.
func (s *Server) announceMessages(iface string) (list []announcement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	epoch := s.epochSeconds(s.now())
	announced := request{opcode: announce}
	pcp := announced.reply(netip.AddrPort{}, 0, epoch)
	public := netip.Addr{}
	families := map[bool]bool{} // of the permitted hosts, by whether it is IPv4
	for _, r := range s.rules {
		for _, source := range r.Source {
			here := r.In != "" && r.In.Has(iface) || r.In == "" && slices.ContainsFunc(s.networks[iface], source.Overlaps)
			if !here || leavesBy(r, iface) {
				continue
			}
			families[source.Addr().Is4()] = true
			if list := ipv4Addresses(r); source.Addr().Is4() && len(list) == 1 && !public.IsValid() {
				public = list[0]
			}
		}
	}
	if public.IsValid() { // in a pool of several addresses each host has its own and requests it
		a := public.As4()
		message := append(natpmpHead(natpmpAddress, success, epoch), a[:]...)
		list = append(list, announcement{message, netip.AddrPortFrom(allHosts4, clientPort)})
	}
	if families[true] {
		list = append(list, announcement{pcp, netip.AddrPortFrom(allHosts4, clientPort)})
	}
	if families[false] {
		list = append(list, announcement{pcp, netip.AddrPortFrom(allNodes6.WithZone(iface), clientPort)})
	}
	return list
}
