// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"errors"
	"io"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/trace"
)

// Run shows the view on the terminal until the user quits or ctx ends.
func Run(ctx context.Context, r Reader, in io.Reader, out io.Writer, options ...tea.ProgramOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the running fetches
	// Signals end ctx. The library's own signal handler would block forever if the program's context has already
	// ended.
	options = append([]tea.ProgramOption{tea.WithContext(ctx), tea.WithoutSignalHandler(), tea.WithInput(in), tea.WithOutput(out), tea.WithFPS(10)}, options...)
	_, err := tea.NewProgram(New(ctx, r), options...).Run()
	if errors.Is(err, tea.ErrInterrupted) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Picture is the complete data of the view, for programs.
type Picture struct {
	Verdict    Verdict               `json:"verdict"`
	Counts     *Counts               `json:"counts"`
	Entries    uint32                `json:"entries"`
	Held       map[string]uint32     `json:"held"`
	TableTook  float64               `json:"table_seconds"`
	Sources    []conntrack.Row       `json:"sources"`
	Dests      []conntrack.Row       `json:"destinations"`
	Services   []conntrack.Row       `json:"services"`
	Backends   []conntrack.Row       `json:"backends"`
	SNATPorts  []conntrack.Occupancy `json:"snat_ports"`
	States     []conntrack.Row       `json:"states"`
	Namespaces []conntrack.Row       `json:"entries_by_namespace"`
	Drops      *trace.DropReport     `json:"drops,omitempty"`
	Phases     []trace.PhaseShare    `json:"phases,omitempty"`
	Blind      []string              `json:"not_seen,omitempty"`
}

// Once reads all data once; drops and CPU phases are observed together. rows limits each ranking.
func Once(ctx context.Context, r Reader, rows int) (*Picture, error) {
	if _, err := r.Counts(ctx); err != nil { // the start of the rates
		return nil, err
	}
	p := &Picture{}
	type watched struct {
		drops   *trace.DropReport
		profile *trace.Profile
		blind   []string
	}
	ready := make(chan watched, 1)
	go func() {
		var w watched
		profiled := make(chan struct{})
		var noProfile error
		go func() {
			defer close(profiled)
			w.profile, noProfile = r.Profile(ctx)
		}()
		var err error
		if w.drops, err = r.Drops(ctx); err != nil {
			w.blind = append(w.blind, err.Error())
		}
		if <-profiled; noProfile != nil {
			w.blind = append(w.blind, noProfile.Error())
		}
		ready <- w
	}()
	t, err := r.Table(ctx)
	w := <-ready
	if err != nil {
		return nil, err
	}
	if p.Counts, err = r.Counts(ctx); err != nil {
		return nil, err
	}
	p.fill(t, rows)
	p.Drops, p.Blind = w.drops, append(append(p.Counts.Blind, t.Blind...), w.blind...)
	if w.profile != nil {
		p.Phases = w.profile.Phases
	}
	p.Verdict = findVerdict(p.Counts, t)
	return p, ctx.Err()
}

func (p *Picture) fill(t *TableSummary, rows int) {
	s := t.Summary
	p.Entries, p.Held, p.TableTook = s.Total.Entries, t.Held, t.Took.Round(time.Millisecond).Seconds()
	p.Sources, p.Dests, p.Services, p.Backends = s.Sources(rows), s.Dests(rows), s.Services(rows), s.Backends(rows)
	p.SNATPorts, p.States, p.Namespaces = s.Occupancies(rows, 0), s.States(), s.Namespaces(rows)
}

// Screen renders the view of one tab as plain text of the given size, for --once without --json.
func Screen(ctx context.Context, r Reader, width, height int) (string, error) {
	m := New(ctx, r)
	m.width, m.height = width, height
	if _, err := r.Counts(ctx); err != nil {
		return "", err
	}
	var err error
	if m.table, err = r.Table(ctx); err != nil {
		return "", err
	}
	m.wait = waitAfter(m.table.CPU, dumpShare, dumpMinimum)
	select {
	case <-time.After(time.Second): // rates need two readings
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if m.counts, err = r.Counts(ctx); err != nil {
		return "", err
	}
	return m.drawScreen(), nil
}
