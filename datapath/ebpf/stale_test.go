// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// planned returns the planned change for another configuration.
func (s *subject) planned(yaml string) (change *datapath.Change) {
	s.t.Helper()
	c, err := config.Decode("changing", []byte(yaml))
	if err != nil {
		s.t.Fatal(err)
	}
	c.Attach, c.Tables = s.snapshot.Config.Attach, s.snapshot.Config.Tables
	err = s.inside(func() (err error) {
		change, err = s.d.Plan(context.Background(), golden.Snapshot(c))
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return change
}

// alive returns the number of flows in the tables.
func (s *subject) alive() (n int) {
	s.d.t.Primaries(func(table.Entry) bool { n++; return true })
	return n
}

// TestApplyEndsWhatDiffers changes the configuration under a UDP client and a TCP client that never change their
// ports. Flows that the new configuration treats differently end, TCP flows by policy. No others end, and the
// plan predicts their number.
func TestApplyEndsWhatDiffers(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	const (
		service   = "services:\n  - {name: web, listen: [{address: 192.0.2.10}], protocol: any, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]}\n"
		moved     = "services:\n  - {name: web, listen: [{address: 192.0.2.10}], protocol: any, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.3}]}\n"
		more      = "services:\n  - {name: web, listen: [{address: 192.0.2.10}], protocol: any, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}\n"
		office    = "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}\n"
		fewer     = "nat:\n  - {name: office, type: snat, source: [10.0.2.128/25], out: wan0, to: [203.0.113.201]}\n"
		elsewhere = "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.202]}\n"
		client    = "ip4(src=203.0.113.5,dst=192.0.2.10)"
		inside    = "ip4(src=10.0.2.9,dst=198.18.0.1)"
		toVIP     = "ip4(src=10.0.2.9,dst=192.0.2.10)"
	)
	for _, c := range []struct {
		name, before, after, iface, from string
		ends                             int // ended UDP flows; with policy end, TCP flows too
	}{
		{"nothing", service, service, "wan0", client, 0},
		{"another rule", service, service + office, "wan0", client, 0},
		{"a backend more", service, more, "wan0", client, 0},
		{"a backend replaced", service, moved, "wan0", client, 1},
		{"an address of the pool", office, elsewhere, "lan0", inside, 1},
		{"a source", office, fewer, "lan0", inside, 1},
		{"a service over a rule", office, office + service, "lan0", toVIP, 1},
	} {
		for _, policy := range []string{"", "established: end\n"} {
			s := changing(t, c.before)
			send(t, s, c.iface, c.from+"/udp(sport=4000,dport=80)")
			send(t, s, c.iface, c.from+"/tcp(sport=4000,dport=80,flags=A)")
			want := c.ends
			if policy == "established: end\n" {
				want *= 2
			}
			if got := s.planned(policy + c.after).Ended; got != want {
				t.Errorf("%s, %q: the plan says that %d flows end, want %d", c.name, policy, got, want)
			}
			before := s.alive()
			s.mustChange(policy + c.after)
			if got := before - s.alive(); got != want {
				t.Errorf("%s, %q: %d flows have ended, want %d", c.name, policy, got, want)
			}
			reason := model.ReasonFlow
			if c.ends > 0 && c.name != "a source" {
				reason = model.ReasonNewFlow
			} else if c.ends > 0 {
				reason = model.ReasonNotOurs
			}
			if out := send(t, s, c.iface, c.from+"/udp(sport=4000,dport=80)"); out.Reason != reason {
				t.Errorf("%s, %q: the next datagram is %s, want %s", c.name, policy, out.Reason, reason)
			}
		}
	}
}

// TestReplacedBackend: after the replacement, an existing sender uses the new backend.
func TestReplacedBackend(t *testing.T) {
	yaml := func(backend string) string {
		return "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: " + backend + "}]}\n"
	}
	const client = "ip4(src=203.0.113.5,dst=192.0.2.10)/udp(sport=4000,dport=80)"
	s := changing(t, yaml("10.0.2.2"))
	send(t, s, "wan0", client)
	s.mustChange(yaml("10.0.2.3"))
	out := send(t, s, "wan0", client)
	if len(out.Out) != 1 {
		t.Fatalf("%s %s", out.Action, out.Reason)
	}
	if ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame)); ip == nil || ip.Dst.String() != "10.0.2.3" {
		t.Errorf("the sender goes on to %s", packet.Parse(out.Out[0].Frame))
	}
}

// TestLostSourcesEndFlows: an active client must not keep a source address that the host has lost. This applies
// to services without a pool, and to services that translate the source of clients in the servers' network.
func TestLostSourcesEndFlows(t *testing.T) {
	for mode, at := range map[string]string{"fullnat": "wan0 203.0.113.5", "dnat": "lan0 10.0.2.9"} {
		s := changing(t, "services:\n  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: "+mode+", backends: [{name: a, address: 10.0.2.2}]}\n")
		iface, client, _ := strings.Cut(at, " ")
		source := func() string {
			out := send(t, s, iface, "ip4(src="+client+",dst=192.0.2.10)/udp(sport=4000,dport=53)/data(10)")
			if len(out.Out) != 1 {
				t.Fatalf("%s: %s %s", mode, out.Action, out.Reason)
			}
			ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame))
			return ip.Src.String()
		}
		for _, c := range []struct{ commands, want string }{
			{"", "10.0.2.1"},
			{"addr add 10.0.2.77/24 dev lan0", "10.0.2.1"},
			{"addr del 10.0.2.1/24 dev lan0\naddr replace 10.0.2.77/24 dev lan0\nneigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev lan0", "10.0.2.77"},
		} {
			if err := errors.Join(s.ip(c.commands), s.inside(s.apply)); err != nil {
				t.Fatal(err)
			}
			if got := source(); got != c.want {
				t.Errorf("%s, after %q: sent on from %s, want %s", mode, c.commands, got, c.want)
			}
		}
	}
}
