// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"
)

// TestPlaceDirects finds every placed listener where the program looks for it, and
// fills a table of which a quarter is used nearly without leaving one out.
func TestPlaceDirects(t *testing.T) {
	var list []wireDirect
	a := netip.MustParseAddr("192.0.2.1")
	for i := range 1 << (DirectBits - 2) {
		k := wireListenerKey{L4Proto: 17, Addr: bytesOf(a), Port: portOf(uint16(1 + i%9))}
		list = append(list, wireDirect{Key: directKey(k), Service: uint32(i)})
		if i%9 == 8 {
			a = a.Next()
		}
	}
	placed := placeDirects(list)
	for at, d := range placed {
		if home := uint32(d.Key * DirectMultiplier >> (64 - DirectBits)); at != home && at != home^1 {
			t.Errorf("key %#x stands at %d, and is looked for at %d", d.Key, at, home)
		}
	}
	if left := len(list) - len(placed); left*100 > len(list)*5 {
		t.Errorf("%d of %d listeners find no place", left, len(list))
	}
}
