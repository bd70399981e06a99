// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// Warnings returns what of the configuration in force, or of this host, keeps the
// datapath from being all that it is asked to be, each with the remedy.
func (d *Datapath) Warnings() (out []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.snapshot == nil {
		return nil
	}
	if differs := d.t.differs(d.snapshot.Config.Tables); differs != "" {
		out = append(out, differs)
	}
	if d.away != nil {
		out = append(out, fmt.Sprintf("%v; until it is back, the rules are those for what was there", d.away))
	}
	_, missing := d.seen.attachTo(d.snapshot.Config)
	for _, name := range missing {
		out = append(out, fmt.Sprintf("interface %s: there is none of that name; it is attached when it appears", name))
	}
	for _, name := range d.snapshot.Config.Interfaces {
		i, ok := d.seen.byName(name)
		if !ok {
			continue
		}
		if !i.Ethernet() {
			out = append(out, fmt.Sprintf("interface %s %s: what comes in by it is left to the kernel", name, withoutEthernet))
		}
		if m, port := i.PortOf(d.seen.interfaces); port {
			out = append(out, fmt.Sprintf("interface %s is a port of the %s %s: frames that %s would switch are taken too; name %s instead", name, m.Kind, m.Name, m.Name, m.Name))
		}
	}
	native := false
	for _, a := range d.attached {
		native = native || a.hook == config.AttachXDP
		if i, _ := d.seen.byName(a.name); a.hook != config.AttachTC && i.Virtual() {
			large := ""
			if a.hook == config.AttachXDPGeneric { // native XDP has the driver refuse them
				large = ", and segments that it leaves to the link to cut (TSO) are lost"
			}
			out = append(out, fmt.Sprintf("interface %s is a virtual link (%s) with XDP: what a local stack sends without checksums arrives with wrong ones%s; "+
				"use attach: tc, or 'ethtool -K DEV tx off' at the sending end", a.name, i.Kind, large))
		}
	}
	for _, i := range d.seen.deaf() {
		if native && i.Kind != "veth" && i.Kind != "bond" { // which may
			out = append(out, fmt.Sprintf("interface %s (%s): packets that leave by it are lost, because XDP cannot hand them to it; use attach: tc", i.Name, i.Kind))
		}
	}
	slices.Sort(out)
	if d.fleeting != nil {
		out = append(out, fmt.Sprintf("flows and programs end with this process: %v; mount a bpffs at /sys/fs/bpf in this mount namespace", d.fleeting))
	}
	return out
}
