// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"net/netip"
	"testing"
	"time"
)

// TestManySources: a source beyond the maximum gets no answer. The limiter searches for room only when another source
// may have been silent for long enough.
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
	if l.allow(source(maxSources), now) {
		t.Error("one too many is answered")
	}
	l.conforms[source(1)] = 0 // no search before the first may have been silent for long enough
	if l.allow(source(maxSources), now) {
		t.Error("all sources are looked at for each packet of a flood")
	}
	l.conforms[source(1)] = l.conforms[source(2)]
	now += time.Second / perSecond
	if !l.allow(source(maxSources), now) || !l.allow(source(0), now) {
		t.Error("nobody new is answered, though all but one were silent")
	}
}
