// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// TestRaceForNAT opens and closes flows of few inside endpoints to few destinations on two CPUs, in a random
// order. Both CPUs also end random flows and sweep the tables. After all timeouts, the tables, ports,
// clients and quotas are empty.
func TestRaceForNAT(t *testing.T) {
	const (
		four = "ip4(src=10.0.2.%d,dst=198.18.0.%d)/"
		six  = "ip6(src=fd00:2::%d,dst=64:ff9b::c612:%d)/"
		pool = "ip4(src=10.0.2.%d,dst=203.0.113.%d)/"
	)
	for _, c := range []struct{ name, heads, yaml string }{
		{"snat", four, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}"},
		{"limits", four, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1-203.0.113.2], connections-per-client: 8, ports-per-client: 8}"},
		{"blocks", four, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1-203.0.113.2], port-block: 64}"},
		{"filtering", four, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1], filtering: address-dependent}"},
		{"mapping", four, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1], mapping: address-and-port-dependent}"},
		{"nat64", six, `{name: n, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.1], connections-per-client: 8}`},
		{"hairpin", pool, "{name: n, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1-203.0.113.2], hairpin: on}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := raceIn(t, "lan0", "nat:\n  - "+c.yaml+"\n")
			var frames [][]byte
			for i := range 60 {
				text := fmt.Sprintf(c.heads, 2+rand.IntN(2), 1+rand.IntN(2))
				port, to := 4000+rand.IntN(2), 4000+rand.IntN(2)
				switch i % 3 {
				case 0:
					text += fmt.Sprintf("tcp(sport=%d,dport=%d,flags=%s,seq=1,ack=1)", port, to, []string{"S", "A", "R", "FA"}[rand.IntN(4)])
				case 1:
					text += fmt.Sprintf("udp(sport=%d,dport=%d)", port, to)
				case 2:
					if c.heads == six {
						text += fmt.Sprintf("icmp6(type=echo,id=%d,seq=1)", port)
					} else {
						text += fmt.Sprintf("icmp(type=echo,id=%d,seq=1)", port)
					}
				}
				frames = append(frames, e.frame("lan0", text))
			}
			for range 10 {
				e.run(10, frames, frames)
				if err := e.Advance(301 * time.Second); err != nil { // ends UDP and ICMP flows, and some of TCP
					t.Fatal(err)
				}
			}
			for range 60 { // established TCP connections, then the hold-down of their ports
				if err := e.Advance(301 * time.Second); err != nil {
					t.Fatal(err)
				}
			}
			held{}.want(t, e.subject, "all flows ended")
			if n := e.checkStocks(); n != 0 {
				t.Errorf("%d entries are live after all timeouts", n)
			}
			if n := e.d.t.Control.Values[0].HalfOpen; n != 0 {
				t.Errorf("%d handshakes are counted, want 0", int32(n))
			}
			each[wire.ClientKey](e.d.t.Maps["clients"], func(c *wire.Client) { t.Errorf("a client without flows is counted: %+v", *c) })
			t.Logf("%d entries were used", e.d.t.Stock4.Values[0].Fresh+e.d.t.Stock6.Values[0].Fresh)
		})
	}
}
