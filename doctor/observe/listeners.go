// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bufio"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Listener is a socket that waits for others: of TCP in state LISTEN, of UDP without a
// remote side.
type Listener struct {
	trace.LocalPort
	User   uint32
	Socket uint64 // its inode
}

// Lasting are the listeners of after that belong to services: those that were there before,
// at a port that a program asked for by number. A port of the kernel's choice, as a
// resolver's, a QUIC client's or an RPC service's, is another one next time.
//
// Some resolvers choose a random port for each query. If the UDP ports of a user change between
// before and after, none of that user's sockets is returned. If Asked is unknown, TCP sockets are
// returned and UDP sockets are unjudged.
func Lasting(before, after Sockets) (list, unjudged []Listener) {
	changing := map[uint32]bool{}
	for _, pair := range [][2]Sockets{{after, before}, {before, after}} {
		for _, l := range pair[0].Listeners {
			if l.Protocol == flow.UDP && pair[0].Asked[l.LocalPort] && !slices.Contains(pair[1].Listeners, l) {
				changing[l.User] = true
			}
		}
	}
	for _, l := range after.Listeners {
		switch {
		case !slices.Contains(before.Listeners, l):
		case after.AskedErr != nil && l.Protocol == flow.UDP:
			unjudged = append(unjudged, l)
		case after.AskedErr == nil && !after.Asked[l.LocalPort]:
		case l.Protocol == flow.UDP && changing[l.User]:
		default:
			list = append(list, l)
		}
	}
	return list, unjudged
}

// LocalRange are the ports that the kernel gives to sockets that name none.
func (r *NamespaceReading) LocalRange() (low, high int, there bool) {
	f := strings.Fields(r.Sysctl["net.ipv4.ip_local_port_range"])
	if len(f) != 2 {
		return 0, 0, false
	}
	low, err1 := strconv.Atoi(f[0])
	high, err2 := strconv.Atoi(f[1])
	return low, high, err1 == nil && err2 == nil && high >= low
}

// Exposed reports whether the kernel may assign a port to any socket: the port is in the local
// range and not reserved.
func (r *NamespaceReading) Exposed(port uint16) bool {
	low, high, there := r.LocalRange()
	return there && low <= int(port) && int(port) <= high &&
		!slices.ContainsFunc(r.reserved(), func(p firewall.PortRange) bool { return p.Low <= port && port <= p.High })
}

// LocalPorts counts the ports that the kernel assigns to sockets without an explicit port: the
// local range without reserved ports.
func (r *NamespaceReading) LocalPorts() int {
	low, high, there := r.LocalRange()
	if !there {
		return 0
	}
	n := high - low + 1
	for _, p := range r.reserved() { // apart from each other: the kernel joins them
		n -= max(0, min(high, int(p.High))-max(low, int(p.Low))+1)
	}
	return n
}

// reserved reads ip_local_reserved_ports, such as "8080,9000-9010".
func (r *NamespaceReading) reserved() (list []firewall.PortRange) {
	for part := range strings.SplitSeq(r.Sysctl["net.ipv4.ip_local_reserved_ports"], ",") {
		if low, high := firewall.ParsePorts(strings.TrimSpace(part)); high > 0 {
			list = append(list, firewall.PortRange{Low: low, High: high})
		}
	}
	return list
}

// ExposedListeners are those at ports that the kernel may give to any socket.
func (r *NamespaceReading) ExposedListeners() (list []Listener) {
	for _, l := range r.Listeners {
		if r.Exposed(l.Port) {
			list = append(list, l)
		}
	}
	return list
}

// askedReading is for which of the listeners at exposed ports a program asked.
type askedReading struct {
	of    []Listener
	asked map[trace.LocalPort]bool
	err   error
}

// readAsked fills in which of the exposed ports programs asked for; the same sockets
// asked for the same ones.
func (l *Live) readAsked(ns netdev.Namespace, r *NamespaceReading) {
	exposed := r.ExposedListeners()
	if len(exposed) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.asked[ns.Inode]
	if !slices.Equal(last.of, exposed) {
		last = askedReading{of: exposed}
		last.asked, last.err = trace.AskedPorts()
		if l.asked == nil {
			l.asked = map[uint64]askedReading{}
		}
		l.asked[ns.Inode] = last
	}
	r.Asked, r.AskedErr = last.asked, last.err
}

// manySockets bounds how much of a list of sockets is read: some 150 bytes each.
const manySockets = 200000

// ErrSocketsCut is why sockets may have been missed.
var ErrSocketsCut = fmt.Errorf("lists of sockets were read to line %d only", manySockets)

// ReadSockets reads the lists of sockets. Each list walks a hash table of the whole host. Sockstat
// must be read before.
func (r *NamespaceReading) ReadSockets(root fs.FS) {
	if r.Sockstat["TCP.inuse"]+r.Sockstat["TCP6.inuse"]+r.Sockstat["TCP.tw"] > 0 {
		r.readTCP(root)
	}
	if r.Sockstat["UDP.inuse"]+r.Sockstat["UDP6.inuse"] > 0 {
		r.readUDP(root)
	}
	if r.Sockstat["RAW.inuse"]+r.Sockstat["RAW6.inuse"] > 0 {
		for _, name := range []string{"raw", "raw6"} {
			r.eachSocket(root, name, func(fields []string) { r.lossOf(fields, true) })
		}
	}
}

// eachSocket visits the lines of a list such as /proc/net/tcp, and notes where it is cut.
func (r *NamespaceReading) eachSocket(root fs.FS, name string, visit func(fields []string)) {
	f, err := root.Open(threadNet + name)
	if err != nil {
		return
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for n := 0; lines.Scan(); n++ {
		if n > manySockets { // the first line is the head
			r.Cut = true
			return
		}
		if fields := strings.Fields(lines.Text()); len(fields) >= 4 && fields[0] != "sl" {
			visit(fields)
		}
	}
}

// listener reads a line that is one.
func listener(protocol flow.Protocol, fields []string) (l Listener, ok bool) {
	local, ok := hexEndpoint(fields[1])
	if !ok || len(fields) < 10 {
		return l, false
	}
	user, _ := strconv.ParseUint(fields[7], 10, 32)
	inode, _ := strconv.ParseUint(fields[9], 10, 64)
	return Listener{trace.LocalPort{Protocol: protocol, Port: local.Port()}, uint32(user), inode}, true
}

// ReadListeners reads the listeners of the calling thread's namespace. cut is set if some are
// missing.
func ReadListeners(root fs.FS) (list []Listener, cut bool) {
	var r NamespaceReading
	r.readTCP(root)
	r.readUDP(root)
	return r.Listeners, r.Cut
}

// Remote is the destination of connections with their source address. Each such pair can use the
// whole range of local ports.
type Remote struct {
	From netip.Addr
	To   netip.AddrPort
}

// readTCP finds the listeners, and how many connections have a port of the local range
// towards each remote endpoint.
func (r *NamespaceReading) readTCP(root fs.FS) {
	low, high, _ := r.LocalRange()
	r.Remotes = map[Remote]int{}
	for _, name := range []string{"tcp", "tcp6"} {
		r.eachSocket(root, name, func(fields []string) {
			if fields[3] == "0A" { // TCP_LISTEN
				if l, ok := listener(flow.TCP, fields); ok {
					r.Listeners = append(r.Listeners, l)
				}
				return
			}
			local, ok := hexEndpoint(fields[1])
			if !ok || int(local.Port()) < low || int(local.Port()) > high {
				return // most are a service's
			}
			if remote, ok := hexEndpoint(fields[2]); ok {
				r.Remotes[Remote{local.Addr(), remote}]++
			}
		})
	}
}

// readUDP finds the sockets without a remote side.
func (r *NamespaceReading) readUDP(root fs.FS) {
	for _, name := range []string{"udp", "udp6"} {
		r.eachSocket(root, name, func(fields []string) {
			r.lossOf(fields, false)
			if remote, ok := hexEndpoint(fields[2]); !ok || remote.Port() != 0 {
				return
			}
			if l, ok := listener(flow.UDP, fields); ok {
				r.Listeners = append(r.Listeners, l)
			}
		})
	}
}
