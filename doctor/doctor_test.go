// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
)

// TestHealthyTree wants nothing above a note, and no check that could not look.
func TestHealthyTree(t *testing.T) {
	r := Judge(context.Background(), examined(t))
	for _, f := range r.Findings {
		if f.Verdict >= Warn || f.Verdict == Unknown {
			t.Errorf("%s %s: %s: %s", f.Check, f.Name, f.Verdict, f.Summary)
		}
	}
	if r.ExitCode() != 0 || !strings.HasPrefix(r.Conclusion[0].Summary, "Nothing is wrong in 1 namespace") {
		t.Errorf("exit code %d, conclusion %v", r.ExitCode(), r.Conclusion)
	}
}

// checkCase makes one thing wrong, or nearly.
type checkCase struct {
	check string
	name  string
	make  func(*observe.Sample)
	want  Verdict
}

// TestChecks makes one thing wrong at a time.
func TestChecks(t *testing.T) {
	tried := map[string]map[Verdict]bool{}
	for _, c := range slices.Concat(tableCases, entryCases, portCases, ruleCases, forwardCases, hostCases) {
		if tried[c.check] == nil {
			tried[c.check] = map[Verdict]bool{OK: true} // TestHealthyTree
		}
		tried[c.check][c.want] = true
		t.Run(c.check+" "+c.name, func(t *testing.T) {
			s := examined(t)
			c.make(s)
			for _, f := range Judge(context.Background(), s).Findings {
				if f.Check == c.check && f.Verdict != c.want {
					t.Errorf("%s: %s, want %s", f.Summary, f.Verdict, c.want)
				}
				if f.Remedy != nil {
					for _, command := range append(f.Remedy.Commands, f.Remedy.Do) {
						if strings.HasSuffix(command, ".") || unfilled.MatchString(command) {
							t.Errorf("%s: %q is not complete, or ends with a full stop", f.Check, command)
						}
					}
				}
				if f.Check == c.check && f.Verdict >= Warn && (f.Symptom == "" || f.Remedy == nil || f.Remedy.Do == "" || f.Remedy.Cost+f.Remedy.Risk == "") {
					t.Errorf("%s has no symptom, remedy, or cost and risk of it: %+v", f.Check, f.Remedy)
				}
				if f.Verdict >= Warn && len(f.Remedy.Commands) == 0 && f.Remedy.Risk == "" {
					t.Errorf("%s: the remedy has neither commands nor a risk: %s", f.Check, f.Remedy.Do)
				}
			}
		})
	}
	for _, c := range Checks() {
		if len(tried[c.ID]) < 2 {
			t.Errorf("%s %s: no case in which it finds something", c.ID, c.Name)
		}
	}
}

// TestBlind: a check without input has the verdict unknown, never OK.
func TestBlind(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	no := errors.New("not permitted")
	n.After.ConntrackErr, n.TableErr, n.RulesErr, n.DropsErr, n.NewErr, s.After.LogErr = no, no, no, no, no, no
	n.Rules, n.Table = &firewall.Ruleset{}, nil
	blind := map[string]bool{}
	for _, f := range Judge(context.Background(), s).Findings {
		blind[f.Check] = f.Verdict == Unknown
	}
	for _, id := range strings.Fields("CT02 CT04 CT05 CT06 CT09 CT10 CT11 CT12 ST01 ST02 ST03 ST04 ST08 ST10 ST11 " +
		"PT01 PT02 PT03 PT05 PT07 RL01 RL02 RL03 RL04 RL05 RL06 RL07 RL08 RL12 RL15 RL16 FW07 FW12 FW13 OC01") {
		if !blind[id] {
			t.Errorf("%s says that all is well with what it could not read", id)
		}
	}
}

// TestOpenFilesRemedy: it raises limits, and lowers none; above fs.nr_open there are none.
func TestOpenFilesRemedy(t *testing.T) {
	for _, tc := range []struct {
		hard uint64
		most string
		want string
	}{{1024, "1048576", "prlimit --pid 7 --nofile=4096"}, {4095, "4096", "prlimit --pid 7 --nofile=4096"}, {4096, "1048576", "prlimit --pid 7 --nofile=4096:"},
		{math.MaxUint64, "", "prlimit --pid 7 --nofile=4096:"}, {1024, "4095", "sysctl -w fs.nr_open=4096; prlimit --pid 7 --nofile=4096"}} {
		s := examined(t)
		s.After.Sysctl["fs.nr_open"] = tc.most
		s.After.Files = observe.ProcessFiles{Name: "nginx", PID: 7, Open: 1000, Limit: 1024, Hard: tc.hard}
		for _, f := range Judge(context.Background(), s).Findings {
			if f.Check == "LS03" && strings.Join(f.Remedy.Commands, "; ") != tc.want {
				t.Errorf("hard limit %d, at most %s: %s, want %s", tc.hard, tc.most, f.Remedy.Commands, tc.want)
			}
		}
	}
}

// TestSettingsOfVLANs: sysctl(8) reads a dot in the name of an interface as a separator, so that commands have a slash.
func TestSettingsOfVLANs(t *testing.T) {
	for command, want := range map[string]string{
		"sysctl -w net.ipv4.conf.IFACE.rp_filter=2":           "sysctl -w net.ipv4.conf.eth0/100.rp_filter=2",
		"sysctl -w net.ipv6.neigh.IFACE.mcast_solicit=5":      "sysctl -w net.ipv6.neigh.eth0/100.mcast_solicit=5",
		"sysctl -w net.ipv4.conf.br-1.2.3.route_localnet=1":   "sysctl -w net.ipv4.conf.br-1/2/3.route_localnet=1",
		"sysctl -w net.ipv4.conf.all.rp_filter=1":             "sysctl -w net.ipv4.conf.all.rp_filter=1",
		"sysctl -w net.netfilter.nf_conntrack_max=262144":     "sysctl -w net.netfilter.nf_conntrack_max=262144",
		"ip addr add 192.0.2.1/32 dev IFACE":                  "ip addr add 192.0.2.1/32 dev eth0.100",
		"sysctl -w net.ipv6.conf.IFACE.accept_ra=2 net.a.b=1": "sysctl -w net.ipv6.conf.eth0/100.accept_ra=2 net.a.b=1",
	} {
		if got := (Remedy{Commands: []string{command}}).filled([]string{"IFACE", "eth0.100"}).Commands; !slices.Equal(got, []string{want}) {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
}

// TestConclusionOrder wants causes before consequences and losses before risks.
func TestConclusionOrder(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	n.After.Limits.Count, n.After.Limits.Max = 1000, 1000
	fill(n.Table, 900, conntrack.TCPTimeWait)
	n.Delta["conntrack.drop"], n.Delta["conntrack.early_drop"] = 500, 20
	n.After.Links[1].MTU = 1400
	n.Delta["IpExt.InNoRoutes"] = 30
	r := Judge(context.Background(), s)
	var got []string
	for _, c := range r.Conclusion {
		got = append(got, c.Check)
	}
	if want := []string{"CT05", "FW08", "FW05"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v:\n%v", got, want, r.Conclusion)
	}
	if r.ExitCode() != 2 {
		t.Errorf("exit code %d", r.ExitCode())
	}
	if !strings.Contains(r.Conclusion[0].Summary, "90 % of the entries are tcp TIME_WAIT") {
		t.Errorf("the conclusion does not say what fills the table: %s", r.Conclusion[0])
	}
}
