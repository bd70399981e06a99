// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/doctor/trial"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
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

// TestProbed reads the backends of the daemon of this namespace, and none without a daemon.
func TestProbed(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "sluice.sock")
	a := &app{paths: daemon.Paths{Socket: socket}}
	if list := a.backendAddresses(t.Context(), netdev.CurrentNamespace()); len(list) != 0 {
		t.Errorf("without a daemon: %v", list)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`[{"service":"web","name":"a","address":"10.0.1.2:80"}]`))
	})}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	if list := a.backendAddresses(t.Context(), netdev.CurrentNamespace()); len(list) != 1 || list[0].String() != "10.0.1.2" {
		t.Errorf("with a daemon: %v", list)
	}
	if got := daemon.SocketIn(netdev.Namespace{Name: "office", Path: "/run/netns/office", Inode: 7}); got != "/run/sluice/netns/office/sluice.sock" {
		t.Errorf("socket of a namespace with a name: %s", got)
	}
	if got := daemon.SocketIn(netdev.HostNamespace()); got != "/run/sluice/sluice.sock" {
		t.Errorf("socket of the host: %s", got)
	}
}
