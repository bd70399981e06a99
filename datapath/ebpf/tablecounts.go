// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/sluice-lb/sluice/datapath"
)

// reasons sums the per-CPU counts.
func (t *tables) reasons() (out []datapath.ReasonCounter, err error) {
	m := t.maps["reasons"]
	var perCPU []uint64
	for family := range familyNames {
		for action, actionName := range actionNames() {
			for reason, name := range reasonNames() {
				if name == "count" {
					break
				}
				key := uint32((family*3+action)*ReasonsStride + reason)
				if err := m.Lookup(key, &perCPU); err != nil {
					return nil, fmt.Errorf("map reasons: %w", err)
				}
				sum := uint64(0)
				for _, n := range perCPU {
					sum += n
				}
				if sum > 0 {
					out = append(out, datapath.ReasonCounter{Family: familyNames[family], Action: actionName, Reason: name, Packets: sum})
				}
			}
		}
	}
	return out, nil
}

type traffic struct{ packets, bytes uint64 }

func plus(a, b traffic) traffic { return traffic{a.packets + b.packets, a.bytes + b.bytes} }

// tally sums what a backend got without flows.
func (t *tables) tally(backend uint32) (sum traffic) {
	var perCPU []wireTally
	if t.maps["tallies"].Lookup(backend, &perCPU) != nil {
		return sum
	}
	for _, v := range perCPU {
		sum = plus(sum, traffic{v.Packets, v.Bytes})
	}
	return sum
}

// use tells how full the tables are, as of the last sweep.
func (t *tables) use(halfOpen uint32) []datapath.TableUse {
	c := t.control.values[0]
	out := []datapath.TableUse{
		{Name: "flows4", Used: int(c.Used4), Size: int(t.entries4), Bytes: uint64(t.entries4)*64 + indexBytes(t.entries4)},
		{Name: "flows6", Used: int(c.Used6), Size: int(t.entries6), Bytes: uint64(t.entries6)*128 + indexBytes(t.entries6)},
		{Name: "half-open", Used: int(c.HalfOpen), Size: int(halfOpen)},
	}
	ports := datapath.TableUse{Name: "ports"}
	for i := range t.ports.values {
		ports.Used += int(t.ports.values[i].Used)
	}
	ports.Size = len(t.ports.values) << 16
	ports.Bytes = uint64(len(t.ports.values)) * (8448 + 4<<16)
	return append(out, ports)
}
