// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// User space runs some programs rarely: they create or remove mappings, or end a flow. They use the
// tables and constants of the programs in force and are loaded on demand. Packets may be processed
// meanwhile, because these programs have separate working memory.

// loadOnDemand loads the named programs with the constants s, unless they are loaded.
func (d *Datapath) loadOnDemand(s wire.Switches, names ...string) error {
	for _, name := range names {
		if d.onDemand[name] != nil {
			continue
		}
		c, err := d.t.Program(s, false, name)
		if err != nil {
			return err
		}
		if d.onDemand == nil {
			d.onDemand = map[string]*ebpf.Collection{}
		}
		d.onDemand[name] = c
	}
	return nil
}

// runOnDemand runs such a program and returns its verdict.
func (d *Datapath) runOnDemand(name string, s wire.Switches, o *ebpf.RunOptions) (verdict uint32, err error) {
	if err = d.loadOnDemand(s, name); err == nil {
		verdict, err = d.onDemand[name].Programs[name].Run(o)
	}
	if err != nil {
		return 0, fmt.Errorf("program %s: %w", name, err)
	}
	return verdict, nil
}

// forgetOnDemand closes the programs, because programs with other constants are in force.
func (d *Datapath) forgetOnDemand() {
	for name, c := range d.onDemand {
		c.Close()
		delete(d.onDemand, name)
	}
}
