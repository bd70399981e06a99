// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat/golden"
	"github.com/sluice-lb/sluice/packet"
)

// hostileConfig has a rule or a service of every kind, so that any packet finds one.
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

// hostileSeeds are packets that the configuration forwards.
var hostileSeeds = []struct{ iface, text string }{
	{"wan0", "ip4(src=203.0.113.10,dst=192.0.2.10)/tcp(sport=40000,dport=80,flags=S)/data(20)"},
	{"wan0", "ip4(src=203.0.113.10,dst=192.0.2.10)/udp(sport=40000,dport=53)/data(30)"},
	{"wan0", "ip6(src=2001:db8:5::1,dst=2001:db8::10)/udp(sport=40000,dport=53)/data(31)"},
	{"wan0", "ip4(src=203.0.113.10,dst=192.0.2.40)/udp(sport=40000,dport=80)/data(40)"},
	{"wan0", "ip4(src=203.0.113.10,dst=192.0.2.50)/udp(sport=40000,dport=514)/data(40)"},
	{"lan0", "ip4(src=10.0.2.5,dst=198.18.0.1)/udp(sport=4000,dport=53)/data(50)"},
	{"lan0", "ip4(src=10.0.2.5,dst=198.18.0.1)/tcp(sport=4000,dport=80,flags=S)"},
	{"lan0", "ip4(src=10.0.2.5,dst=198.18.0.1)/icmp(type=echo,id=7)/data(33)"},
	{"wan0", "ip4(src=203.0.113.10,dst=203.0.113.201)/tcp(sport=4000,dport=80,flags=S)"},
	{"lan0", "ip4(src=10.1.9.130,dst=198.18.0.1)/udp(sport=4000,dport=53)/data(50)"},
	{"wan0", "ip4(src=198.18.0.1,dst=198.51.100.130,proto=47)/data(50)"},
	{"lan0", "ip6(src=fd00:a:1:1::2,dst=2001:db8:9::1)/udp(sport=4000,dport=53)/data(51)"},
	{"lan0", "ip6(src=fd00:2::5,dst=64:ff9b::c612:1)/udp(sport=4000,dport=53)/data(51)"},
	{"lan0", "ip6(src=fd00:2::5,dst=64:ff9b::c612:1)/tcp(sport=4000,dport=53,flags=S)/data(51)"},
	{"lan0", "ip6(src=fd00:2::5,dst=64:ff9b::c612:1)/icmp6(type=echo,id=9)/data(51)"},
}

// hostile makes packets out of what was sent and what came out.
type hostile struct {
	*rand.Rand
	s     *subject
	known []seen
}

type seen struct {
	iface string
	frame []byte
}

func (h *hostile) run(in seen) error {
	ifindex := uint32(h.s.ifaces[in.iface])
	o := &ebpf.RunOptions{Data: in.frame, DataOut: make([]byte, len(in.frame)+512)}
	program, verdicts := h.s.d.programs.Programs["sluice_tc"], []uint32{0xffffffff, 2, 7} // TCX_NEXT, TC_ACT_SHOT, TC_ACT_REDIRECT
	if h.s.hook == "xdp" {
		program, verdicts = h.s.d.programs.Programs["sluice_xdp"], []uint32{1, 2, 3, 4} // all but XDP_ABORTED
		o.Context = xdpContext{DataEnd: uint32(len(in.frame)), Ingress: ifindex}
	} else {
		o.Context = skbMeta{Ingress: ifindex, Ifindex: ifindex}
		if h.s.hook == "tc-complete" {
			o.Flags = testChecksumComplete
		}
	}
	verdict, err := program.Run(o)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, packet.Parse(in.frame))
	}
	if !slices.Contains(verdicts, verdict) {
		return fmt.Errorf("verdict %d: %s", int32(verdict), packet.Parse(in.frame))
	}
	if slices.Equal(o.DataOut, in.frame) || packet.Verify(in.frame) != nil {
		return nil
	}
	if err := packet.Verify(o.DataOut); err != nil {
		return fmt.Errorf("a right packet became a wrong one: %v\nin  %s\nout %s", err, packet.Parse(in.frame), packet.Parse(o.DataOut))
	}
	return nil
}

// about wraps a packet in ICMP errors about it, from its receiver.
func (h *hostile) about(in seen, depth int) seen {
	p := packet.Parse(in.frame)
	if len(p) < 2 {
		return in
	}
	out := "wan0"
	if in.iface == "wan0" {
		out = "lan0"
	}
	if h.IntN(4) == 0 {
		out = in.iface
	}
	m := &packet.ICMP{Type: []uint8{3, 3, 11, 12, 4, 5}[h.IntN(6)], Code: uint8(h.IntN(16)), Rest: h.Uint32() & 0xff0005ff}
	quoted := &packet.Data{Bytes: slices.Clone(in.frame[14:min(len(in.frame), 14+28+h.IntN(520))])}
	var q packet.Packet
	switch ip := p[1].(type) {
	case *packet.IPv4:
		q = packet.Packet{p[0], &packet.IPv4{Src: ip.Dst, Dst: ip.Src, TTL: 64}, m, quoted}
	case *packet.IPv6:
		m.V6, m.Type, m.Code = true, uint8(1+h.IntN(4)), uint8(h.IntN(6))
		q = packet.Packet{p[0], &packet.IPv6{Src: ip.Dst, Dst: ip.Src, HopLimit: 64}, m, quoted}
	default:
		return in
	}
	e := seen{out, q.Build()}
	if depth > 1 {
		return h.about(e, depth-1)
	}
	return e
}

// spoil breaks a packet, and mostly leaves its IP header's checksum right.
func (h *hostile) spoil(in seen) seen {
	b := slices.Clone(in.frame)
	for range 1 + h.IntN(3) {
		switch h.IntN(6) {
		case 0: // cut off
			b = b[:min(len(b), 54+h.IntN(max(1, len(b)-54)))]
		case 1: // any bytes
			for range 1 + h.IntN(4) {
				b[14+h.IntN(len(b)-14)] = byte(h.Uint32())
			}
		case 2: // lengths
			b[[]int{14, 16, 17, 18, 19}[h.IntN(5)]] = byte(h.Uint32())
		case 3: // fragments that overlap, begin late or never end
			if b[14]>>4 == 4 {
				binary.BigEndian.PutUint16(b[18:], uint16(h.IntN(8)))
				binary.BigEndian.PutUint16(b[20:], uint16(h.Uint32())&0x20ff)
			}
		case 4: // extension headers, some of them impossible
			if b[14]>>4 == 6 {
				for range 1 + h.IntN(9) {
					next := []byte{0, 43, 44, 51, 60}[h.IntN(5)]
					x := []byte{b[20], byte(h.IntN(3)), 0, byte(h.IntN(2)), 0, 0, 0, byte(h.IntN(8))}
					if h.IntN(2) == 0 {
						x[1], x[3] = 0, 0
					}
					b[20] = next
					b = slices.Insert(b, 54, x...)
				}
				binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
			}
		default: // protocol
			b[[]int{23, 20}[h.IntN(2)]] = []byte{0, 1, 6, 17, 41, 44, 47, 50, 51, 58, 60, 132}[h.IntN(12)]
		}
	}
	if size := int(b[14]&15) * 4; b[14]>>4 == 4 && size >= 20 && 14+size <= len(b) && h.IntN(8) > 0 {
		b[24], b[25] = 0, 0
		binary.BigEndian.PutUint16(b[24:], packet.Checksum(b[14:14+size]))
	}
	return seen{in.iface, b}
}

func (h *hostile) flows() (n int, err error) {
	err = h.s.d.Flows(context.Background(), func(flow.Flow) bool { n++; return true })
	return n, err
}

// round sends a thousand packets, the last 200 of them ICMP errors.
func (h *hostile) round() error {
	for range 800 {
		in := h.known[h.IntN(len(h.known))]
		switch h.IntN(8) {
		case 0:
		case 1:
			in = h.spoil(h.about(in, 1+h.IntN(3)))
		default:
			in = h.spoil(in)
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
		if err := h.run(h.about(h.known[h.IntN(len(h.known))], 1+h.IntN(2))); err != nil {
			return err
		}
	}
	after, err := h.flows()
	if err == nil && after > before {
		err = fmt.Errorf("errors made %d flows", after-before)
	}
	return err
}

// TestHostilePackets sends broken packets through every hook: no verdict that means
// a fault of the program, no wrong packet made of a right one, no flow made by an
// ICMP error, no helper that refused. SLUICE_HOSTILE_PACKETS asks for more.
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
			h := &hostile{Rand: rand.New(rand.NewPCG(uint64(number(t, "SLUICE_HOSTILE_SEED", 1)), uint64(i))), s: newSubject(t, hook)}
			if err := h.s.Reset(c, golden.StandardHost()); err != nil {
				t.Fatal(err)
			}
			for _, seed := range hostileSeeds {
				h.known = append(h.known, seen{seed.iface, h.s.frame(seed.iface, seed.text)})
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
