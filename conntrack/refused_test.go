// SPDX-License-Identifier: Apache-2.0

package conntrack

import "testing"

func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		c    Counters
		pool uint32
		use  Use
		want Refused
	}{
		{"nothing", Counters{Found: 1000}, 0, Use{}, Refused{}},
		{"a full table", Counters{Drop: 70}, 0, Use{}, Refused{Full: 70}},
		{"no port", Counters{Drop: 10, InsertFailed: 10, Found: 2480}, 0, Use{}, Refused{Ports: 10}},
		{"a race", Counters{Drop: 10, InsertFailed: 10, Found: 10}, 0, Use{}, Refused{Race: 10}},
		{"clashes that were resolved", Counters{InsertFailed: 10}, 0, Use{}, Refused{}},
		{"no port, and clashes that were resolved", Counters{Drop: 10, InsertFailed: 20, Found: 2480}, 0, Use{}, Refused{Ports: 10}},
		{"no port, and a full table", Counters{Drop: 80, InsertFailed: 10, Found: 2480}, 0, Use{}, Refused{Full: 70, Ports: 10}},
		{"long chains", Counters{InsertFailed: 10, ChainTooLong: 10}, 0, Use{}, Refused{Chain: 10}},
		{"long chains, and a full table", Counters{Drop: 70, InsertFailed: 10, ChainTooLong: 10}, 0, Use{}, Refused{Full: 70, Chain: 10}},
		{"one port, which was taken", Counters{Drop: 10, InsertFailed: 10}, 1, Use{}, Refused{Ports: 10}},
		{"20 ports", Counters{Drop: 10, InsertFailed: 10}, 20, Use{}, Refused{Ports: 10}},
		{"40 ports", Counters{Drop: 10, InsertFailed: 10, Found: 80}, 40, Use{}, Refused{Ports: 10}},
		{"40 ports, and a race", Counters{Drop: 10, InsertFailed: 10, Found: 10}, 40, Use{}, Refused{Race: 10}},
		{"a race beside connections that collided and found a port", Counters{Drop: 10, InsertFailed: 10, Found: 9000}, 0, Use{3000, 64512}, Refused{Race: 10}},
		{"no port, found by few tries", Counters{Drop: 10, InsertFailed: 10, Found: 10}, 0, Use{64000, 64512}, Refused{Ports: 10}},
		{"nearly all ports", Counters{Drop: 10, InsertFailed: 10, Found: 2480}, 1000, Use{930, 1000}, Refused{Ports: 10}},
		{"half of the ports", Counters{Drop: 10, InsertFailed: 10, Found: 2480}, 1000, Use{500, 1000}, Refused{Race: 10}},
		{"a race, and a full table", Counters{Drop: 80, InsertFailed: 10, Found: 2480}, 0, Use{10, 64512}, Refused{Full: 70, Race: 10}},
	} {
		if got := tc.c.Refused(tc.pool, tc.use); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
	}
}
