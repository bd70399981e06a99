// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// perCPUAtOnce bounds the memory for reading a per-CPU array, because a machine may have hundreds of CPUs.
const perCPUAtOnce = 1024

// perCPU calls f for the elements of an array below a number, in order, with the values of all CPUs.
func perCPU[V any](m *ebpf.Map, below uint32, f func(n uint32, values []V)) error {
	cpus := ebpf.MustPossibleCPU()
	numbers, values := make([]uint32, perCPUAtOnce), make([]V, perCPUAtOnce*cpus)
	var cursor ebpf.MapBatchCursor
	for at := uint32(0); at < below; {
		n, err := m.BatchLookup(&cursor, numbers, values, nil)
		for i := range n {
			if at = numbers[i] + 1; at <= below {
				f(numbers[i], values[i*cpus:][:cpus])
			}
		}
		if err != nil && (!errors.Is(err, ebpf.ErrKeyNotExist) || at < below) {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	return nil
}

// Reasons sums the per-CPU counts.
func (t *Tables) Reasons() (out []datapath.ReasonCounter, err error) {
	actions, reasons := wire.ActionNames(), wire.ReasonNames()
	all := uint32(len(wire.FamilyNames) * len(actions) * wire.ReasonsStride)
	err = perCPU(t.Maps["reasons"], all, func(n uint32, values []uint64) {
		sum := uint64(0)
		for _, v := range values {
			sum += v
		}
		reason, of := int(n%wire.ReasonsStride), int(n/wire.ReasonsStride)
		if sum > 0 && reason < len(reasons) {
			out = append(out, datapath.ReasonCounter{Family: wire.FamilyNames[of/len(actions)], Action: actions[of%len(actions)], Reason: reasons[reason], Packets: sum})
		}
	})
	return out, err
}

type Traffic struct{ Packets, Bytes uint64 }

func Plus(a, b Traffic) Traffic { return Traffic{a.Packets + b.Packets, a.Bytes + b.Bytes} }

// Tallies returns, for each backend below a number, the sum of its traffic without flows.
func (t *Tables) Tallies(below uint32) ([]Traffic, error) {
	sums := make([]Traffic, below)
	err := perCPU(t.Maps["tallies"], below, func(n uint32, values []wire.Tally) {
		for _, v := range values {
			sums[n] = Plus(sums[n], Traffic{v.Packets, v.Bytes})
		}
	})
	return sums, err
}

// Use returns the fill of the tables as of the last sweep.
func (t *Tables) Use(halfOpen uint32) []datapath.TableUse {
	c := t.Control.Values[0]
	bytes := func(room *uint32, each uint64, index *uint64) uint64 { // memory of the maps at their current size
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
