// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet"
	"github.com/sluice-lb/sluice/packet/golden"
)

// BenchmarkPacket measures the time of one packet of a known flow in the XDP
// program, as the kernel's own test run counts it: the same packet again and
// again, so that rewriting it works on the packet of the run before. What changes
// the packet's size is measured by the packets suite instead.
func BenchmarkPacket(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	for _, c := range []struct{ name, yaml, frame string }{
		{"stateless", "services: [{name: s, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dsr, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}]",
			"ip4(src=203.0.113.5,dst=192.0.2.10,ttl=255)/udp(sport=4000,dport=53)/data(18)"},
		{"dsr-rr", "services: [{name: s, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dsr, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]}]",
			"ip4(src=203.0.113.5,dst=192.0.2.10,ttl=255)/udp(sport=4000,dport=53)/data(18)"},
	} {
		b.Run(c.name, func(b *testing.B) {
			conf, err := config.Decode("bench.yaml", []byte(c.yaml))
			if err != nil {
				b.Fatal(err)
			}
			s := newSubject(b, "xdp")
			h := golden.StandardHost()
			if err := s.Reset(conf, h); err != nil {
				b.Fatal(err)
			}
			p, err := packet.Text(c.frame)
			if err != nil {
				b.Fatal(err)
			}
			wan, _ := h.Interface("wan0")
			frame := append(packet.Packet{&packet.Ethernet{Src: packet.MAC{2}, Dst: wan.MAC}}, p...).Build()
			err = s.inside(func() error {
				o := &ebpf.RunOptions{Data: frame, Repeat: 200, Context: xdpContext{DataEnd: uint32(len(frame)), Ingress: uint32(s.ifaces["wan0"])}}
				b.ResetTimer()
				for n := 0; n < b.N; n += 200 {
					if _, err := s.d.programs.Programs["sluice_xdp"].Run(o); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
