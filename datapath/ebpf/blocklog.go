// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"unsafe"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// logBlock logs the allocation or release of a client's port block (RFC 6888 REQ-14). It logs no
// destinations (REQ-12).
func (d *Datapath) logBlock(raw []byte) {
	if len(raw) < int(unsafe.Sizeof(wire.BlockEvent{})) {
		return
	}
	e := *(*wire.BlockEvent)(unsafe.Pointer(&raw[0]))
	text := "ports taken back"
	if e.Given != 0 {
		text = "ports given"
	}
	rule := "?"
	if names := d.sourceNames.Load(); names != nil && (*names)[e.Rule] != "" {
		rule = (*names)[e.Rule]
	}
	d.opt.Log.Info(text, "rule", rule, "client", wire.AddrFrom(e.Client, e.ClientFamily == wire.Family6),
		"address", wire.AddrFrom(e.Outside, e.OutsideFamily == wire.Family6), "ports", flow.Ports{First: e.First, Last: e.Last})
}

// warnLost logs a warning if block events were lost because the ring was full. Each loss is
// reported once.
func (d *Datapath) warnLost(known *uint32) {
	if lost := d.t.Control.Values[0].LostLogs; lost != *known {
		d.opt.Log.Warn("lines about blocks of ports were lost: clients came and went faster than they could be written", "lines", lost-*known)
		*known = lost
	}
}
