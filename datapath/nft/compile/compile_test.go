// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

var update = flag.Bool("update", false, "write the golden files anew")

// snapshotOf takes what nftables carries of a configuration, all backends up.
func snapshotOf(c *config.Config) *datapath.Snapshot {
	s := &datapath.Snapshot{Config: c}
	for i := range c.Services {
		if Carries(&c.Services[i]) == nil {
			s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: make([]datapath.State, len(c.Services[i].Backends))})
		}
	}
	for i := range c.NAT {
		if CarriesNAT(&c.NAT[i]) == nil {
			s.NAT = append(s.NAT, &c.NAT[i])
		}
	}
	for i := range c.Firewall.Rules {
		if CarriesRule(&c.Firewall.Rules[i]) == nil {
			s.Rules = append(s.Rules, &c.Firewall.Rules[i])
		}
	}
	for i, u := range c.Uplinks {
		s.Uplinks = append(s.Uplinks, datapath.Uplink{Name: u.Name, Interface: u.Interface, Mark: u.Mark(i), Weight: u.Weight,
			Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, byte(100 + i), 0}), 24), netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 15: byte(i)}), 128)},
			Usable:   [2]bool{true, true}, Carries: [2]bool{u.Priority == 1, true}})
	}
	return s
}

func testEnv() Env {
	lan := Interface{Name: "lan0", Index: 3, MAC: config.MAC{2, 0, 0, 0, 0, 3}}
	return Env{
		Timeouts: true, Defragments: true, FIB: true,
		Interfaces: []Interface{{Name: "wan0", Index: 2}, lan},
		Route: func(a netip.Addr) (Interface, error) {
			if a == netip.MustParseAddr("10.9.9.9") {
				return Interface{}, errors.New("10.9.9.9 is reached by way of router 10.0.2.1")
			}
			return lan, nil
		},
	}
}

// TestExamples compares what the example files compile to, as text, with golden
// files; long maps are cut.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			c, err := config.Load(file)
			if err != nil {
				t.Fatal(err)
			}
			r, err := Compile(snapshotOf(c), testEnv(), nil)
			if err != nil {
				t.Fatal(err)
			}
			got, golden := cut(r.Ruleset.String()), filepath.Join("testdata", name+".nft")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("ruleset differs from %s (-want +got):\n%s", golden, diff)
			}
		})
	}
}

// cut leaves the first four elements of every map.
func cut(text string) string {
	var out []string
	n := 0
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "\t\t\t     ") {
			if n++; n == 4 {
				out = append(out, "\t\t\t     ...\n")
			}
			if n >= 4 {
				continue
			}
		} else {
			n = 0
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

func TestCompileIsDeterministic(t *testing.T) {
	c, err := config.Load("../../../examples/router.yaml")
	if err != nil {
		t.Fatal(err)
	}
	first, err := Compile(snapshotOf(c), testEnv(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		again, err := Compile(snapshotOf(c), testEnv(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if d := rs.Diff(first.Ruleset, again.Ruleset); !d.Empty() || first.Ruleset.String() != again.Ruleset.String() {
			t.Fatal("two runs differ")
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	v4 := []config.Listen{{Address: netip.MustParseAddr("192.0.2.1"), Ports: []flow.Ports{{First: 80, Last: 80}}}}
	a := config.Backend{Name: "a", Address: netip.MustParseAddr("10.0.2.2")}
	a6 := config.Backend{Name: "a6", Address: netip.MustParseAddr("fd00:2::2")}
	service := func(change func(*config.Service)) *config.Config {
		s := config.Service{Name: "web", Listen: v4, Protocol: flow.TCP, Mode: config.ModeDNAT, Backends: []config.Backend{a}}
		change(&s)
		return &config.Config{Services: []config.Service{s}}
	}
	nat := func(n config.NATRule) *config.Config { n.Name = "n"; return &config.Config{NAT: []config.NATRule{n}} }
	rule := func(r config.FirewallRule) *config.Config {
		return &config.Config{Firewall: config.Firewall{Rules: []config.FirewallRule{r}}}
	}
	for want, c := range map[string]*config.Config{
		"service web: mode tunnel needs the eBPF datapath": service(func(s *config.Service) { s.Mode = config.ModeTunnel }),
		"scheduler wlc needs the eBPF datapath":            service(func(s *config.Service) { s.Scheduler = config.SchedulerWLC }),
		"client-address toa needs the eBPF datapath":       service(func(s *config.Service) { s.ClientAddress = config.ClientAddressTOA }),
		"syn-cookies needs the eBPF datapath":              service(func(s *config.Service) { s.SYNCookies = true }),
		"translation between IPv4 and IPv6":                service(func(s *config.Service) { s.Mode = config.ModeFullNAT; s.Backends = append(s.Backends, a6) }),
		"helper tftp does not know protocol tcp":           service(func(s *config.Service) { s.Helper = "tftp" }),
		"a limit of connections needs connection tracking": service(func(s *config.Service) { s.Mode, s.Limits.Connections = config.ModeDSR, 5 }),
		"scheduler rr in mode stateless sends the packets": service(func(s *config.Service) { s.Mode, s.Scheduler = config.ModeStateless, config.SchedulerRR }),
		"10.9.9.9 is reached by way of router": service(func(s *config.Service) {
			s.Mode = config.ModeDSR
			s.Backends[0].Address = netip.MustParseAddr("10.9.9.9")
		}),
		"nat n: nat64 needs the eBPF datapath":                                    nat(config.NATRule{Type: config.NATNAT64}),
		"mapping endpoint-independent":                                            nat(config.NATRule{Type: config.NATMasquerade, Mapping: config.EndpointIndependent}),
		"allocation of port blocks needs the eBPF datapath":                       nat(config.NATRule{Type: config.NATSNAT, PortBlock: 64}),
		"firewall rule-1: action reject at hook ingress":                          rule(config.FirewallRule{Action: config.ActionReject, Hook: config.HookIngress}),
		"action notrack at hook forward runs after connection tracking: use hook": rule(config.FirewallRule{Action: config.ActionNotrack, Hook: config.HookForward}),
	} {
		s := &datapath.Snapshot{Config: c}
		for i := range c.Services {
			s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: make([]datapath.State, len(c.Services[i].Backends))})
		}
		for i := range c.NAT {
			s.NAT = append(s.NAT, &c.NAT[i])
		}
		for i := range c.Firewall.Rules {
			s.Rules = append(s.Rules, &c.Firewall.Rules[i])
		}
		if _, err := Compile(s, testEnv(), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestStatelessReplyMustBeUnambiguous(t *testing.T) {
	backend := []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.2.2"), Port: 514}}
	service := func(name, vip string) config.Service {
		return config.Service{
			Name: name, Protocol: flow.UDP, Mode: config.ModeStateless, Scheduler: config.SchedulerSourceHash, Backends: backend,
			Listen: []config.Listen{{Address: netip.MustParseAddr(vip), Ports: []flow.Ports{{First: 514, Last: 514}}}},
		}
	}
	c := &config.Config{Services: []config.Service{service("one", "192.0.2.1"), service("two", "192.0.2.2")}}
	_, err := Compile(snapshotOf(c), testEnv(), nil)
	if err == nil || !strings.Contains(err.Error(), "service two: answers of 10.0.2.2 port 514 already belong to service one") {
		t.Errorf("error %v", err)
	}
}

// TestServersThatNothingLeadsTo: dsr backends without a route are left out with a warning, also if clients are
// pinned to them or there is no other. A backend behind a router is refused.
func TestServersThatNothingLeadsTo(t *testing.T) {
	env := testEnv()
	known := env.Route
	env.Route = func(a netip.Addr) (Interface, error) {
		switch a.String() {
		case "10.77.0.2":
			return Interface{}, fmt.Errorf("%w to %s", ErrNoRoute, a)
		case "10.88.0.2":
			return Interface{}, fmt.Errorf("%s is reached by way of router 10.0.2.9", a)
		}
		return known(a)
	}
	file := func(servers ...string) *datapath.Snapshot {
		s := config.Service{Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerMaglev,
			Listen:   []config.Listen{{Address: netip.MustParseAddr("192.0.2.1"), Ports: []flow.Ports{{First: 80, Last: 80}}}},
			Sessions: []config.Session{{Client: netip.MustParsePrefix("198.51.100.0/24"), Backend: servers[0]}}}
		for _, a := range servers {
			s.Backends = append(s.Backends, config.Backend{Name: a, Address: netip.MustParseAddr(a), Weight: 1, Priority: 1})
		}
		return snapshotOf(&config.Config{Services: []config.Service{s}})
	}
	for _, servers := range [][]string{{"10.77.0.2", "10.0.2.2"}, {"10.77.0.2"}} {
		r, err := Compile(file(servers...), env, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range r.Ruleset.Fragments {
			for _, c := range f.Chains {
				if strings.HasSuffix(c.ID.Name, "/10.77.0.2") {
					t.Errorf("there is a chain %s", c.ID.Name)
				}
			}
		}
		if got := r.Unreached(); len(got) != 1 || got[0] != "service video: backend 10.77.0.2: no route to 10.77.0.2" {
			t.Errorf("of %v it is told %q", servers, got)
		}
		if again, err := Compile(file(servers...), testEnv(), r); err != nil || len(again.Unreached()) != 0 {
			t.Errorf("with a route: %v, %q", err, again.Unreached())
		}
	}
	if _, err := Compile(file("10.88.0.2"), env, nil); err == nil || !strings.Contains(err.Error(), "router") {
		t.Errorf("behind a router: %v", err)
	}
}

// TestStatelessAnswersAreItsOwn: one backend endpoint cannot serve a stateless service and tracked connections,
// also after a change.
func TestStatelessAnswersAreItsOwn(t *testing.T) {
	at := func(port uint16) []config.Backend {
		return []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.2.2"), Port: port}}
	}
	listen := func(vip string) []config.Listen {
		return []config.Listen{{Address: netip.MustParseAddr(vip), Ports: []flow.Ports{{First: 514, Last: 514}}}}
	}
	file := func(mode config.Mode, port uint16, forward flow.Protocol) *datapath.Snapshot {
		c := &config.Config{Services: []config.Service{
			{Name: "log", Protocol: flow.UDP, Mode: config.ModeStateless, Scheduler: config.SchedulerSourceHash, Listen: listen("192.0.2.1"), Backends: at(514)},
			{Name: "other", Protocol: flow.UDP, Mode: mode, Scheduler: config.SchedulerRR, Listen: listen("192.0.2.2"), Backends: at(port)},
		}}
		if forward != 0 {
			l := listen("192.0.2.3")[0]
			c.NAT = []config.NATRule{{Name: "in", Type: config.NATPortForward, Protocol: forward, Listen: &l, To: config.Target{Address: netip.MustParseAddr("10.0.2.2"), Port: 514}}}
		}
		return snapshotOf(c)
	}
	const want = "service log: answers of 10.0.2.2 port 514 also belong to another service or port-forward"
	for name, c := range map[string]struct {
		s       *datapath.Snapshot
		refused bool
	}{
		"a dnat service":       {file(config.ModeDNAT, 514, 0), true},
		"a fullnat service":    {file(config.ModeFullNAT, 514, 0), true},
		"its listener's port":  {file(config.ModeDNAT, 0, 0), true},
		"another port":         {file(config.ModeDNAT, 515, 0), false},
		"answers that pass by": {file(config.ModeDSR, 514, 0), false},
		"a port-forward":       {file(config.ModeDNAT, 515, flow.UDP), true},
		"of another protocol":  {file(config.ModeDNAT, 515, flow.TCP), false},
	} {
		if _, err := Compile(c.s, testEnv(), nil); (err != nil) != c.refused || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	before, err := Compile(file(config.ModeDNAT, 515, 0), testEnv(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Compile(file(config.ModeDNAT, 514, 0), testEnv(), before); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("after a change: error %v", err)
	}
}

func TestServiceNumbersStayAndDoNotOverlap(t *testing.T) {
	services := make([]datapath.Service, 20000)
	for i := range services {
		name := "service-" + string(rune('a'+i%26)) + netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).String()
		services[i] = datapath.Service{Service: &config.Service{Name: name, Scheduler: config.SchedulerMaglev, Backends: make([]config.Backend, 2)}}
	}
	ids := newNumbers(services).of
	owner := make(map[uint32]string)
	for name, first := range ids {
		for _, at := range []uint32{first, first + 1020} {
			if o, ok := owner[at]; ok && o != name {
				t.Fatalf("slot %d belongs to %s and %s", at, o, name)
			}
			owner[at] = name
		}
	}
	fewer := newNumbers(services[:19000]).of
	moved := 0
	for name, id := range fewer {
		if ids[name] != id {
			moved++
		}
	}
	if moved > 400 {
		t.Errorf("%d of 19000 services moved when 1000 left", moved)
	}
}

// TestNumbersThatStay changes how many slots single services have. Where numbers are said to stay, they do.
func TestNumbersThatStay(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	sized := func() []config.Backend {
		backends := make([]config.Backend, 1+r.IntN(200))
		for i := range backends {
			backends[i].Weight = 256
		}
		return backends
	}
	services := make([]datapath.Service, 2000)
	for i := range services {
		services[i].Service = &config.Service{Name: fmt.Sprintf("service-%d", i), Scheduler: config.SchedulerWRR, Backends: sized()}
	}
	numbers := newNumbers(services)
	stay, moved := 0, 0
	for range 200 {
		at := r.IntN(len(services))
		if i := 1 + slices.IndexFunc(numbers.order[1:], func(c claim) bool { return numbers.of[c.name] != c.first }); i > 0 && r.IntN(2) == 0 {
			before := numbers.order[i-1].name // the next one had to move up
			at = slices.IndexFunc(services, func(s datapath.Service) bool { return s.Name == before })
		}
		was := services[at].Service
		is := *was
		is.Backends = sized()
		services[at].Service = &is
		next := newNumbers(services)
		switch same := maps.Equal(numbers.of, next.of); {
		case numbers.keepsNumbers(was, &is) && !same:
			t.Fatalf("%s from %d to %d slots: numbers are said to stay, and do not", is.Name, capacity(was), capacity(&is))
		case same:
			stay++
		default:
			moved++
		}
		numbers = next
	}
	if stay < 20 || moved < 2 {
		t.Errorf("numbers stayed %d times, and moved %d times", stay, moved)
	}
}

// TestSharedMembersStay: what says that the MSS of an address and port is clamped, or that
// inside hosts may use it, knows no interface, and stays until the last listener there is gone.
func TestSharedMembersStay(t *testing.T) {
	c := &config.Config{}
	to := config.Target{Address: netip.MustParseAddr("10.0.2.2")}
	for _, iface := range []string{"wan0", "lan0"} {
		listen := &config.Listen{Address: netip.MustParseAddr("192.0.2.1"), Ports: []flow.Ports{{First: 80, Last: 80}, {First: 90, Last: 99}}, Interface: iface}
		c.NAT = append(c.NAT, config.NATRule{Name: iface, Type: config.NATPortForward, Protocol: flow.TCP, Listen: listen, To: to, MSSClamp: true})
	}
	members := func(r *Result) (n int) {
		for _, f := range r.Ruleset.Fragments {
			for _, e := range f.Elements {
				if strings.HasPrefix(e.Set.Name, mapClamp) || strings.HasPrefix(e.Set.Name, mapTurned) {
					n++
				}
			}
		}
		return n
	}
	both, err := Compile(snapshotOf(c), testEnv(), nil)
	if err != nil {
		t.Fatal(err)
	}
	one := *c
	one.NAT = c.NAT[1:]
	left, err := Compile(snapshotOf(&one), testEnv(), both)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range rs.Diff(both.Ruleset, left.Ruleset).DelElements {
		if !strings.HasPrefix(e.Of.Set.Name, mapServices) && e.Of.Set.Name != setListeners+interfaces {
			t.Errorf("an element of %s goes with the first rule", e.Of.Set.Name)
		}
	}
	none, err := Compile(&datapath.Snapshot{Config: &config.Config{}}, testEnv(), left)
	if err != nil || members(both) != 4 || members(left) != 4 || members(none) != 0 {
		t.Errorf("%d, %d, %d members of two rules, one and none; %v", members(both), members(left), members(none), err)
	}
}

// TestWeightsOfBackendsThatCome: weights of a snapshot override the configuration, and do not change the numbers
// of services.
func TestWeightsOfBackendsThatCome(t *testing.T) {
	of := func(name, listen string) config.Service {
		return config.Service{Name: name, Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerWRR, SlowStart: config.Duration(time.Minute),
			Listen:   []config.Listen{{Address: netip.MustParseAddr(listen), Ports: []flow.Ports{{First: 80, Last: 80}}}},
			Backends: []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.2.2"), Weight: 1, Priority: 1}, {Name: "b", Address: netip.MustParseAddr("10.0.2.3"), Weight: 1, Priority: 1}}}
	}
	c := &config.Config{Services: []config.Service{of("one", "192.0.2.1"), of("two", "192.0.2.2")}}
	s := snapshotOf(c)
	full, err := Compile(s, testEnv(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, weights := range [][]int{{10, 1}, {10, 9}, nil} {
		s = snapshotOf(c)
		s.Services[0].Weights = weights
		again, err := Compile(s, testEnv(), full)
		if err != nil {
			t.Fatal(err)
		}
		slots := again.Service("one").Slots[rs.IP]
		b := 0
		for _, key := range slots {
			if strings.HasPrefix(key, "10.0.2.3") {
				b++
			}
		}
		want, of := 1, 2
		if weights != nil {
			want, of = weights[1], weights[0]+weights[1]
		}
		if b != want || len(slots) != of {
			t.Errorf("weights %v: %d of %d slots", weights, b, len(slots))
		}
		for name, id := range full.ids.of {
			if again.ids.of[name] != id {
				t.Errorf("weights %v: %s has number %d, had %d", weights, name, again.ids.of[name], id)
			}
		}
		if again.Service("two") != full.Service("two") {
			t.Errorf("weights %v: the other service is compiled again", weights)
		}
		full = again
	}
}

// TestNobodyFoundYet: a service that finds its backends is carried before it has found one.
func TestNobodyFoundYet(t *testing.T) {
	c, err := config.Decode("found.yaml", []byte(`
services:
  - {name: web, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.10, ports: [80]}], backends-from: {dns: app.test, port: 8080}}
`))
	if err != nil {
		t.Fatal(err)
	}
	if err := Carries(&c.Services[0]); err != nil {
		t.Error(err)
	}
	r, err := Compile(snapshotOf(c), testEnv(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if text := r.Ruleset.String(); !strings.Contains(text, "no backend is usable") {
		t.Errorf("nothing answers the clients:\n%s", text)
	}
}
