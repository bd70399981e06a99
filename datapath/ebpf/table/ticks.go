// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// TickRate is measured once, because the kernel does not change it.
var TickRate = sync.OnceValues(measureHz)

// measureHz measures the kernel's ticks per second.
func measureHz() (uint32, error) {
	spec, err := wire.Spec()
	if err != nil {
		return 0, err
	}
	for name := range spec.Programs {
		if name != "read_clocks" {
			delete(spec.Programs, name)
		}
	}
	for name := range spec.Maps {
		if name[0] != '.' {
			delete(spec.Maps, name)
		}
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return 0, fmt.Errorf("programs: %w", err)
	}
	defer c.Close()
	read := func() (v struct{ Ticks, NS uint64 }, err error) {
		_, err = c.Programs["read_clocks"].Run(&ebpf.RunOptions{Context: &v, ContextOut: &v})
		return v, err
	}
	first, err := read()
	if err != nil {
		return 0, err
	}
	time.Sleep(80 * time.Millisecond) // long enough to distinguish the four tick rates
	last, err := read()
	if err != nil {
		return 0, err
	}
	measured := float64(last.Ticks-first.Ticks) / (float64(last.NS-first.NS) / 1e9)
	best := uint32(250)
	for _, hz := range []uint32{100, 250, 300, 1000} {
		if abs(measured-float64(hz)) < abs(measured-float64(best)) {
			best = hz
		}
	}
	return best, nil
}

func abs(x float64) float64 {
	if x < 0 {
		return -x
	}
	return x
}
