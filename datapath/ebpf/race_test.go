// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// race lets two CPUs send packets of the same clients at once, and returns the outcomes.
func race(t *testing.T, s *subject, iface string, clients int, text func(cpu, client int) string) (sent [2][]packet.Packet) {
	t.Helper()
	if runtime.NumCPU() < 2 {
		labtest.Lacks(t, "only one CPU")
	}
	program := s.d.programs.Programs["sluice_xdp"]
	var ready atomic.Int64
	run := func(cpu, client int) error {
		frame := s.frame(iface, text(cpu, client))
		o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512), Context: xdpContext{DataEnd: uint32(len(frame)), Ingress: uint32(s.ifaces[iface])}}
		for ready.Add(1); ready.Load() < int64(2*(client+1)); { // both CPUs spin until the other is ready
		}
		_, err := program.Run(o)
		sent[cpu] = append(sent[cpu], packet.Parse(o.DataOut))
		return err
	}
	var handle netns.NsHandle
	if err := s.inside(func() (err error) { handle, err = netns.Get(); return err }); err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	var both errgroup.Group
	for cpu := range 2 {
		both.Go(func() error {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			var set unix.CPUSet
			set.Set(cpu)
			err := errors.Join(netns.Set(handle), unix.SchedSetaffinity(0, &set))
			for client := range clients {
				err = errors.Join(err, run(cpu, client))
			}
			return err
		})
	}
	if err := both.Wait(); err != nil {
		t.Fatal(err)
	}
	return sent
}

// TestRaceForBinding lets two CPUs open flows of the same inside endpoints at once. Each endpoint gets one
// outside endpoint, and no state remains at the end.
func TestRaceForBinding(t *testing.T) {
	s := office(t, "")
	sent := race(t, s, "lan0", 1000, func(cpu, client int) string {
		return fmt.Sprintf("ip4(src=10.0.2.2,dst=198.18.0.%d)/udp(sport=%d,dport=53)", 1+cpu, 4000+client)
	})
	t.Logf("%d races were lost", count(s, wire.KindFlow, wire.EntryHold))
	source := func(p packet.Packet) string {
		ip, _ := packet.Find[*packet.IPv4](p)
		udp, _ := packet.Find[*packet.UDP](p)
		if ip.Src.String() != "203.0.113.1" {
			return ""
		}
		return fmt.Sprint(udp.SrcPort)
	}
	for client := range sent[0] {
		one, two := source(sent[0][client]), source(sent[1][client])
		if one != two && one != "" && two != "" { // both may lose twice and drop their packets
			t.Errorf("client %d has the ports %s and %s", client, one, two)
		}
	}
	for range 3 {
		if err := s.Advance(301 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	held{}.want(t, s, "all flows ended, all ports have rested")
}

// TestRaceForHairpin lets two CPUs send from the same inside endpoints to the outside endpoints of two inside
// hosts. Each sender gets one outside endpoint.
func TestRaceForHairpin(t *testing.T) {
	s := office(t, "")
	var to [2]int
	for i := range to {
		out := send(t, s, "lan0", fmt.Sprintf("ip4(src=10.0.2.%d,dst=198.18.0.1)/udp(sport=5000,dport=53)", 3+i))
		if _, err := fmt.Sscanf(sentFrom(t, out), "203.0.113.1:%d", &to[i]); err != nil {
			t.Fatal(err)
		}
	}
	race(t, s, "lan0", 1000, func(cpu, client int) string {
		return fmt.Sprintf("ip4(src=10.0.2.2,dst=203.0.113.1)/udp(sport=%d,dport=%d)", 4000+client, to[cpu])
	})
	bindings := map[uint16]int{}
	for i := range s.d.t.Flows4.Values {
		if e := &s.d.t.Flows4.Values[i]; e.Key.State == wire.EntryLive && e.Key.Kind == wire.KindBinding {
			bindings[e.Key.Sport]++
		}
	}
	several := 0
	for _, n := range bindings {
		if n > 1 {
			several++
		}
	}
	if several > 0 || len(bindings) != 1000 {
		t.Errorf("%d of %d endpoints have several bindings", several, len(bindings))
	}
	for range 3 {
		if err := s.Advance(301 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	held{}.want(t, s, "all flows ended, all ports have rested")
}

// TestRaceForFlow lets two CPUs open the same flows of services at once. The slower one forwards its packet by
// the existing flow, so that the reply matches.
func TestRaceForFlow(t *testing.T) {
	for _, mode := range []string{"dnat", "fullnat, source-pool: [10.0.2.100]"} {
		s := changing(t, "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, scheduler: rr,\n"+
			"     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}], mode: "+mode+"}\n")
		sent := race(t, s, "wan0", 1000, func(_, client int) string {
			return fmt.Sprintf("ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=%d,dport=53)", 4000+client)
		})
		type way struct {
			from, to netip.Addr
			port     uint16
		}
		back := map[way]bool{}
		for i := range s.d.t.Flows4.Values {
			if e := &s.d.t.Flows4.Values[i]; e.Key.State == wire.EntryLive && e.Meta.Flags&wire.EntryPrimary == 0 {
				back[way{wire.Addr4From(e.Key.Daddr), wire.Addr4From(e.Key.Saddr), wire.PortOf(e.Key.Dport)}] = true
			}
		}
		lost, parted := 0, 0
		for client := range sent[0] {
			var ways [2]way
			for cpu := range sent {
				ip, _ := packet.Find[*packet.IPv4](sent[cpu][client])
				udp, _ := packet.Find[*packet.UDP](sent[cpu][client])
				if ip.Dst.String() == "192.0.2.10" {
					continue // dropped
				}
				ways[cpu] = way{ip.Src, ip.Dst, udp.SrcPort}
				if !back[ways[cpu]] {
					lost++
				}
			}
			if ways[0] != ways[1] && ways[0] != (way{}) && ways[1] != (way{}) {
				parted++
			}
		}
		if lost > 0 {
			t.Errorf("%s: %d packets went a way that no answer comes back", mode, lost)
		}
		if parted > 0 {
			t.Errorf("%s: %d clients have two flows of one tuple", mode, parted)
		}
		for range 2 {
			if err := s.Advance(301 * time.Second); err != nil {
				t.Fatal(err)
			}
		}
		held{}.want(t, s, mode+": all flows ended")
		if n := s.d.t.ServiceLoads.Values[0].Active; n != 0 {
			t.Errorf("%s: %d connections are counted that have ended", mode, n)
		}
	}
}

// TestClockOfAnotherCPU: a timestamp can be newer than the time that this packet has read. Its age must not wrap
// to 2^32 ticks.
func TestClockOfAnotherCPU(t *testing.T) {
	s := changing(t, `
nat: [{name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}]
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, syn-cookies: true, backends: [{name: a, address: 10.0.2.2}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr, persistence: {key: [source-address]},
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
tables: {flows: 4096, flows6: 4096, half-open: 2}
`)
	now, err := s.clock()
	if err != nil {
		t.Fatal(err)
	}
	soon := now + s.d.hz/2
	to := func(out model.Outcome) string {
		ip, _ := packet.Find[*packet.IPv4](packet.Parse(out.Out[0].Frame))
		return ip.Dst.String()
	}
	query := "ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=%d,dport=53)"
	backend := to(send(t, s, "wan0", fmt.Sprintf(query, 4000)))
	each[wire.StickyKey](s.d.t.Late("stickies"), func(v *wire.Sticky) { v.Seen = soon })
	if again := to(send(t, s, "wan0", fmt.Sprintf(query, 4001))); again != backend {
		t.Errorf("the client of %s is sent to %s", backend, again)
	}
	fragments := s.frame("lan0", "ip4(src=10.0.2.2,dst=198.18.0.1)/udp(sport=4000,dport=53)/data(2000)")
	parts, err := packet.Fragments(fragments, 1480, 77)
	if err != nil {
		t.Fatal(err)
	}
	for i, part := range parts {
		out, err := s.Step(model.Arrival{Interface: "lan0", Frame: part})
		if err != nil || out.Action != model.Forward {
			t.Errorf("fragment %d: %s %s, %v", i+1, out.Action, out.Reason, err)
		}
		each[wire.FragmentKey](s.d.t.Maps["fragments"], func(v *wire.Fragment) { v.Seen = soon })
	}
	segment := "ip4(src=198.18.0.1,dst=192.0.2.10)/tcp(sport=%d,dport=80,flags=%s,seq=1,ack=%d,opts=[mss:1460])"
	send(t, s, "wan0", fmt.Sprintf(segment, 4000, "S", 0))
	if out := send(t, s, "wan0", fmt.Sprintf(segment, 4001, "S", 0)); out.Reason != model.ReasonCookie {
		t.Fatalf("a SYN when half of the quota is used up: %s", out.Reason)
	}
	for i := range s.d.t.ServiceLoads.Values {
		if l := &s.d.t.ServiceLoads.Values[i]; l.Cookie != 0 {
			l.Cookie = soon &^ 1
		}
	}
	if out := send(t, s, "wan0", fmt.Sprintf(segment, 4001, "A", 7)); out.Reason != model.ReasonBadCookie {
		t.Errorf("an acknowledgement without a cookie: %s", out.Reason)
	}
}
