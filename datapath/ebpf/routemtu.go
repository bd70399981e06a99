// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// putRouteMTUs writes the MTUs of the host's routes for the programs. It returns the number of
// relevant routes. If the map is full, an error reports the rest.
func putRouteMTUs(t *table.Tables, list []netdev.RouteMTU) (known int, err error) {
	m := t.Maps["route_mtus"]
	want := map[wire.RouteMtuKey]uint32{}
	for _, r := range list {
		if len(want) == int(m.MaxEntries()) {
			err = fmt.Errorf("the host has %d routes in or around routes with an mtu, and %d have room", len(list), len(want))
			break
		}
		a, bits, mtu, by := r.To.Masked().Addr(), 32+r.To.Bits(), r.MTU, uint32(r.Ifindex)
		if a.Is4() {
			bits += 96
			by |= wire.RouteMTUIpv4
		} else if mtu > 0 {
			mtu = max(mtu, 1280) // the kernel uses no smaller MTU (RFC 8200 §5)
		}
		want[wire.RouteMtuKey{PrefixLen: uint32(bits), Ifindex: by, Addr: a.As16()}] = mtu
	}
	if len(want) > 0 { // set before the entries: a failed lookup is harmless
		setChecks(t, wire.CheckRouteMtus, wire.CheckRouteMtus)
	}
	if e := table.Equalise(m, want, nil); e != nil {
		return len(list), e
	}
	if len(want) == 0 {
		setChecks(t, wire.CheckRouteMtus, 0)
	}
	return len(list), err
}
