// SPDX-License-Identifier: Apache-2.0

package conntrack

import "testing"

func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		c    Counters
		pool uint32
		want Refused
	}{
		{"nothing", Counters{Found: 1000}, 0, Refused{}},
		{"a full table", Counters{Drop: 70}, 0, Refused{Full: 70}},
		{"no port", Counters{Drop: 10, InsertFailed: 10, Found: 2480}, 0, Refused{Ports: 10}},
		{"a race", Counters{Drop: 10, InsertFailed: 10, Found: 10}, 0, Refused{Race: 10}},
		{"clashes that were resolved", Counters{InsertFailed: 10}, 0, Refused{}},
		{"no port, and clashes that were resolved", Counters{Drop: 10, InsertFailed: 20, Found: 2480}, 0, Refused{Ports: 10}},
		{"no port, and a full table", Counters{Drop: 80, InsertFailed: 10, Found: 2480}, 0, Refused{Full: 70, Ports: 10}},
		{"long chains", Counters{InsertFailed: 10, ChainTooLong: 10}, 0, Refused{Chain: 10}},
		{"long chains, and a full table", Counters{Drop: 70, InsertFailed: 10, ChainTooLong: 10}, 0, Refused{Full: 70, Chain: 10}},
		{"one port, which was taken", Counters{Drop: 10, InsertFailed: 10}, 1, Refused{Ports: 10}},
		{"20 ports", Counters{Drop: 10, InsertFailed: 10}, 20, Refused{Ports: 10}},
		{"40 ports", Counters{Drop: 10, InsertFailed: 10, Found: 80}, 40, Refused{Ports: 10}},
		{"40 ports, and a race", Counters{Drop: 10, InsertFailed: 10, Found: 10}, 40, Refused{Race: 10}},
	} {
		if got := tc.c.Refused(tc.pool); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
	}
}
