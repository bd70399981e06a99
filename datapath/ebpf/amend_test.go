// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/golden"
)

const amended = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: hash, listen: [{address: 192.0.2.10, ports: [81]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2, port: 8081}]}
  - {name: kept, listen: [{address: 192.0.2.10, ports: [82]}], protocol: udp, mode: dnat, scheduler: wrr, backends: [{name: a, address: 10.0.2.2}]}
  - {name: full, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.2}]}
  - {name: less, listen: [{address: 192.0.2.12, ports: [53]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.2.7, port: 53}]}
  - {name: wide, listen: [{address: 192.0.2.13, ports: [53]}], protocol: udp, mode: tunnel, scheduler: source-hash, backends: [{name: a, address: 10.0.2.3}]}
  - {name: pins, listen: [{address: 192.0.2.14, ports: [53]}], protocol: udp, mode: dnat, sessions: [{client: 203.0.113.4, backend: a}], backends: [{name: a, address: 10.0.2.2, port: 99}]}
  - {name: one, listen: [{address: 192.0.2.10, ports: [84]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}
  - {name: two, listen: [{address: 192.0.2.15, ports: [85]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}
  - {name: some, listen: [{address: 192.0.2.16, ports: [85-90]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.6}]}
  - {name: dot, listen: [{address: 192.0.2.12, ports: [853]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.2.7}]}
nat:
  - {name: in, type: port-forward, protocol: tcp, listen: {address: 192.0.2.10, ports: [90]}, to: {address: 10.0.2.4, port: 8080}}
  - {name: out, type: snat, source: [10.0.3.0/24], to: [198.51.100.9]}
firewall:
  sets: {bad: [203.0.113.0/24]}
  rules: [{action: drop, source: '@bad'}]
`

// vary gives some services other backends, weights and states; sometimes it changes other settings too.
func vary(r *rand.Rand, c *config.Config) *config.Config {
	next := *c
	next.Services = slices.Clone(c.Services)
	for range 1 + r.IntN(2) {
		s := &next.Services[r.IntN(len(next.Services))]
		s.Backends = slices.Clone(s.Backends)
		switch r.IntN(4) {
		case 0:
			s.Backends[r.IntN(len(s.Backends))].Weight = 1 + r.IntN(4)
		case 1:
			b := config.Backend{Name: fmt.Sprintf("n%d", r.IntN(4)), Address: netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + r.IntN(5))}), Port: s.Backends[0].Port, Weight: 1, Priority: 1 + r.IntN(2)}
			taken := func(o config.Backend) bool { return o.Name == b.Name || o.Address == b.Address }
			if !slices.ContainsFunc(s.Backends, taken) {
				s.Backends = append(s.Backends, b)
			}
		case 2:
			if len(s.Backends) > 1 && s.Name != "pins" {
				s.Backends = slices.Delete(s.Backends, r.IntN(len(s.Backends)), len(s.Backends))
			}
		case 3:
			b := &s.Backends[r.IntN(len(s.Backends))]
			b.Address = netip.AddrFrom4([4]byte{10, 0, 2, byte(20 + r.IntN(20))})
		}
		if len(s.Backends) == 0 {
			s.Backends = c.Services[0].Backends
		}
	}
	if r.IntN(20) == 0 {
		next.LowestIPv6MTU = 1280 + r.IntN(2)
	}
	return &next
}

// TestAmendmentsEqualWholes changes backends at random. After each change, the state in force must equal a full
// compilation, the kernel must hold that state, and the reported change must be the same.
func TestAmendmentsEqualWholes(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, lab.Balancer())
	d := openIn(t, l.Node("gateway"), pinsOf(t))
	defer func() { d.Remove(context.Background()); d.Close() }()
	c, err := config.Decode("f.yaml", []byte(amended))
	if err != nil {
		t.Fatal(err)
	}
	c.Tables = smallTables
	r := rand.New(rand.NewPCG(3, 4))
	mustApply(t, d, golden.Snapshot(c))
	moved, small, whole := 0, 0, 0 // amendments that change endpoints, other amendments, full compilations
	for step := range 400 {
		next := vary(r, c)
		s := golden.Snapshot(next)
		for i := range s.Services {
			for k := range s.Services[i].State {
				if r.IntN(8) == 0 {
					s.Services[i].State[k] = datapath.State(r.IntN(3))
				}
			}
		}
		if err := d.inNamespace(func() error { return amendBoth(t, d, s, &moved, &small, &whole) }); err != nil {
			if strings.Contains(err.Error(), "mode stateless") || strings.Contains(err.Error(), "refused") {
				continue // the full compilation refuses it, too
			}
			t.Fatalf("step %d: %v", step, err)
		}
		c = next
	}
	if moved < 20 || small < 50 || whole < 50 {
		t.Errorf("%d amendments with other backends, %d others, %d wholes", moved, small, whole)
	}
}

// amendBoth applies a snapshot and compares the result with a full compilation.
func amendBoth(t *testing.T, d *Datapath, s *datapath.Snapshot, moved, small, whole *int) error {
	h, err := readHost()
	if err != nil {
		return err
	}
	d.mu.Lock()
	want, err := compile.Compile(s, stateOf(d.t, s), h)
	if err != nil {
		d.mu.Unlock()
		return fmt.Errorf("refused: %w", err)
	}
	told := d.compare(want)
	a := d.amendment(s, h)
	amends := a != nil
	d.mu.Unlock()
	change, err := d.Apply(context.Background(), s)
	if err != nil {
		return err
	}
	switch {
	case !amends:
		*whole++
	case a.Endpoints:
		*moved++
	default:
		*small++
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if want, err = compile.Compile(s, stateOf(d.t, s), h); err != nil {
		return err
	}
	change.Duration, change.Ended = 0, 0
	if !reflect.DeepEqual(change, told) {
		t.Errorf("told %+v\nof the whole %+v", change, told)
	}
	for what, pair := range map[string][2]any{
		"services": {d.inForce.Services, want.Services}, "slots": {d.inForce.Slots, want.Slots}, "backends": {d.inForce.Backends, want.Backends},
		"listeners": {d.inForce.Listeners, want.Listeners}, "ranges": {d.inForce.Ranges, want.Ranges}, "reverses": {d.inForce.Reverses, want.Reverses},
		"hosts": {d.inForce.Hosts, want.Hosts}, "members": {d.inForce.Members, want.Members}, "sessions": {d.inForce.Sessions, want.Sessions},
		"names": {d.inForce.Names, want.Names}, "switches": {d.switches, want.Switches}, "wanted numbers": {d.inForce.Draft.Want, want.Draft.Want},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			return fmt.Errorf("%s: in force %v\nof the whole %v (an amendment: %t)", what, pair[0], pair[1], amends)
		}
	}
	return d.readBack(want)
}
