// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// BenchmarkUpDown measures the cost of a network for one test.
func BenchmarkUpDown(b *testing.B) {
	labtest.Require(b, labtest.Root)
	for b.Loop() {
		l, err := lab.Up(b.Context(), lab.Balancer())
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Down(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDo measures the cost of entering and leaving a namespace.
func BenchmarkDo(b *testing.B) {
	l := labtest.New(b, lab.Topology{Name: "bench", Nodes: []lab.NodeSpec{{Name: "a"}}})
	for b.Loop() {
		if err := l.Node("a").Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
