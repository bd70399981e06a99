// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// repliers returns random services on two servers, each with the virtual address of its place.
func repliers(r *rand.Rand) (list []datapath.Service) {
	ports := [][]flow.Ports{{{First: 1, Last: 1}}, {{First: 2, Last: 2}}, {{First: 3, Last: 3}}, {{First: 1, Last: 2}}, {{First: 3, Last: 4}}, {{First: 1, Last: 1}, {First: 4, Last: 4}}, nil}
	for i := range 2 + r.IntN(3) {
		s := &config.Service{Name: fmt.Sprint("s", i), Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerMaglev, Hairpin: config.SwitchOff,
			Listen: []config.Listen{{Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(10 + i)}), Ports: ports[r.IntN(len(ports))]}}}
		if r.IntN(3) == 0 {
			s.Mode = config.ModeStateless
		}
		if r.IntN(4) == 0 {
			s.Protocol = flow.UDP
		}
		port := uint16(0)
		if l := s.Listen[0].Ports; len(l) == 1 && l[0].Len() == 1 && r.IntN(2) == 0 {
			port = uint16(1 + r.IntN(4))
		}
		first := r.IntN(2)
		for n := range 1 + r.IntN(2) {
			a := netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + (first+n)%2)})
			s.Backends = append(s.Backends, config.Backend{Name: a.String(), Address: a, Port: port, Weight: 1, Priority: 1})
		}
		list = append(list, datapath.Service{Service: s, State: make([]datapath.State, len(s.Backends))})
	}
	return list
}

// from returns the source ports, of 1 to 5, that a server's replies for a service have.
func from(s *config.Service, server netip.Addr) (ports []uint16) {
	for _, b := range s.Backends {
		for p := uint16(1); p <= 5 && b.Address == server; p++ {
			listens := len(s.Listen[0].Ports) == 0
			for _, r := range s.Listen[0].Ports {
				listens = listens || r.Contains(p)
			}
			if b.Port == p || b.Port == 0 && listens {
				ports = append(ports, p)
			}
		}
	}
	return ports
}

func share(a, b *config.Service) bool {
	if a.Protocol != b.Protocol {
		return false
	}
	for _, x := range a.Backends {
		mine, others := from(a, x.Address), from(b, x.Address)
		if len(mine) > 1 && len(others) > 1 {
			return true // both have the key without a port
		}
		for _, p := range mine {
			for _, q := range others {
				if p == q {
					return true
				}
			}
		}
	}
	return false
}

// TestRepliesByPort compiles random services of two servers. A stateless service is accepted, and a SYN keeps
// no state, if and only if no other service has replies with the same source port. The lookup of a reply then
// finds the entry of its service.
func TestRepliesByPort(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	accepted, refused, stateful := 0, 0, 0
	for range 1500 {
		list := repliers(r)
		shared, bad := map[string]bool{}, false
		for i := range list {
			for k := range list {
				if i != k && share(list[i].Service, list[k].Service) {
					shared[list[i].Name] = true
					bad = bad || list[i].Mode == config.ModeStateless
				}
			}
		}
		s := &datapath.Snapshot{Config: &config.Config{}, Services: list}
		st := idle()
		d, err := compileWith(s, st, &Host{Ask: HostQueries{Local: func() ([]netip.Prefix, error) { return nil, nil }}}, st.IDs.Draft())
		if bad {
			if refused++; err == nil || !strings.Contains(err.Error(), "mode stateless: ") {
				t.Fatalf("%s: error %v", describe(list), err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", describe(list), err)
		}
		accepted++
		for id, name := range d.Names.Service {
			for _, x := range list {
				if x.Name != name {
					continue
				}
				keeps := x.Mode == config.ModeStateless || x.Protocol != flow.TCP || shared[name]
				if keeps == (d.Services[id].Flags&wire.ServiceSYNStateless != 0) {
					t.Fatalf("%s: a SYN to %s keeps state: %t", describe(list), name, keeps)
				}
				if shared[name] {
					stateful++
					continue
				}
				for _, b := range x.Backends {
					for _, p := range from(x.Service, b.Address) {
						if v := lookup(d, x.Protocol, b.Address, p); v.Ambiguous != 0 || uint32(v.Service) != id {
							t.Fatalf("%s: a reply of %s port %d to %s finds %+v", describe(list), b.Address, p, name, v)
						}
					}
				}
			}
		}
	}
	if accepted < 300 || refused < 300 || stateful < 100 {
		t.Errorf("%d accepted, %d refused, %d services with flows", accepted, refused, stateful)
	}
}

// idle returns a state without flows.
func idle() *State {
	none := func(uint32) int64 { return 0 }
	return &State{IDs: ids.New(), ServiceFlows: none, BackendFlows: none}
}

// lookup finds the entry of a reply as the programs do.
func lookup(d *Desired, p flow.Protocol, server netip.Addr, port uint16) wire.Reverse {
	k := wire.ListenerKey{L4Proto: uint8(p), Family: wire.FamilyOf(server), Addr: wire.BytesOf(server), Port: wire.PortOf(port)}
	if v, ok := d.Reverses[k]; ok {
		return v
	}
	k.Port = 0
	return d.Reverses[k]
}

func describe(list []datapath.Service) (text string) {
	for _, s := range list {
		text += fmt.Sprintf("%s %s %s listen %v backends %v; ", s.Name, s.Protocol, s.Mode, s.Listen[0].Ports, s.Backends)
	}
	return text
}

// TestSharedReplyNamesBoth: the error names both services in either order.
func TestSharedReplyNamesBoth(t *testing.T) {
	server := netip.MustParseAddr("10.0.2.2")
	for _, modes := range [][2]config.Mode{{config.ModeStateless, config.ModeDNAT}, {config.ModeDNAT, config.ModeStateless}} {
		var list []datapath.Service
		for i, m := range modes {
			list = append(list, datapath.Service{State: make([]datapath.State, 1), Service: &config.Service{Name: string(m), Protocol: flow.UDP, Mode: m, Scheduler: config.SchedulerMaglev, Hairpin: config.SwitchOff,
				Listen:   []config.Listen{{Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), Ports: []flow.Ports{{First: 53, Last: 53}}}},
				Backends: []config.Backend{{Name: "a", Address: server, Weight: 1, Priority: 1}}}})
		}
		st := idle()
		_, err := compileWith(&datapath.Snapshot{Config: &config.Config{}, Services: list}, st, &Host{}, st.IDs.Draft())
		want := "service stateless: mode stateless: backend a has the same replies for service dnat"
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v: error %v, want %s", modes, err, want)
		}
	}
}
