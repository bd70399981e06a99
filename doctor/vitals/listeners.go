// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"bufio"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Listener is a socket that waits for others: of TCP in state LISTEN, of UDP without a
// remote side.
type Listener struct {
	trace.LocalPort
	User   uint32
	Socket uint64 // its inode
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

// Exposed tells whether the kernel may give a port to any socket: it is in the local
// range and not reserved.
func (r *NamespaceReading) Exposed(port uint16) bool {
	low, high, there := r.LocalRange()
	return there && low <= int(port) && int(port) <= high &&
		!slices.ContainsFunc(r.reserved(), func(p PortRange) bool { return p.Low <= port && port <= p.High })
}

// LocalPorts counts the ports that the kernel gives to sockets that name none: those of
// the local range that are not reserved.
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
func (r *NamespaceReading) reserved() (list []PortRange) {
	for part := range strings.SplitSeq(r.Sysctl["net.ipv4.ip_local_reserved_ports"], ",") {
		if low, high := portRange(strings.TrimSpace(part)); high > 0 {
			list = append(list, PortRange{low, high})
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
func (l *Live) readAsked(ns conntrack.Namespace, r *NamespaceReading) {
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

// eachSocket visits the lines of a list such as /proc/net/tcp.
func eachSocket(root fs.FS, name string, visit func(fields []string)) {
	f, err := root.Open(threadNet + name)
	if err != nil {
		return
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for n := 0; lines.Scan() && n < manySockets; n++ {
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

// readTCP finds the listeners, and how many connections go to each remote endpoint.
func (r *NamespaceReading) readTCP(root fs.FS) {
	r.Remotes = map[string]int{}
	for _, name := range []string{"tcp", "tcp6"} {
		eachSocket(root, name, func(fields []string) {
			if fields[3] != "0A" { // TCP_LISTEN
				if remote, ok := hexEndpoint(fields[2]); ok {
					r.Remotes[remote.String()]++
				}
				return
			}
			if l, ok := listener(flow.TCP, fields); ok {
				r.Listeners = append(r.Listeners, l)
			}
		})
	}
}

// readUDP finds the sockets without a remote side.
func (r *NamespaceReading) readUDP(root fs.FS) {
	for _, name := range []string{"udp", "udp6"} {
		eachSocket(root, name, func(fields []string) {
			if remote, ok := hexEndpoint(fields[2]); !ok || remote.Port() != 0 {
				return
			}
			if l, ok := listener(flow.UDP, fields); ok {
				r.Listeners = append(r.Listeners, l)
			}
		})
	}
}
