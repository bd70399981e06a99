// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Way is the route of a packet through the host: the interface by which it leaves and its next hop.
type Way struct {
	Interface string
	NextHop   netip.Addr // The destination itself where it is on the link.
	State     int        // of the next hop's neighbour entry (NUD_*); 0: no entry
	Err       error      // The kernel refuses the packet.
}

// LossySocket is a socket that lost datagrams in the window because its receive queue was full.
type LossySocket struct {
	Protocol flow.Protocol
	Local    netip.AddrPort // the port of a raw socket is 0
	Raw      bool
	Drops    uint64
	Waiting  uint64 // bytes in its queue at the end of the window
	Program  Program
}

// Program is a process; the zero value is an unknown one.
type Program struct {
	Name string
	PID  int
}

// String returns the name with the process ID.
func (p Program) String() string {
	if p.PID == 0 {
		return "an unknown program"
	}
	return fmt.Sprintf("%s (process %d)", p.Name, p.PID)
}

// socketLoss is what the list of sockets shows of one that ever lost a datagram.
type socketLoss struct {
	protocol       flow.Protocol
	local          netip.AddrPort
	raw            bool
	drops, waiting uint64
}

// lossOf reads the counter of drops in a line of /proc/net/udp or raw.
func (r *NamespaceReading) lossOf(fields []string, raw bool) {
	if len(fields) < 13 || fields[12] == "0" {
		return
	}
	drops, err := strconv.ParseUint(fields[12], 10, 64)
	inode, err2 := strconv.ParseUint(fields[9], 10, 64)
	local, ok := hexEndpoint(fields[1])
	if err != nil || err2 != nil || !ok || len(r.Losses) == mostLossy {
		return
	}
	loss := socketLoss{protocol: flow.UDP, local: local, raw: raw, drops: drops}
	if raw { // /proc/net/raw shows the protocol in the place of the port
		loss.protocol, loss.local = flow.Protocol(local.Port()), netip.AddrPortFrom(local.Addr(), 0)
	}
	_, queue, _ := strings.Cut(fields[4], ":")
	loss.waiting, _ = strconv.ParseUint(queue, 16, 64)
	if r.Losses == nil {
		r.Losses = map[uint64]socketLoss{}
	}
	r.Losses[inode] = loss
}

// Bounds of the lookups after a window.
const (
	mostLossy = 1024
	mostWays  = 64 // of each cause
)

// lossySockets compares the counters of sockets at both ends of the window.
func (n *Namespace) lossySockets() map[uint64]*LossySocket {
	lossy := map[uint64]*LossySocket{}
	for inode, after := range n.After.Losses {
		if before := n.Before.Losses[inode]; after.drops > before.drops {
			lossy[inode] = &LossySocket{Protocol: after.protocol, Local: after.local, Raw: after.raw, Drops: after.drops - before.drops, Waiting: after.waiting}
		}
	}
	return lossy
}

// followUp looks up in the namespace what the drops and counters of the window leave open.
func (n *Namespace) followUp() {
	lossy := n.lossySockets()
	var tuns []string
	for _, l := range n.After.Links {
		if l.Kind == "tuntap" && l.TxDropped > 0 {
			tuns = append(tuns, l.Name)
		}
	}
	if len(lossy)+len(tuns) > 0 {
		n.Readers = programsBehind(n.Inode, lossy, tuns)
	}
	n.Lossy = nil
	for _, s := range lossy {
		n.Lossy = append(n.Lossy, *s)
	}
	slices.SortFunc(n.Lossy, func(a, b LossySocket) int { return int(b.Drops) - int(a.Drops) })
	_ = n.Do(func() error {
		n.ways()
		if n.Entries != nil && n.Rules != nil {
			n.Entries.match(n.Rules)
		}
		return nil
	})
}

// Dead reports whether the kernel asks for the next hop in vain. A next hop without packets has no entry.
func (w *Way) Dead() bool { return w.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0 }

// ways looks up the routes of dropped packets. For packets that the reverse path filter refused, it looks up the route
// back.
func (n *Namespace) ways() {
	n.Ways = map[*trace.DropSample]Way{}
	names := map[int]string{}
	for _, l := range n.After.Links {
		names[l.Index] = l.Name
	}
	entries := neighbours()
	for _, g := range n.Drops {
		switch g.Cause.ID {
		case trace.CauseRPFilter.ID, trace.CauseBlackhole.ID, trace.CauseTTL.ID, trace.CauseNeighbour.ID, trace.CauseNeighbourQueue.ID, trace.CauseQdisc.ID, trace.CauseNoRoute.ID, trace.CauseFarEnd.ID, trace.CauseOther.ID:
		default:
			continue
		}
		for _, s := range g.Sampled[:min(len(g.Sampled), mostWays)] {
			if !s.Packet.IsValid() {
				continue
			}
			t := s.Packet
			if s.Original.IsValid() && s.Original.Source.Addr().Is4() == t.Source.Addr().Is4() { // routing sees the untranslated source
				t.Source = s.Original.Source
			}
			var w Way
			var index int
			if g.Cause.ID == trace.CauseRPFilter.ID {
				index, w.NextHop, w.Err = netdev.NextHop(s.Packet.Source.Addr())
			} else if s.InIfIndex == 0 {
				index, w.NextHop, w.Err = netdev.NextHop(t.Dest.Addr())
			} else {
				index, w.NextHop, w.Err = netdev.Routed(int(s.InIfIndex), t)
			}
			w.Interface, w.State = names[index], entries[neighbour{index, w.NextHop}].State
			n.Ways[s] = w
		}
	}
}

// match finds out whether a rule translates the untranslated connections today.
func (s *Entries) match(rules *firewall.Ruleset) {
	for i := range s.Leaks {
		l := &s.Leaks[i]
		e := &l.First
		t := flow.Tuple{Protocol: e.Protocol, Source: netip.AddrPortFrom(e.Original.Source.Netip(), e.Original.SourcePort),
			Dest: netip.AddrPortFrom(e.Reply.Source.Netip(), e.Reply.SourcePort)}
		p := &firewall.Packet{Header: headerOf(t), Tuple: t, Mark: e.Mark, Out: l.Out, States: []uint32{firewall.StateNew}}
		for r := range rules.Sources {
			l.Matched = l.Matched || rules.Sources[r].Fits(p)
		}
	}
}

// headerOf makes the headers of a packet with a tuple, as rules read them.
func headerOf(t flow.Tuple) []byte {
	source, dest := t.Source.Addr().AsSlice(), t.Dest.Addr().AsSlice()
	ports := []byte{byte(t.Source.Port() >> 8), byte(t.Source.Port()), byte(t.Dest.Port() >> 8), byte(t.Dest.Port())}
	var b []byte
	if t.Source.Addr().Is4() {
		b = append(b, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, byte(t.Protocol), 0, 0)
	} else {
		b = append(b, 0x60, 0, 0, 0, 0, 20, byte(t.Protocol), 64)
	}
	return append(append(append(append(b, source...), dest...), ports...), make([]byte, 16)...)
}

// programsBehind finds the programs that hold sockets, and the namespace's programs that serve tun interfaces. The kernel
// names the interface of such a program, and not its namespace.
func programsBehind(netns uint64, sockets map[uint64]*LossySocket, tuns []string) map[string]Program {
	readers := map[string]Program{}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, process := range processes {
		files, err := os.ReadDir(process + "/fd")
		if err != nil {
			continue
		}
		for _, f := range files {
			target, err := os.Readlink(process + "/fd/" + f.Name())
			if err != nil {
				continue
			}
			if target == "/dev/net/tun" && len(tuns) > 0 && netnsOf(process) == netns {
				info, _ := os.ReadFile(process + "/fdinfo/" + f.Name())
				for line := range strings.Lines(string(info)) {
					if name, ok := strings.CutPrefix(strings.TrimSpace(line), "iff:\t"); ok && slices.Contains(tuns, name) {
						readers[name] = programOf(process)
					}
				}
				continue
			}
			inode, ok := strings.CutPrefix(target, "socket:[")
			if !ok || len(sockets) == 0 {
				continue
			}
			number, _ := strconv.ParseUint(strings.TrimSuffix(inode, "]"), 10, 64)
			if s := sockets[number]; s != nil {
				s.Program = programOf(process)
			}
		}
	}
	return readers
}

// netnsOf is the inode of a process's network namespace; 0: not known.
func netnsOf(process string) uint64 {
	link, _ := os.Readlink(process + "/ns/net")
	n, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "net:["), "]"), 10, 64)
	return n
}

// programOf names a process by its directory in /proc.
func programOf(directory string) Program {
	name, _ := os.ReadFile(directory + "/comm")
	pid, _ := strconv.Atoi(filepath.Base(directory))
	return Program{strings.TrimSpace(string(name)), pid}
}
