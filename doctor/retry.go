// SPDX-License-Identifier: Apache-2.0

package doctor

import "github.com/sluice-lb/sluice/doctor/outcome"

// Retry is the traffic that the first conclusion of a report is about, to be found in a later report.
type Retry struct {
	Conclusion Conclusion
	targets    map[outcome.Target]bool // empty: the conclusion is about no exchanges that were observed
}

// Retry returns the traffic of the first conclusion.
func (r *Report) Retry() Retry {
	t := Retry{Conclusion: r.Conclusion[0]}
	if r.first != nil {
		t.targets = r.first.Targets()
	}
	return t
}

// Fate is the state of the traffic of a conclusion in one report.
type Fate struct {
	// Observed is false if the conclusion is about no exchanges: then its check decides.
	Observed bool          `json:"observed"`
	Concerns outcome.Tally `json:"concerned"` // exchanges of the conclusion
	Others   outcome.Tally `json:"others"`
	// Found is set if the check still reports the same, as a warning at least.
	Found   bool   `json:"found"`
	Summary string `json:"summary"` // of the first conclusion of the report
}

// Fate finds the traffic of a former conclusion in this report.
func (t Retry) Fate(r *Report) Fate {
	f := Fate{Observed: len(t.targets) > 0, Summary: r.Conclusion[0].Summary}
	for name, traffic := range r.traffic {
		switch {
		case traffic == nil:
		case name == t.Conclusion.Namespace:
			concerned, others := traffic.Tally(t.targets)
			f.Concerns, f.Others = concerned, f.Others.Plus(others)
		default:
			_, others := traffic.Tally(nil)
			f.Others = f.Others.Plus(others)
		}
	}
	for _, finding := range r.Findings {
		f.Found = f.Found || finding.Check == t.Conclusion.Check && finding.Namespace == t.Conclusion.Namespace && finding.Verdict >= Warn
	}
	return f
}

// healedShare is the share of answered exchanges from which on traffic is healed. otherLoss is the loss of other
// exchanges, as a share, that no remedy may cause.
const (
	healedShare = 0.9
	otherLoss   = 0.1
)

// Healed reports whether the traffic of a conclusion works, and why it does not.
func (f Fate) Healed(before Fate) (healed bool, why string) {
	share := func(t outcome.Tally) float64 { return float64(t.Answered) / float64(max(t.All(), 1)) }
	c := f.Concerns
	switch {
	case f.Observed && c.All() == 0:
		return false, "no exchange of this kind was seen"
	case f.Observed && share(c) < healedShare:
		return false, plural(c.Failed, "exchange") + " of this kind still failed"
	case !f.Observed && f.Found:
		return false, "the check still finds it"
	case f.Others.All() > 0 && share(before.Others)-share(f.Others) > otherLoss:
		return false, "other exchanges fail now"
	}
	return true, ""
}

// firstClass is the class that the first conclusion is about; nil: none was observed. A rule that drops has a class
// among the refused exchanges.
func (r *Report) firstClass(classes []failing) *outcome.Class {
	if len(r.Conclusion) == 0 {
		return nil
	}
	first := r.Conclusion[0]
	for _, f := range classes {
		if f.namespace.Name == first.Namespace && (f.cause == nil && first.Check == outcomesCheck || f.cause != nil && f.cause.Check == first.Check) {
			return f.class
		}
	}
	traffic := r.traffic[first.Namespace]
	if traffic == nil {
		return nil
	}
	for i := range traffic.Refused {
		c := &traffic.Refused[i]
		for j := range r.Findings {
			if f := &r.Findings[j]; f.Check == first.Check && f.Namespace == first.Namespace && explainedBy(c, f) > 0 {
				return c
			}
		}
	}
	return nil
}
