// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// destination encodes a hardware address as the programs read it from a frame, in the upper six
// bytes.
func destination(mac net.HardwareAddr) uint64 {
	var b [8]byte
	copy(b[2:], mac)
	return binary.LittleEndian.Uint64(b[:])
}

// stationsOf returns the local hardware addresses per interface. They include the interface's
// address and the addresses of macvlan links on the interface (VRRP of keepalived). A port of a
// bridge or bond also has the address of its master.
func stationsOf(h *compile.Host) map[wire.StationKey]uint32 {
	all := map[wire.StationKey]uint32{}
	add := func(ifindex int, mac net.HardwareAddr) {
		if len(mac) == 6 && mac[0]&1 == 0 {
			all[wire.StationKey{Destination: destination(mac), Ifindex: uint32(ifindex)}] = 1
		}
	}
	for _, i := range h.Interfaces {
		add(i.Index, i.MAC)
		if i.Kind == "macvlan" && i.Up && i.Lower != 0 {
			add(i.Lower, i.MAC)
		}
		if master, ok := i.PortOf(h.Interfaces); ok {
			add(i.Index, master.MAC)
		}
	}
	return all
}

// ownStationsOf returns the interfaces' addresses, placed by interface index; hardware interfaces
// have priority. Interfaces with equal low 16 bits of their index are left out, because the
// programs cannot distinguish them.
func ownStationsOf(h *compile.Host) (places [wire.MaxStations]uint64) {
	order := slices.Clone(h.Interfaces)
	rank := func(i netdev.Interface) int {
		if i.Virtual() {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(order, func(a, b netdev.Interface) int { return cmp.Compare(rank(a), rank(b)) })
	tags := map[uint16]int{}
	for _, i := range order {
		tags[uint16(i.Index)]++
	}
	for _, i := range order {
		at, tag := i.Index%wire.MaxStations, uint16(i.Index)
		if len(i.MAC) == 6 && places[at] == 0 && tags[tag] == 1 {
			places[at] = destination(i.MAC) | uint64(tag)
		}
	}
	return places
}

// putStations writes the local hardware addresses for the programs. New entries are added before
// old ones are removed.
func putStations(t *table.Tables, h *compile.Host) error {
	for at, v := range ownStationsOf(h) {
		atomic.StoreUint64(&t.Stations.Values[at], v)
	}
	return table.Equalise(t.Maps["stations"], stationsOf(h), nil)
}

// stationsPause is the time during which link changes are collected before the maps are written.
const stationsPause = 10 * time.Millisecond

// followStations updates the maps when a link or its hardware address changes. Until the update,
// the programs leave frames to a new address (VRRP) to the kernel, which resets their connections.
func (d *Datapath) followStations(ctx context.Context, changed <-chan struct{}) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(d.ns); err != nil {
		d.opt.Log.Warn("changes of hardware addresses are not followed before the next apply", "error", err)
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		time.Sleep(stationsPause)
		h, err := netdev.Interfaces()
		if err == nil {
			err = putStations(d.t, &compile.Host{Interfaces: h})
		}
		if err != nil {
			d.opt.Log.Warn("hardware addresses of interfaces are not known to the programs", "error", err)
		}
	}
}
