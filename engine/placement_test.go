// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

func TestServicesGoToTheFastestThatCarriesThem(t *testing.T) {
	fast, slow := pair()
	fast.refuse = func(_, name string) error {
		if name == "sctp" {
			return errRefused
		}
		return nil
	}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	cfg := &config.Config{Services: []config.Service{service("web", "a"), service("sctp", "a")}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if got := names(fast.last()); !slices.Equal(got, []string{"web"}) {
		t.Errorf("ebpf carries %v, want web", got)
	}
	if got := names(slow.last()); !slices.Equal(got, []string{"sctp"}) {
		t.Errorf("nftables carries %v, want sctp", got)
	}
	if why := e.View().Services[1].Place.Why["ebpf"]; why != errRefused.Error() {
		t.Errorf("why not ebpf: %q", why)
	}
}

func TestAFirewallRuleThatMustSeeTrafficKeepsItThere(t *testing.T) {
	fast, slow := pair()
	fast.refuse = func(kind, _ string) error {
		if kind == "rule" {
			return errors.New("the kernel's log is out of reach at XDP")
		}
		return nil
	}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	cfg := &config.Config{Services: []config.Service{service("web", "a")}, Firewall: config.Firewall{Rules: []config.FirewallRule{{Name: "log", Action: config.ActionLog}}}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if got := names(slow.last()); !slices.Equal(got, []string{"web", "log"}) {
		t.Errorf("nftables carries %v, want web and log", got)
	}
	if why := e.View().Services[0].Place.Why["ebpf"]; !strings.Contains(why, "firewall rule log must see the traffic") {
		t.Errorf("why not ebpf: %q", why)
	}
}

func TestADropRuleStandsOnEveryDatapathThatCarriesTraffic(t *testing.T) {
	fast, slow := pair()
	fast.refuse = func(_, name string) error {
		if name == "sctp" {
			return errRefused
		}
		return nil
	}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	cfg := &config.Config{Services: []config.Service{service("web", "a"), service("sctp", "a")}, Firewall: config.Firewall{Rules: []config.FirewallRule{{Name: "ban", Action: config.ActionDrop}}}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	for _, d := range []*fake{fast, slow} {
		if !slices.Contains(names(d.last()), "ban") {
			t.Errorf("%s lets banned traffic pass", d.name)
		}
	}
}

func TestNATRulesStayTogether(t *testing.T) {
	fast, slow := pair()
	fast.refuse = func(_, name string) error {
		if name == "ftp" {
			return errRefused
		}
		return nil
	}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	cfg := &config.Config{NAT: []config.NATRule{{Name: "office"}, {Name: "ftp"}}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if got := names(slow.last()); !slices.Equal(got, []string{"office", "ftp"}) {
		t.Errorf("nftables carries %v, want both rules", got)
	}
	slow.refuse = func(_, name string) error {
		if name == "v6only" {
			return errRefused
		}
		return nil
	}
	cfg = &config.Config{NAT: []config.NATRule{{Name: "v6only"}, {Name: "ftp"}}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(names(fast.last()), []string{"v6only"}) || !slices.Equal(names(slow.last()), []string{"ftp"}) {
		t.Errorf("split: ebpf %v, nftables %v", names(fast.last()), names(slow.last()))
	}
}

// TestAnswersReachTheirDatapath: the datapath that sees packets first leaves the replies of servers to the
// datapath with the connection.
func TestAnswersReachTheirDatapath(t *testing.T) {
	office := config.NATRule{Name: "office", Type: config.NATMasquerade, Source: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}}
	pooled := office
	pooled.Type, pooled.Source = config.NATSNAT, []netip.Prefix{netip.MustParsePrefix("10.0.9.0/24")}
	pooled.To.Addresses = []config.AddressRange{{First: netip.MustParseAddr("192.0.2.10"), Last: netip.MustParseAddr("192.0.2.11")}}
	ftp := config.NATRule{Name: "ftp", Type: config.NATPortForward, Listen: &config.Listen{Address: netip.MustParseAddr("192.0.2.9")}, To: config.Target{Address: netip.MustParseAddr("10.0.2.3"), Port: 21}}
	six := config.NATRule{Name: "v6only", Type: config.NATNAT64}
	served := func(name string, mode config.Mode, addr string) []config.Service {
		s := service(name, "a")
		s.Mode, s.Backends[0].Address = mode, netip.MustParseAddr(addr)
		return []config.Service{s}
	}
	for name, c := range map[string]struct {
		cfg     config.Config
		want    string // datapath of the rule office
		warning string
	}{
		"a server behind the rule": {config.Config{Services: served("marked", config.ModeDNAT, "10.0.2.2"), NAT: []config.NATRule{office}}, "nftables", ""},
		"a server elsewhere":       {config.Config{Services: served("marked", config.ModeDNAT, "10.9.2.2"), NAT: []config.NATRule{office}}, "ebpf", ""},
		"answers to a pool":        {config.Config{Services: served("marked", config.ModeFullNAT, "10.0.2.2"), NAT: []config.NATRule{office}}, "ebpf", ""},
		"the rule's own address":   {config.Config{Services: served("marked", config.ModeFullNAT, "10.0.2.2"), NAT: []config.NATRule{pooled}}, "nftables", ""},
		"on the same datapath":     {config.Config{Services: served("web", config.ModeDNAT, "10.0.2.2"), NAT: []config.NATRule{office}}, "ebpf", ""},
		"beside a rule of ebpf's":  {config.Config{Services: served("marked", config.ModeDNAT, "10.0.2.2"), NAT: []config.NATRule{six, office}}, "nftables", ""},
		"a port-forward":           {config.Config{NAT: []config.NATRule{six, office, ftp}}, "nftables", ""},
		"no other place": {config.Config{Services: served("marked", config.ModeDNAT, "10.0.2.2"), NAT: []config.NATRule{{Name: "office", Type: config.NATSNAT, Datapath: config.DatapathEBPF}}},
			"ebpf", "nat rule office is on ebpf, but service marked is on nftables: answers of 10.0.2.2 may be taken before they get there; put both on one datapath"},
	} {
		t.Run(name, func(t *testing.T) {
			fast, slow := pair()
			fast.refuse = func(_, name string) error {
				if name == "marked" || name == "ftp" {
					return errRefused
				}
				return nil
			}
			slow.refuse = func(_, name string) error {
				if name == "v6only" {
					return errRefused
				}
				return nil
			}
			e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
			if _, err := e.Apply(t.Context(), &c.cfg); err != nil {
				t.Fatal(err)
			}
			for _, d := range []*fake{fast, slow} {
				if slices.Contains(names(d.last()), "office") != (d.name == c.want) {
					t.Errorf("%s carries %v, want office on %s", d.name, names(d.last()), c.want)
				}
			}
			if got := strings.Join(e.View().Warnings, "\n"); got != c.warning {
				t.Errorf("warnings: %q", got)
			}
		})
	}
}

// TestStatelessTakesAnswers: a stateless service on the first datapath would take the replies for objects of a
// later datapath with the same server port. A warning reports it.
func TestStatelessTakesAnswers(t *testing.T) {
	const warning = "service syslog is on ebpf, but %s is on nftables: answers of 10.0.2.2 may be taken before they get there; put both on one datapath"
	syslog, other := service("syslog", "a"), service("marked", "a")
	syslog.Mode, other.Listen[0].Address = config.ModeStateless, netip.MustParseAddr("192.0.2.11")
	syslog.Backends[0].Address, other.Backends[0].Address = netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("10.0.2.2")
	ported := func(port uint16) config.Service {
		s := other
		s.Backends = []config.Backend{other.Backends[0]}
		s.Backends[0].Port = port
		return s
	}
	udp, web := other, other
	udp.Protocol, web.Name = flow.UDP, "web"
	ftp := config.NATRule{Name: "ftp", Type: config.NATPortForward, Protocol: flow.TCP, Listen: &config.Listen{Address: netip.MustParseAddr("192.0.2.9"), Ports: []flow.Ports{{First: 80, Last: 80}}},
		To: config.Target{Address: netip.MustParseAddr("10.0.2.2")}}
	for name, c := range map[string]struct {
		cfg  config.Config
		want string
	}{
		"a service":            {config.Config{Services: []config.Service{syslog, other}}, fmt.Sprintf(warning, "service marked")},
		"at the same port":     {config.Config{Services: []config.Service{syslog, ported(80)}}, fmt.Sprintf(warning, "service marked")},
		"at another port":      {config.Config{Services: []config.Service{syslog, ported(8080)}}, ""},
		"of another protocol":  {config.Config{Services: []config.Service{syslog, udp}}, ""},
		"on the same datapath": {config.Config{Services: []config.Service{syslog, web}}, ""},
		"a port-forward":       {config.Config{Services: []config.Service{syslog}, NAT: []config.NATRule{ftp}}, fmt.Sprintf(warning, "nat rule ftp")},
	} {
		fast, slow := pair()
		fast.refuse = func(_, name string) error {
			if name == "marked" || name == "ftp" {
				return errRefused
			}
			return nil
		}
		e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
		if _, err := e.Apply(t.Context(), &c.cfg); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(e.View().Warnings, "\n"); got != c.want {
			t.Errorf("%s: warnings: %q", name, got)
		}
	}
}

// TestWhatWaitedMoves: a rule for a missing interface moves if its datapath does not support the interface when
// it appears. Nothing moves otherwise.
func TestWhatWaitedMoves(t *testing.T) {
	fast, slow := pair()
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Log: slog.New(slog.DiscardHandler)})
	cfg := &config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Out: "ppp0"}}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	refuses := func(err error) func(_, _ string) error { return func(_, _ string) error { return err } }
	for _, c := range []struct {
		when       string
		fast, slow error
		on         *fake
		fails      bool
	}{
		{"it is not there", nil, nil, fast, false},
		{"it has come, without Ethernet headers", errRefused, nil, slow, false},
		{"it is gone", nil, nil, slow, false},
		{"nobody carries it", errRefused, errRefused, slow, true},
	} {
		fast.refuse, slow.refuse = refuses(c.fast), refuses(c.slow)
		if err := e.applyAgain(t.Context()); (err != nil) != c.fails {
			t.Errorf("%s: %v", c.when, err)
		}
		for _, d := range []*fake{fast, slow} {
			if got := len(d.last().NAT) == 1; got != (d == c.on) {
				t.Errorf("%s: on %s: %v", c.when, d.name, got)
			}
		}
	}
}

// TestPacketsMeetPolicies: if a datapath would bypass a host policy for a service or rule, the other datapath
// gets the object, at an apply or later. It stays if the other one does not support it or the operator has
// chosen.
func TestPacketsMeetPolicies(t *testing.T) {
	policy := errors.New("past an IPsec policy")
	for _, c := range []struct {
		when          string
		atFirst, then error // policies that the first datapath would bypass, at the apply and later
		refuses       error // error of the second datapath
		chosen        config.DatapathChoice
		before, after string
	}{
		{"there is none", nil, nil, nil, "", "ebpf", "ebpf"},
		{"it is there", policy, policy, nil, "", "nftables", "nftables"},
		{"it comes", nil, policy, nil, "", "ebpf", "nftables"},
		{"it goes", policy, nil, nil, "", "nftables", "nftables"}, // they move back with the next apply
		{"nothing else carries them", nil, policy, errRefused, "", "ebpf", "ebpf"},
		{"they were put there", nil, policy, nil, config.DatapathEBPF, "ebpf", "ebpf"},
	} {
		fast, slow := pair()
		slow.refuse = func(_, _ string) error { return c.refuses }
		e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Log: slog.New(slog.DiscardHandler)})
		cfg := &config.Config{Datapath: c.chosen, Services: []config.Service{service("web", "a")}, NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Out: "wan0"}}}
		on := func(want string) {
			t.Helper()
			v := e.View()
			for _, p := range []Place{v.Services[0].Place, e.plan.nat[0]} {
				if !slices.Equal(p.Datapaths, []string{want}) {
					t.Errorf("%s: on %v, want %s", c.when, p.Datapaths, want)
				}
			}
		}
		fast.passBy = c.atFirst
		if _, err := e.Apply(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		on(c.before)
		fast.passBy = c.then
		revision := e.revision
		if err := e.applyAgain(t.Context()); err != nil {
			t.Errorf("%s: %v", c.when, err)
		}
		on(c.after)
		if moved := e.revision != revision; moved != (c.before != c.after) {
			t.Errorf("%s: another revision: %v", c.when, moved)
		}
	}
}

// TestWhoTakesGoesFirst: if a service moves, the new datapath gets it before the old one releases it.
func TestWhoTakesGoesFirst(t *testing.T) {
	var order []string
	fast, slow := &first{fake{name: "ebpf"}, &order}, &first{fake{name: "nftables"}, &order}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	for _, step := range []struct{ on, want string }{{"ebpf", "ebpf nftables"}, {"nftables", "nftables ebpf"}, {"nftables", "ebpf nftables"}, {"ebpf", "ebpf nftables"}} {
		c := &config.Config{
			Services: []config.Service{{Name: "other", Datapath: "nftables"}, {Name: "web", Datapath: config.DatapathChoice(step.on)}},
			NAT:      []config.NATRule{{Name: "in", Type: config.NATPortForward, Listen: &config.Listen{}, Datapath: config.DatapathChoice(step.on)}},
		}
		order = nil
		if _, err := e.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(order, " "); got != step.want {
			t.Errorf("to %s: %s, want %s", step.on, got, step.want)
		}
	}
}

// first records its applies.
type first struct {
	fake
	order *[]string
}

func (f *first) Apply(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	*f.order = append(*f.order, f.name)
	return f.fake.Apply(ctx, s)
}

// ordered records its applies, and the flows that it exports and imports.
type ordered struct {
	fake
	order *[]string
	taken int
	full  error // error of importing flows
}

func (o *ordered) Apply(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	*o.order = append(*o.order, o.name)
	for kind, names := range map[string]map[string]bool{"arriving": s.Arriving, "gone": s.Gone} {
		if len(names) > 0 {
			*o.order = append(*o.order, kind, strings.Join(slices.Sorted(maps.Keys(names)), " "))
		}
	}
	return o.fake.Apply(ctx, s)
}

func (o *ordered) Give(_ context.Context, names map[string]bool) ([]flow.Flow, error) {
	*o.order = append(*o.order, o.name+" gives", strings.Join(slices.Sorted(maps.Keys(names)), " "))
	return make([]flow.Flow, len(names)), nil
}

func (o *ordered) Take(_ context.Context, flows []flow.Flow) (int, error) {
	*o.order = append(*o.order, o.name+" takes")
	o.taken += len(flows)
	return len(flows), o.full
}

// TestFlowsGoWithTheirService: the new datapath of a service gets its flows before the old one releases it. The
// retained configuration does not mention the move, and a failed move is undone.
func TestFlowsGoWithTheirService(t *testing.T) {
	var order []string
	fast, slow := &ordered{fake: fake{name: "ebpf"}, order: &order}, &ordered{fake: fake{name: "nftables"}, order: &order}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	apply := func(on string) error {
		order = nil
		_, err := e.Apply(t.Context(), &config.Config{
			Services: []config.Service{{Name: "web", Datapath: config.DatapathChoice(on)}},
			NAT:      []config.NATRule{{Name: "in", Type: config.NATPortForward, Listen: &config.Listen{}, Datapath: config.DatapathChoice(on)}},
		})
		return err
	}
	for _, step := range []struct{ on, want string }{
		{"nftables", "ebpf, nftables"},
		{"ebpf", "ebpf, arriving, nat in service web, nftables gives, nat in service web, ebpf takes, nftables, gone, nat in service web"},
		{"ebpf", "ebpf, nftables"},
		{"nftables", "nftables, arriving, nat in service web, ebpf gives, nat in service web, nftables takes, ebpf, gone, nat in service web"},
	} {
		if err := apply(step.on); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(order, ", "); got != step.want {
			t.Errorf("to %s:\n%s, want\n%s", step.on, got, step.want)
		}
		for name, s := range e.inForce {
			if s.Arriving != nil || s.Gone != nil {
				t.Errorf("%s has a snapshot in force that moves something", name)
			}
		}
	}
	if fast.taken != 2 || slow.taken != 2 {
		t.Errorf("taken %d and %d flows, want 2 and 2", fast.taken, slow.taken)
	}
	fast.full = errors.New("table full")
	if err := apply("ebpf"); err == nil || !strings.Contains(err.Error(), "table full") {
		t.Errorf("error %v, want the one of taking", err)
	}
	if !e.plan.services[0].carriedBy("nftables") {
		t.Error("a move that failed is in force")
	}
	if got, want := strings.Join(order, ", "), "nftables gives, nat in service web, ebpf takes, nftables, ebpf"; !strings.HasSuffix(got, want) {
		t.Errorf("a move that failed: %s, want %s at the end: also who gives opens flows again", got, want)
	}
	fast.full, fast.taken, slow.taken, order = nil, 0, 0, nil
	both := &config.Config{Services: []config.Service{{Name: "web", Datapath: "ebpf"}, {Name: "new", Datapath: "ebpf"}}}
	swapped := &config.Config{Services: []config.Service{{Name: "web", Datapath: "nftables"}, {Name: "new", Datapath: "ebpf"}}}
	for _, c := range []*config.Config{swapped, both, swapped} {
		if _, err := e.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	order = nil
	back := &config.Config{Services: []config.Service{{Name: "web", Datapath: "ebpf"}, {Name: "new", Datapath: "nftables"}}}
	if _, err := e.Apply(t.Context(), back); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(order, ", "), "nftables, arriving, service new, ebpf gives, service new, nftables takes, ebpf, gone, service new"; got != want {
		t.Errorf("each gives the other something: %s, want %s", got, want)
	}
}
