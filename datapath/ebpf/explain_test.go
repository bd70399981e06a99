// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet/golden"
)

func TestExplain(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("test.yaml", []byte(`
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: rr
    backends: [{name: a, address: 10.0.2.2, port: 8080}]
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}
firewall:
  sets: {banned: [192.0.2.200/32]}
  rules: [{action: drop, source: "@banned"}]
`))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, "xdp")
	if err := s.Reset(c, golden.StandardHost()); err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort
	for _, c := range []struct {
		in, src, dst                        string
		owner, backend, after, out, verdict string
	}{
		{"wan0", "198.18.0.9:4000", "192.0.2.10:80", "web", "a", "tcp 198.18.0.9:4000 -> 10.0.2.2:8080", "lan0", "forward new-flow"},
		{"lan0", "10.0.2.3:4000", "198.18.0.9:443", "office", "", "tcp 10.0.2.3:4000 -> 198.18.0.9:443", "wan0", "forward new-flow"},
		{"wan0", "192.0.2.200:4000", "192.0.2.10:80", "", "", "tcp 192.0.2.200:4000 -> 192.0.2.10:80", "", "drop denied"},
		{"wan0", "198.18.0.9:4000", "192.0.2.99:80", "", "", "tcp 198.18.0.9:4000 -> 192.0.2.99:80", "", "pass not-ours"},
	} {
		e, err := s.d.Explain(context.Background(), datapath.Question{Interface: c.in,
			Tuple: flow.Tuple{Protocol: flow.TCP, Source: at(c.src), Dest: at(c.dst)}})
		if err != nil {
			t.Fatal(err)
		}
		if e.Owner != c.owner || e.Backend != c.backend || e.After.String() != c.after || e.Out != c.out || e.Action+" "+e.Reason != c.verdict {
			t.Errorf("%s -> %s: %+v", c.src, c.dst, e)
		}
	}
	if flows, _ := s.Flows(); len(flows) != 0 {
		t.Errorf("explaining made %d flows", len(flows))
	}
	if n := counted(t, s.d, "denied"); n != 0 {
		t.Errorf("explaining was counted %d times", n)
	}
}
