// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"net/netip"
	"testing"
	"time"
)

// TestManySources: who comes when there are too many is not answered, at little cost,
// until one of the others has been silent.
func TestManySources(t *testing.T) {
	var l limiter
	source := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) }
	now := time.Hour
	for i := range maxSources {
		if !l.allow(source(i), now) {
			t.Fatalf("source %d is not answered", i)
		}
	}
	if !l.allow(source(0), now) {
		t.Error("one that is known is not answered")
	}
	begun := time.Now()
	for i := range 200_000 {
		if l.allow(source(maxSources+i), now) {
			t.Fatalf("source %d is answered", maxSources+i)
		}
	}
	if took := time.Since(begun); took > 2*time.Second { // 10 ms; 7 s when each looks for one that is silent
		t.Errorf("200,000 packets took %s", took)
	}
	now += time.Second / perSecond
	if !l.allow(source(maxSources), now) || !l.allow(source(0), now) {
		t.Error("nobody new is answered, though all but one were silent")
	}
}
