// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// watch follows links, routes and neighbours of the namespace and events of the programs, until
// Close.
func (d *Datapath) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	w, err := netdev.Open()
	if err != nil {
		d.opt.Log.Warn("changes of next hops are not watched; flows notice them within a second", "error", err)
	}
	events, err := ringbuf.NewReader(d.t.Maps["events"])
	if err != nil {
		d.opt.Log.Warn("events of the ebpf datapath are not read", "error", err)
	}
	early, err := ringbuf.NewReader(d.t.Maps["early"])
	if err != nil {
		d.opt.Log.Warn("packets to unresolved next hops, and fragments before their first one, are dropped", "error", err)
	}
	d.stop = func() {
		cancel()
		if early != nil {
			early.Close()
		}
		if events != nil {
			events.Close()
		}
	}
	d.watching.Go(func() { d.growTables(ctx) })
	generation, changed := d.t.Control, make(chan struct{}, 1)
	if w != nil {
		var lost atomic.Bool
		d.watching.Go(func() { d.followStations(ctx, changed) })
		d.watching.Go(func() { d.probeAging(ctx, w, &lost) })
		routes := newRouteFollower()
		d.watching.Go(func() { routes.run(ctx, d) })
		d.watching.Go(func() {
			err := w.Run(ctx, func(e netdev.Event) {
				bumpGeneration(generation)
				if e.Kind == netdev.Lost {
					lost.Store(true)
				}
				routes.addEvent(e)
				if e.Kind == netdev.Link || e.Kind == netdev.Lost {
					select {
					case changed <- struct{}{}:
					default:
					}
				}
			})
			if err != nil && !errors.Is(err, context.Canceled) {
				d.opt.Log.Warn("changes of next hops are not watched any more; flows notice them within a second", "error", err)
			}
		})
	}
	if events != nil {
		d.watching.Go(func() { d.serve(events) })
	}
	if early != nil {
		d.watching.Go(func() { d.handleUnresolved(early) })
	}
}

// serve handles the requests of the programs. It has its own thread in the datapath's namespace.
func (d *Datapath) serve(events *ringbuf.Reader) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(d.ns); err != nil {
		d.opt.Log.Warn("events of the ebpf datapath are not read", "error", err)
		return
	}
	idMap := d.t.Maps["ids"]
	var r ringbuf.Record
	lost := d.t.Control.Values[0].LostLogs
	for {
		if err := events.ReadInto(&r); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				d.opt.Log.Warn("events of the ebpf datapath are not read any more", "error", err)
			}
			return
		}
		if len(r.RawSample) < int(unsafe.Sizeof(wire.Event{})) {
			continue
		}
		e := *(*wire.Event)(unsafe.Pointer(&r.RawSample[0]))
		switch e.Kind {
		case wire.EventConnection:
			if logs := d.logs.Load(); logs != nil {
				if l, ok := (*logs)[e.Owner]; ok {
					d.opt.Log.Log(context.Background(), levelOf(l.Level), connectionLine(l.Prefix, e))
				}
			}
		case wire.EventBlock:
			d.logBlock(r.RawSample)
			d.warnLost(&lost)
		case wire.EventNeighbour:
			hop := netdev.Hop{Ifindex: int(e.Ifindex), Addr: wire.AddrFrom(e.Addr, e.Family == wire.Family6)}
			if err := d.neighbours.request(idMap, hop); err != nil {
				d.failedEvents.Add(1)
			}
		case wire.EventProbe:
			if err := probe(e); err != nil {
				d.failedEvents.Add(1)
				d.opt.Log.Debug("the host of a silent connection is not probed", "host", wire.AddrFrom(e.Addr, true), "error", err)
			}
		}
	}
}

// probe checks whether the IPv6 host of a connection still has the connection. It sends an empty
// segment from the peer's address, with sequence numbers of no connection (RFC 6146 §3.5.2.2). The
// reply passes the gateway like any packet of the connection.
func probe(e wire.Event) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	host := wire.AddrFrom(e.Addr, true)
	p := packet.Packet{
		&packet.IPv6{Src: wire.AddrFrom(e.To, true), Dst: host, HopLimit: 64},
		&packet.TCP{SrcPort: wire.PortOf(e.Dport), DstPort: wire.PortOf(e.Sport), Flags: packet.ACK},
	}
	return unix.Sendto(fd, p.Build(), 0, &unix.SockaddrInet6{Addr: host.As16()})
}

// levelOf converts a kernel log level into a level of the daemon's log.
func levelOf(l config.LogLevel) slog.Level {
	switch l {
	case "emerg", "alert", "crit", "err":
		return slog.LevelError
	case "warning":
		return slog.LevelWarn
	case "debug":
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// connectionLine formats a new connection like the kernel's packet log.
func connectionLine(prefix string, e wire.Event) string {
	v6 := e.Family == wire.Family6
	in := ""
	if i, err := net.InterfaceByIndex(int(e.Ifindex)); err == nil {
		in = i.Name
	}
	line := fmt.Sprintf("%sIN=%s OUT= SRC=%s DST=%s LEN=%d PROTO=%s", prefix, in, wire.AddrFrom(e.Addr, v6), wire.AddrFrom(e.To, v6), e.Len,
		strings.ToUpper(flow.Protocol(e.L4Proto).String()))
	if e.Sport|e.Dport != 0 {
		line += fmt.Sprintf(" SPT=%d DPT=%d", wire.PortOf(e.Sport), wire.PortOf(e.Dport))
	}
	return line
}

// resolveBackends keeps the next hops of all backends resolved, and no others, so that the first
// packet finds its next hop. It looks up every route again.
func (d *Datapath) resolveBackends(all map[uint32]wire.Backend) {
	d.neighbours.reset()
	d.keepResolved(all, true)
}

// keepResolved adds backends, or sets the complete list if all is true. It looks up only unknown
// next hops.
func (d *Datapath) keepResolved(backends map[uint32]wire.Backend, all bool) {
	if d.opt.NoAttach {
		return
	}
	hops := map[netdev.Hop]bool{}
	for _, b := range backends {
		if b.State == wire.BackendDown {
			continue
		}
		if hop := d.hopTo(wire.AddrFrom(b.Addr, b.Family == wire.Family6)); hop.Ifindex != 0 {
			hops[hop] = true
		}
	}
	if err := d.neighbours.setBackends(d.t.Maps["ids"], hops, all); err != nil {
		d.opt.Log.Debug("next hops of backends are not kept resolved", "error", err)
	}
}

// hopTo returns the next hop of a backend, or the zero Hop if no neighbour needs resolution.
func (d *Datapath) hopTo(backend netip.Addr) netdev.Hop {
	hop, known := d.neighbours.hops[backend]
	if known {
		return hop
	}
	ifindex, addr, err := netdev.NextHop(backend)
	if err == nil {
		hop = netdev.Hop{Ifindex: ifindex, Addr: addr}
	} else if !errors.Is(err, netdev.ErrNoNextHop) {
		d.opt.Log.Debug("next hop is not kept resolved", "backend", backend, "error", err)
	}
	d.neighbours.hops[backend] = hop
	return hop
}
