// SPDX-License-Identifier: Apache-2.0

package ebpf

import "fmt"

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
	if d.fleeting != nil {
		out = append(out, fmt.Sprintf("flows and programs end with this process: %v; mount a bpffs at /sys/fs/bpf in this mount namespace", d.fleeting))
	}
	return out
}
