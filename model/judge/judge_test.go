// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

func TestMain(m *testing.M) {
	// Each packet creates small objects and the tests hold little memory. A larger GC target saves
	// a third of the time.
	debug.SetGCPercent(800)
	os.Exit(m.Run())
}

// TestModelAgreesWithItself runs every scenario on a second model with other random choices. The
// first model must accept these choices as legal.
func TestModelAgreesWithItself(t *testing.T) { agreesWithItself(t, Options{}) }

// TestModelAgreesAcrossReloads also changes the configuration.
func TestModelAgreesAcrossReloads(t *testing.T) { agreesWithItself(t, Options{Reloads: true}) }

// TestModelAgreesAcrossChangesOfTheHost also changes the host.
func TestModelAgreesAcrossChangesOfTheHost(t *testing.T) {
	agreesWithItself(t, Options{Reloads: true, Host: true})
}

func agreesWithItself(t *testing.T, o Options) {
	o.Packets, o.Seed = 4000, 1
	if testing.Short() {
		o.Packets = 500
	}
	for _, sc := range Scenarios() {
		t.Run(sc.Name, func(t *testing.T) {
			d, n, err := Run(&golden.Model{Seed: 99}, sc, o)
			if err != nil {
				t.Fatal(err)
			}
			if d != nil {
				t.Fatal(d)
			}
			if n < o.Packets {
				t.Errorf("only %d packets", n)
			}
		})
	}
}

// TestEveryReasonIsReached checks that the generator reaches every reason.
func TestEveryReasonIsReached(t *testing.T) {
	seen := map[model.Reason]int{}
	for _, sc := range Scenarios() {
		tr, err := replay(&golden.Model{Seed: 5}, sc, 3, randomEvents(3, 3000), Options{})
		if err != nil || tr.disagreement != nil {
			t.Fatal(err, tr.disagreement)
		}
		for _, s := range tr.steps {
			seen[s.got.Reason]++
		}
	}
	for _, r := range []model.Reason{model.ReasonFlow, model.ReasonNewFlow, model.ReasonStateless, model.ReasonSYN, model.ReasonSYNACK, model.ReasonStatic,
		model.ReasonICMPError, model.ReasonFragment, model.ReasonNotIP, model.ReasonNotOurs, model.ReasonNotRouted, model.ReasonTruncated,
		model.ReasonBadHeader, model.ReasonBadChecksum, model.ReasonTTLExceeded, model.ReasonFiltered, model.ReasonNoBinding, model.ReasonNoFlow,
		model.ReasonErrorWithoutFlow, model.ReasonHeldFragment, model.ReasonUntranslatable, model.ReasonUnsupportedProtocol, model.ReasonStrictTCP, model.ReasonUnserved} {
		if seen[r] == 0 {
			t.Errorf("no packet ended as %s", r)
		}
	}
}

// faulty adds one small fault to a subject.
type faulty struct {
	golden.Model
	break_ func(in model.Arrival, o *model.Outcome)
}

func (f *faulty) Name() string { return "faulty" }

func (f *faulty) Step(in model.Arrival) (model.Outcome, error) {
	o, err := f.Model.Step(in)
	for i := range o.Out {
		o.Out[i].Frame = append([]byte(nil), o.Out[i].Frame...)
	}
	f.break_(in, &o)
	return o, err
}

// TestFaultsAreFound adds typical faults to a datapath. The judge must find each fault and shrink
// it to a few packets. The resulting case must fail on the faulty datapath and pass on the model.
func TestFaultsAreFound(t *testing.T) {
	faults := map[string]func(in model.Arrival, o *model.Outcome){
		"hop limit not decremented": func(in model.Arrival, o *model.Outcome) {
			for _, d := range o.Out {
				if o.Reason == model.ReasonFlow && d.Frame[14]>>4 == 6 {
					d.Frame[21]++
				}
			}
		},
		"checksum inside an error": func(in model.Arrival, o *model.Outcome) {
			for _, d := range o.Out {
				if p := packet.Parse(d.Frame); o.Reason == model.ReasonICMPError && len(d.Frame) > 60 && d.Frame[14]>>4 == 4 && len(p) > 3 {
					d.Frame[52]++
				}
			}
		},
		"odd ports for even ones": func(in model.Arrival, o *model.Outcome) {
			for i, d := range o.Out {
				p := packet.Parse(d.Frame)
				if u, ok := packet.Find[*packet.UDP](p); ok && o.Reason == model.ReasonNewFlow && u.SrcPort%2 == 0 {
					u.SrcPort++
					o.Out[i].Frame = p.Build()
				}
			}
		},
		"wrong reason": func(in model.Arrival, o *model.Outcome) {
			if o.Reason == model.ReasonFiltered {
				o.Reason = model.ReasonNoBinding
			}
		},
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			for _, sc := range Scenarios() {
				s := &faulty{Model: golden.Model{Seed: 8}, break_: fault}
				d, _, err := Run(s, sc, Options{Packets: 3000, Seed: 2})
				if err != nil {
					t.Fatal(err)
				}
				if d == nil {
					continue
				}
				if n := strings.Count(d.Case, "\nin "); n > 6 {
					t.Errorf("%d packets to show it:\n%s", n, d.Case)
				}
				c, err := golden.Read("found.txt", d.Case)
				if err != nil {
					t.Fatalf("%v\n%s", err, d.Case)
				}
				if err := c.Run(s); err == nil {
					t.Errorf("the case does not show the fault:\n%s", d.Case)
				}
				return
			}
			t.Error("not found")
		})
	}
}

// TestScenariosAreValid decodes every configuration.
func TestScenariosAreValid(t *testing.T) {
	for _, sc := range Scenarios() {
		if _, err := sc.Config(); err != nil {
			t.Error(err)
		}
	}
}
