// SPDX-License-Identifier: Apache-2.0

package capacity

import "testing"

func TestEntryBytes(t *testing.T) {
	for _, tc := range []struct {
		name string
		x    Extensions
		want uint64
	}{
		{"plain", Extensions{}, 256},
		{"NAT", Extensions{NAT: true}, 384},
		{"NAT, accounting, stamps, events, labels", Extensions{NAT: true, Accounting: true, Timestamps: true, Events: true, Labels: true}, 384},
		{"and a helper", Extensions{NAT: true, Accounting: true, Timestamps: true, Events: true, Labels: true, Helper: true}, 448},
	} {
		if got := EntryBytes(tc.x); got != tc.want {
			t.Errorf("%s: %d bytes, want %d", tc.name, got, tc.want)
		}
	}
	if got := TableBytes(131072, 65536, Extensions{NAT: true}); got != 131072*384+65536*8 {
		t.Errorf("table of 131,072: %d bytes", got)
	}
}
