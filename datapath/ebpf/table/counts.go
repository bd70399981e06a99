// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/sluice-lb/sluice/datapath"
)

// Reasons sums the per-CPU counts.
func (t *Tables) Reasons() (out []datapath.ReasonCounter, err error) {
	m := t.Maps["reasons"]
	var perCPU []uint64
	for family := range wire.FamilyNames {
		for action, actionName := range wire.ActionNames() {
			for reason, name := range wire.ReasonNames() {
				if name == "count" {
					break
				}
				key := uint32((family*3+action)*wire.ReasonsStride + reason)
				if err := m.Lookup(key, &perCPU); err != nil {
					return nil, fmt.Errorf("map reasons: %w", err)
				}
				sum := uint64(0)
				for _, n := range perCPU {
					sum += n
				}
				if sum > 0 {
					out = append(out, datapath.ReasonCounter{Family: wire.FamilyNames[family], Action: actionName, Reason: name, Packets: sum})
				}
			}
		}
	}
	return out, nil
}

type Traffic struct{ Packets, Bytes uint64 }

func Plus(a, b Traffic) Traffic { return Traffic{a.Packets + b.Packets, a.Bytes + b.Bytes} }

// Tally sums what a backend got without flows.
func (t *Tables) Tally(backend uint32) (sum Traffic) {
	var perCPU []wire.Tally
	if t.Maps["tallies"].Lookup(backend, &perCPU) != nil {
		return sum
	}
	for _, v := range perCPU {
		sum = Plus(sum, Traffic{v.Packets, v.Bytes})
	}
	return sum
}

// Use tells how full the tables are, as of the last sweep.
func (t *Tables) Use(halfOpen uint32) []datapath.TableUse {
	c := t.Control.Values[0]
	bytes := func(room *uint32, each uint64, index *uint64) uint64 { // as large as they are now
		return uint64(atomic.LoadUint32(room))*each + uint64(uint32(atomic.LoadUint64(index)))*bucketBytes
	}
	now := &t.Control.Values[0]
	out := []datapath.TableUse{
		{Name: "flows4", Used: int(c.Used4), Size: int(t.Entries4), Bytes: bytes(&t.Stock4.Values[0].Room, 64, &now.Index4)},
		{Name: "flows6", Used: int(c.Used6), Size: int(t.Entries6), Bytes: bytes(&t.Stock6.Values[0].Room, 128, &now.Index6)},
		{Name: "half-open", Used: int(c.HalfOpen), Size: int(halfOpen)},
	}
	ports := datapath.TableUse{Name: "ports"}
	for i := range t.Ports.Values {
		ports.Used += int(t.Ports.Values[i].Used)
	}
	ports.Size = len(t.Ports.Values) << 16
	ports.Bytes = uint64(len(t.Ports.Values))*8448 + t.Owners.Bytes()
	return append(out, ports)
}
