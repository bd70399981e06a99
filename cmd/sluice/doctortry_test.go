// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/doctor/trial"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestDoctorTryHealthy tries nothing on a host without a fault.
func TestDoctorTryHealthy(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, faults.Topology("try"))
	var out, errs strings.Builder
	code := execute(t.Context(), []string{"--state-dir", t.TempDir(), "doctor", "--netns", l.Node("gateway").Path(), "--seconds", "0.5", "--try", "--json"}, strings.NewReader(""), &out, &errs)
	var r trial.Result
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil || code != exitOK || r.Verdict != trial.Healthy || r.After != nil || len(r.Commands) > 0 {
		t.Errorf("exit code %d, %+v, %v: %s", code, r, err, errs.String())
	}
}

// TestWriteTrial prints each end of a trial.
func TestWriteTrial(t *testing.T) {
	failed := doctor.Fate{Observed: true, Concerns: outcome.Tally{Failed: 20}, Others: outcome.Tally{Answered: 7, Failed: 1}, Summary: "20 of 20 connections got no answer"}
	answered := doctor.Fate{Observed: true, Concerns: outcome.Tally{Answered: 21}, Others: outcome.Tally{Answered: 8}, Summary: "Nothing is wrong"}
	first := doctor.Conclusion{Check: "FW01", Namespace: "office", Severity: doctor.Critical, Summary: "20 of 20 connections got no answer"}
	base := trial.Result{Conclusion: first, Namespace: "office", Commands: []string{"sysctl -w net.ipv4.ip_forward=1"}, Before: failed}
	for verdict, tc := range map[trial.Verdict]struct {
		change func(r *trial.Result)
		want   []string
	}{
		trial.Healed: {func(r *trial.Result) {
			r.After, r.Undo, r.Risk = &answered, "sluice tune rollback --netns office", "some"
		},
			[]string{"before: 20 of 20", "0 of 20 connections of this kind, 7 of 8 others", "tried:  sysctl -w net.ipv4.ip_forward=1   (namespace office)", "answered: 21 of 21", "healed:", "risk:   some", "undo:   sluice tune rollback --netns office"}},
		trial.TookBack: {func(r *trial.Result) {
			r.After, r.Why, r.Notes = &failed, "20 exchanges of this kind still failed", []string{"a note"}
		},
			[]string{"note:   a note", "taken back: 20 exchanges of this kind still failed; everything is as it was"}},
		trial.NotTried: {func(r *trial.Result) { r.Why = "no" }, []string{"remedy: sysctl", "not tried: no"}},
	} {
		r := base
		r.Verdict = verdict
		tc.change(&r)
		var text strings.Builder
		if err := writeTrial(&text, &r); err != nil {
			t.Fatal(err)
		}
		for _, want := range tc.want {
			if !strings.Contains(text.String(), want) {
				t.Errorf("%s lacks %q:\n%s", verdict, want, text.String())
			}
		}
	}
}
