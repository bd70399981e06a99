// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// BenchmarkUpDown is what a test pays for a network of its own.
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

// BenchmarkDo is what it costs to enter a namespace and to come back.
func BenchmarkDo(b *testing.B) {
	l := labtest.New(b, lab.Topology{Name: "bench", Nodes: []lab.NodeSpec{{Name: "a"}}})
	for b.Loop() {
		if err := l.Node("a").Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
