// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// TestPlaceDirects finds every placed listener in the slots that the program reads. With a quarter of the table in use,
// nearly all listeners are placed.
func TestPlaceDirects(t *testing.T) {
	var list []wire.Direct
	a := netip.MustParseAddr("192.0.2.1")
	for i := range 1 << (wire.DirectBits - 2) {
		k := wire.ListenerKey{L4Proto: 17, Addr: wire.BytesOf(a), Port: wire.PortOf(uint16(1 + i%9))}
		list = append(list, wire.Direct{Key: directKey(k), Service: uint32(i)})
		if i%9 == 8 {
			a = a.Next()
		}
	}
	placed := PlaceDirects(list)
	for at, d := range placed {
		if home := uint32(d.Key * wire.DirectMultiplier >> (64 - wire.DirectBits)); at != home && at != home^1 {
			t.Errorf("key %#x stands at %d, and is looked for at %d", d.Key, at, home)
		}
	}
	if left := len(list) - len(placed); left*100 > len(list)*5 {
		t.Errorf("%d of %d listeners find no place", left, len(list))
	}
}
