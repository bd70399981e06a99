// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// Source is a table of flows outside the kernel's connection table, such as the eBPF datapath's.
type Source interface {
	// Name identifies the owner of the flows in one word: "ebpf".
	Name() string
	// Flows calls visit for every flow. The flow is reused: visit must not keep
	// the pointer. An error of visit ends the walk and is returned.
	Flows(ctx context.Context, visit func(*flow.Flow) error) error
}

// EachFlow calls visit for every flow of src that matches f; a nil f matches all. The entry is reused: visit must not
// keep the pointer.
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

// AddSource counts the flows of src that match f.
func (s *Summary) AddSource(ctx context.Context, src Source, f *Filter) error {
	return EachFlow(ctx, src, f, func(e *Entry) error {
		s.Add(e)
		return nil
	})
}

// AddNamespace counts the connections of ns that match f. The kernel applies the exact conditions.
func (s *Summary) AddNamespace(ctx context.Context, ns netdev.Namespace, f *Filter) error {
	c, err := OpenIn(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	established, _ := readSetting(ns, "tcp_timeout_established") // on error, idle times are omitted
	s.Enter(ns.Name, established)
	return c.Dump(ctx, f, func(e *Entry) error {
		s.Add(e)
		return nil
	})
}
