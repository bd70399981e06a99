// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// putRouteMTUs writes the MTUs of the host's routes for the programs. It returns how many the host
// has; the map has room for a part of them, and an error reports the rest.
func putRouteMTUs(t *table.Tables) (known int, err error) {
	list, err := netdev.RouteMTUs()
	if err != nil {
		return 0, err
	}
	m := t.Maps["route_mtus"]
	want := map[wire.RouteMtuKey]uint32{}
	for _, r := range list {
		if len(want) == int(m.MaxEntries()) {
			err = fmt.Errorf("the host has %d routes in or around routes with an mtu, and %d have room", len(list), len(want))
			break
		}
		a, bits, mtu := r.To.Masked().Addr(), 32+r.To.Bits(), r.MTU
		if a.Is4() {
			bits += 96
		} else if mtu > 0 {
			mtu = max(mtu, 1280) // the kernel goes no lower (RFC 8200 §5)
		}
		want[wire.RouteMtuKey{PrefixLen: uint32(bits), Ifindex: uint32(r.Ifindex), Addr: a.As16()}] = mtu
	}
	flag := &t.Control.Values[0].RouteMtus
	if len(want) > 0 {
		atomic.StoreUint32(flag, 1) // before the entries: a lookup that finds none is harmless
	}
	if e := table.Equalise(m, want, nil); e != nil {
		return len(list), e
	}
	if len(want) == 0 {
		atomic.StoreUint32(flag, 0)
	}
	return len(list), err
}

// routesPause is how long changes of routes are collected before the table is read.
const routesPause = 50 * time.Millisecond

// routeFollower has the MTUs written again after each change that may concern them. The whole table is
// read only if a route has an MTU.
type routeFollower struct {
	known   atomic.Int64 // routes with an MTU, and those inside them
	changed chan struct{}
}

func newRouteFollower() *routeFollower {
	f := &routeFollower{changed: make(chan struct{}, 1)}
	f.changed <- struct{}{} // the first reading
	return f
}

func (f *routeFollower) note(e netdev.Event) {
	concerns := e.Kind == netdev.Lost || e.MTU || (e.Kind == netdev.Route || e.Kind == netdev.Link) && f.known.Load() > 0
	if !concerns {
		return
	}
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

func (f *routeFollower) run(ctx context.Context, d *Datapath) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(d.ns); err != nil {
		d.opt.Log.Warn("mtus of routes are not followed before the next start", "error", err)
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.changed:
		}
		time.Sleep(routesPause)
		known, err := putRouteMTUs(d.t)
		if err != nil {
			known++ // the next change is another chance
			d.opt.Log.Warn("mtus of routes are not known to the programs; larger packets may leave", "error", err)
		}
		f.known.Store(int64(known))
		bumpGeneration(d.t.Control)
	}
}
