// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/model/judge"
	"github.com/sluice-lb/sluice/packet"
)

// hostileConfig has a rule or service of every kind, so that every packet matches one.
const hostileConfig = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: full, listen: [{address: 192.0.2.10, ports: [53]}, {address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat,
     source-pool: [10.0.2.102, "fd00:2::102"], backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3", port: 5353}]}
  - {name: tube, listen: [{address: 192.0.2.40, ports: [80]}], protocol: udp, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3"}]}
  - {name: syslog, listen: [{address: 192.0.2.50, ports: [514]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.2.4, port: 5514}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201], filtering: address-dependent}
  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8081}}
  - {name: dmz, type: static, external: 198.51.100.128/25, internal: 10.1.9.128/25}
  - {name: renumber, type: npt66, external: "2001:db8:1::/48", internal: "fd00:a:1::/48"}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.202]}
`

// hostileOpens are senders of packets that the configuration forwards.
var hostileOpens = []judge.Opening{
	{Interface: "wan0", Sources: judge.Addresses("203.0.113.%d", 10, 12), Dests: judge.Addresses("192.0.2.%d", 10, 10), Ports: []uint16{80, 53}, Protocols: []judge.Protocol{judge.TCP, judge.UDP}},
	{Interface: "wan0", Sources: judge.Addresses("2001:db8:5::%x", 1, 3), Dests: judge.Addresses("2001:db8::%x", 16, 16), Ports: []uint16{53}, Protocols: []judge.Protocol{judge.UDP}},
	{Interface: "wan0", Sources: judge.Addresses("203.0.113.%d", 10, 12), Dests: judge.Addresses("192.0.2.%d", 40, 40), Ports: []uint16{80}, Protocols: []judge.Protocol{judge.UDP}},
	{Interface: "wan0", Sources: judge.Addresses("203.0.113.%d", 10, 12), Dests: judge.Addresses("192.0.2.%d", 50, 50), Ports: []uint16{514}, Protocols: []judge.Protocol{judge.UDP}},
	{Interface: "wan0", Sources: judge.Addresses("203.0.113.%d", 10, 12), Dests: judge.Addresses("203.0.113.%d", 201, 201), Ports: []uint16{80}, Protocols: []judge.Protocol{judge.TCP}},
	{Interface: "wan0", Sources: judge.Addresses("198.18.0.%d", 1, 2), Dests: judge.Addresses("198.51.100.%d", 130, 131), Ports: []uint16{53}, Protocols: []judge.Protocol{judge.UDP, judge.Other}},
	{Interface: "lan0", Sources: append(judge.Addresses("10.0.2.%d", 5, 7), judge.Addresses("10.1.9.%d", 130, 131)...), Dests: judge.Addresses("198.18.0.%d", 1, 2), Ports: []uint16{53, 80},
		Protocols: []judge.Protocol{judge.TCP, judge.UDP, judge.Ping}},
	{Interface: "lan0", Sources: judge.Addresses("fd00:a:1:1::%x", 2, 3), Dests: judge.Addresses("2001:db8:9::%x", 1, 2), Ports: []uint16{53}, Protocols: []judge.Protocol{judge.UDP}},
	{Interface: "lan0", Sources: judge.Addresses("fd00:2::%x", 5, 7), Dests: judge.Addresses("64:ff9b::c612:%x", 1, 2), Ports: []uint16{53}, Protocols: []judge.Protocol{judge.TCP, judge.UDP, judge.Ping}},
}

// hostile sends broken packets, and ICMP errors about them.
type hostile struct {
	*rand.Rand
	s       *subject
	traffic *judge.Traffic
}

func (h *hostile) run(in model.Arrival) error {
	ifindex := uint32(h.s.ifaces[in.Interface])
	o := &ebpf.RunOptions{Data: in.Frame, DataOut: h.s.caller.room(len(in.Frame))}
	program, verdicts := h.s.d.programs.Programs["sluice_tc"], []uint32{0xffffffff, 2, 7} // TCX_NEXT, TC_ACT_SHOT, TC_ACT_REDIRECT
	if h.s.hook == "xdp" {
		program, verdicts = h.s.d.programs.Programs["sluice_xdp"], []uint32{1, 2, 3, 4} // all but XDP_ABORTED
		o.Context = xdpContext{DataEnd: uint32(len(in.Frame)), Ingress: ifindex}
	} else {
		o.Context = skbMeta{Ingress: ifindex, Ifindex: ifindex}
		if h.s.hook == "tc-complete" {
			o.Flags = testChecksumComplete
		}
	}
	verdict, err := h.s.caller.run(program, o)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, packet.Parse(in.Frame))
	}
	if !slices.Contains(verdicts, verdict) {
		return fmt.Errorf("verdict %d: %s", int32(verdict), packet.Parse(in.Frame))
	}
	if slices.Equal(o.DataOut, in.Frame) || packet.Verify(in.Frame) != nil {
		return nil
	}
	if err := packet.Verify(o.DataOut); err != nil {
		return fmt.Errorf("a right packet became a wrong one: %v\nin  %s\nout %s", err, packet.Parse(in.Frame), packet.Parse(o.DataOut))
	}
	return nil
}

func (h *hostile) flows() (n int, err error) {
	err = h.s.d.Flows(context.Background(), func(flow.Flow) bool { n++; return true })
	return n, err
}

// round sends a thousand packets; the last 200 are ICMP errors.
func (h *hostile) round() error {
	for range 800 {
		in := h.traffic.First()
		switch h.IntN(8) {
		case 0:
		case 1:
			in = judge.Spoil(h.Rand, judge.About(h.Rand, in, 1+h.IntN(3)))
		default:
			in = judge.Spoil(h.Rand, in)
		}
		if err := h.run(in); err != nil {
			return err
		}
	}
	before, err := h.flows()
	if err != nil {
		return err
	}
	for range 200 {
		if err := h.run(judge.About(h.Rand, h.traffic.First(), 1+h.IntN(2))); err != nil {
			return err
		}
	}
	after, err := h.flows()
	if err == nil && after > before {
		err = fmt.Errorf("errors made %d flows", after-before)
	}
	return err
}

// TestHostilePackets sends broken packets through every hook. No verdict may indicate a fault of the program, no
// output packet may be wrong for a valid input, no ICMP error may create a flow, and no BPF helper may fail.
// SLUICE_HOSTILE_PACKETS sets the number of packets.
func TestHostilePackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	packets := number(t, "SLUICE_HOSTILE_PACKETS", 300000)
	c, err := config.Decode("hostile", []byte(hostileConfig))
	if err != nil {
		t.Fatal(err)
	}
	for i, hook := range []string{"xdp", "tc", "tc-complete"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(uint64(number(t, "SLUICE_HOSTILE_SEED", 1)), uint64(i)))
			h := &hostile{Rand: r, s: newSubject(t, hook), traffic: judge.NewTraffic(hostileOpens, golden.StandardHost(), r)}
			if err := h.s.Reset(c, golden.StandardHost()); err != nil {
				t.Fatal(err)
			}
			err := h.s.inside(func() (err error) {
				for sent := 0; sent < packets/3 && err == nil; sent += 1000 {
					err = h.round()
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			counted, err := h.s.Counters()
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range counted.Reasons {
				if r.Reason == "internal" {
					t.Errorf("%s %s %s: %d packets", r.Family, r.Action, r.Reason, r.Packets)
				}
			}
		})
	}
}
