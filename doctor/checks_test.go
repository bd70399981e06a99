// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// TestIDs wants every check to have a name of its own.
func TestIDs(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Checks() {
		if seen[c.ID] || seen[c.Name] || c.About == "" || c.Run == nil {
			t.Errorf("%s %s: not unique or not complete", c.ID, c.Name)
		}
		seen[c.ID], seen[c.Name] = true, true
	}
	for cause, effects := range consequences {
		for _, id := range append(effects, cause) {
			if !seen[id] {
				t.Errorf("consequences name %s, which is no check", id)
			}
		}
	}
}

// TestForwardingRemedy wants the setting of the family that does not forward.
func TestForwardingRemedy(t *testing.T) {
	for _, tc := range []struct {
		setting string
		make    func(*observe.Sample)
	}{
		{"net.ipv4.ip_forward=1", func(*observe.Sample) {}},
		{"net.ipv4.ip_forward=1", dropped(trace.CauseForwardOff, 300)}, // counted by no SNMP counter
		{"net.ipv6.conf.all.forwarding=1", func(s *observe.Sample) {
			s.Namespaces[0].After.Sysctl["net.ipv4.ip_forward"], s.Namespaces[0].After.Sysctl["net.ipv6.conf.all.forwarding"] = "1", "0"
			forwards(0, 1, 0)(s)
		}},
	} {
		s := examined(t)
		s.Namespaces[0].After.Sysctl["net.ipv4.ip_forward"] = "0"
		if tc.make(s); len(s.Namespaces[0].Drops) > 0 {
			forwards(0, 0, 0)(s)
		}
		for _, f := range Judge(context.Background(), s).Findings {
			if f.Check == "FW01" && (f.Verdict < Info || !slices.Contains(f.Remedy.Commands, "sysctl -w "+tc.setting)) {
				t.Errorf("%s: %s %+v, want %s", f.Summary, f.Verdict, f.Remedy, tc.setting)
			}
		}
	}
}

// TestForwardingKeepsRoutes: if a host learns IPv6 routes from router advertisements, the remedy first keeps this
// enabled, because forwarding disables it.
func TestForwardingKeepsRoutes(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	n.After.Sysctl["net.ipv6.conf.all.forwarding"], n.After.Sysctl["net.ipv6.conf.wan0.accept_ra"] = "0", "1"
	n.After.Routing.Learned6 = []string{"wan0"}
	n.Delta["Ip6InAddrErrors"] = 30
	forwards(0, 1, 0)(s)
	find := func(check string) Finding {
		r := Judge(context.Background(), s)
		return r.Findings[slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Check == check })]
	}
	want := []string{"sysctl -w net.ipv6.conf.wan0.accept_ra=2", "sysctl -w net.ipv6.conf.all.forwarding=1"}
	if f := find("FW01"); f.Verdict != Critical || !slices.Equal(f.Remedy.Commands, want) {
		t.Errorf("%s %s: %q, want %q", f.Verdict, f.Summary, f.Remedy.Commands, want)
	}
	// The same host after forwarding=1 alone.
	n.After.Sysctl["net.ipv6.conf.all.forwarding"] = "1"
	n.After.Routing = observe.Routing{Advertised: map[string]uint64{"wan0": 7}}
	n.Delta["Ip6InNoRoutes"] = 30
	if f := find("FW08"); f.Verdict != Critical || !strings.Contains(f.Summary, "router advertisements that arrive on wan0 are ignored") || !slices.Equal(f.Remedy.Commands, want[:1]) {
		t.Errorf("%s %s: %+v", f.Verdict, f.Summary, f.Remedy)
	}
	n.After.Routing.Default6 = true
	if f := find("FW08"); strings.Contains(f.Summary, "advertisements") {
		t.Errorf("with a default route: %s", f.Summary)
	}
}

// TestCannotTell wants no report to say that nothing is wrong when much could not be seen.
func TestCannotTell(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	n.RulesErr, n.TableErr = fmt.Errorf("netlink: %w", os.ErrPermission), fmt.Errorf("dump: %w", os.ErrPermission)
	n.DropsErr = fmt.Errorf("drops: %w", os.ErrPermission)
	n.Rules, n.Table = &firewall.Ruleset{}, nil
	r := Judge(context.Background(), s)
	c := r.Conclusion[0]
	if r.ExitCode() != exitCannotTell || !strings.HasPrefix(c.Summary, "Cannot tell") || !strings.Contains(c.Do, "CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON") {
		t.Errorf("exit code %d: %s", r.ExitCode(), c)
	}
	n.Delta["IpExt.InNoRoutes"] = 30
	r = Judge(context.Background(), s)
	if last := r.Conclusion[len(r.Conclusion)-1]; r.ExitCode() != 1 || r.Conclusion[0].Check != "FW08" || last.Severity != Unknown {
		t.Errorf("exit code %d: %v", r.ExitCode(), r.Conclusion)
	}
}

// TestNotVisible wants a reason that is the same in several namespaces on one line, with all
// the checks that it blinds.
func TestNotVisible(t *testing.T) {
	r := Report{}
	for _, check := range []string{"RL01", "RL02"} {
		for _, namespace := range []string{"a", "b", "c"} {
			r.Findings = append(r.Findings, Finding{Check: check, Namespace: namespace, Verdict: Unknown, Summary: "no rights"})
		}
	}
	r.Findings = append(r.Findings, Finding{Check: "RL03", Namespace: "a", Verdict: Unknown, Summary: "no program"},
		Finding{Check: "KV01", Verdict: Unknown, Summary: "no release"})
	r.Conclusion = []Conclusion{{}}
	var text strings.Builder
	if err := r.Write(&text, Style{}); err != nil {
		t.Fatal(err)
	}
	const want = "Not visible\n  RL01, RL02: no rights (3 namespaces)\n  RL03: no program (a)\n  KV01: no release\n"
	if !strings.Contains(text.String(), want) {
		t.Errorf("want %q:\n%s", want, &text)
	}
}

// TestKernelFeatures wants KV01 to state what other tools ask for.
func TestKernelFeatures(t *testing.T) {
	for _, c := range []struct {
		symbols map[string]bool
		want    string
	}{
		{nil, "; kprobes: not known; BPF netfilter programs: not known"},
		{map[string]bool{observe.SymbolKprobes: true}, "; kprobes: yes; BPF netfilter programs: no"},
		{map[string]bool{observe.SymbolBPFNetfilter: true}, "; kprobes: no; BPF netfilter programs: yes"},
	} {
		s := examined(t)
		s.After.Symbols = c.symbols
		f := checkKernel(context.Background(), &Case{Sample: s})
		if !strings.HasSuffix(f.Summary, c.want) {
			t.Errorf("%v: %s, want %s", c.symbols, f.Summary, c.want)
		}
	}
}

// TestAgree wants the singular for one.
func TestAgree(t *testing.T) {
	for text, want := range map[string]string{
		"1 packets were too large":                         "1 packet was too large",
		"1 new connections were refused":                   "1 new connection was refused",
		"1 entries are in 2 namespaces":                    "1 entry is in 2 namespaces",
		"11 packets had no route":                          "11 packets had no route",
		"0.1 packets/s, 10.0.0.1 packets, CPU 1 takes all": "0.1 packets/s, 10.0.0.1 packets, CPU 1 takes all",
		"lost 1 packets for want of room":                  "lost 1 packet for want of room",
	} {
		if got := agree(text); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestFoldedNotes wants the notes of every report on one line, and each where all is asked for.
func TestFoldedNotes(t *testing.T) {
	r := Report{Conclusion: []Conclusion{{}}}
	for _, check := range []string{"ST06", "CT14", "RX08", "RL11", "RL11"} {
		r.Findings = append(r.Findings, Finding{Check: check, Name: "x", Verdict: Info, Summary: "said"})
	}
	for all, want := range map[bool]string{
		false: "Notes\n  RX08 x: said\n  As on most hosts: CT14 x, RL11 x, ST06 x (--all shows each)\n\n",
		true:  "Notes\n  ST06 x: said\n  CT14 x: said\n",
	} {
		var text strings.Builder
		if err := r.Write(&text, Style{All: all}); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text.String(), want) {
			t.Errorf("want %q:\n%s", want, &text)
		}
	}
}

// TestOwnTraffic: a forwarder's own connections are no candidates for notrack.
func TestOwnTraffic(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	own := netip.MustParsePrefix("198.51.100.2/24") // where the entries go
	entries(1100, func(_ int, e *conntrack.Entry) { e.Original.DestPort, e.Reply.SourcePort = 53, 53 })(s)
	if f := checkNotrack(context.Background(), &Case{Sample: s, NS: n}); f.Verdict != Info {
		t.Errorf("to another host: %s: %s", f.Verdict, f.Summary)
	}
	n.After.Links[1].Addresses = append(n.After.Links[1].Addresses, own)
	if f := checkNotrack(context.Background(), &Case{Sample: s, NS: n}); f.Verdict != OK || !strings.Contains(f.Summary, "own connections") {
		t.Errorf("%s: %s", f.Verdict, f.Summary)
	}
}

// TestUnreadableBudget: no command sets what cannot be read, which may be larger already.
func TestUnreadableBudget(t *testing.T) {
	s := examined(t)
	delete(s.After.Sysctl, "net.core.netdev_budget")
	s.After.Softnet[0].Squeezed += 1000
	for _, f := range Judge(context.Background(), s).Findings {
		if f.Check == "RX02" && (f.Verdict != Warn || len(f.Remedy.Commands) > 0 || !strings.Contains(f.Summary, "cannot be read here")) {
			t.Errorf("%s %s: %q", f.Verdict, f.Summary, f.Remedy)
		}
	}
}
