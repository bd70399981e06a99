// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"

	"github.com/sluice-lb/sluice/flow"
)

// Source is a table of flows other than the kernel's connection table, such as
// that of the eBPF datapath.
type Source interface {
	// Name says whose flows these are, in one word: "ebpf".
	Name() string
	// Flows calls visit for every flow. The flow is reused: visit must not keep
	// the pointer. An error of visit ends the walk and is returned.
	Flows(ctx context.Context, visit func(*flow.Flow) error) error
}

// EachFlow calls visit for every flow of another table that f lets through; a nil f lets
// all through. The entry is reused: visit must not keep the pointer.
func EachFlow(ctx context.Context, src Source, f *Filter, visit func(*Entry) error) error {
	m, err := f.compile()
	if err != nil {
		return err
	}
	var e Entry
	return src.Flows(ctx, func(fl *flow.Flow) error {
		if e.SetFlow(fl); m != nil && !m.match(&e) {
			return nil
		}
		return visit(&e)
	})
}

// AddSource counts the flows of another table that f lets through.
func (s *Summary) AddSource(ctx context.Context, src Source, f *Filter) error {
	return EachFlow(ctx, src, f, func(e *Entry) error {
		s.Add(e)
		return nil
	})
}

// AddNamespace counts the connections of ns that f lets through; the kernel
// sifts what it can.
func (s *Summary) AddNamespace(ctx context.Context, ns Namespace, f *Filter) error {
	c, err := OpenIn(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	established, _ := readSetting(ns, "tcp_timeout_established") // absent: idle times are left out
	s.Enter(ns.Name, established)
	return c.Dump(ctx, f, func(e *Entry) error {
		s.Add(e)
		return nil
	})
}
