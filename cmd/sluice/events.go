// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/table"
)

// eventsFlags are the flags of 'sluice events'.
type eventsFlags struct {
	follow bool
	kinds  []string
	since  string
	flows  map[string]*string // filters of flow events
}

// flowFilters are the filters of flow events with the help of their flags.
var flowFilters = []struct{ name, help string }{
	{"protocol", "protocol of flows"}, {"client", "address or prefix of their original source"}, {"destination", "address or prefix of their original destination"},
	{"port", "their original destination port"}, {"owner", "their service or NAT rule"}, {"backend", "their backend"},
}

// eventsAgain is the wait before reconnecting to a daemon that ended.
const eventsAgain = time.Second

func newEvents(a *app) *cobra.Command {
	var f eventsFlags
	var kinds []string
	for _, k := range append(slices.Clone(event.Kinds), event.Flow) {
		kinds = append(kinds, string(k))
	}
	cmd := &cobra.Command{
		Use:     "events",
		GroupID: "gateway",
		Short:   "Show what happened in the gateway, and what happens",
		Long: `Events prints what the daemon has kept, up to 8192 events, the oldest first:

  apply     a change of the configuration or of a backend's state, who asked for
            it, and why it was refused; rules that were put back
  backend   a backend is up, drain or down, and why
  announcement
            an address is announced to routers or withdrawn, and why
  table     a connection table is 80 % or 95 % full; ended: less than 70 %
  ports     the same of the ports of the address pools on eBPF
  drops     10 packets a second or more are dropped for one cause
  warning   what keeps rules from working, as in 'sluice show'
  flow      connections that come and go, which --client, --port and so on choose;
            looked for every two seconds, with --kind flow alone

With --follow it prints what comes from now on until Ctrl-C, and waits for a daemon
that is restarted. With --json each event is a line.`,
		Example: `  sluice events
  sluice events --since 10m --kind backend,drops
  sluice events --follow --kind flow --client 198.51.100.7
  sluice events --follow --json | jq -r 'select(.state == "down") | .object'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			query, after, err := f.query(cmd, kinds)
			if err != nil {
				return err
			}
			return a.events(cmd.Context(), query, after, f.follow)
		},
	}
	cmd.Flags().BoolVarP(&f.follow, "follow", "f", false, "print what comes, until Ctrl-C")
	cmd.Flags().StringSliceVar(&f.kinds, "kind", nil, "only these kinds: "+strings.Join(kinds, ", "))
	cmd.Flags().StringVar(&f.since, "since", "", "begin after the event with this ID, or with those of a time such as 10m; 0 is all")
	f.flows = map[string]*string{}
	for _, filter := range flowFilters {
		f.flows[filter.name] = cmd.Flags().String(filter.name, "", "with --kind flow: "+filter.help)
	}
	completeFlag(cmd, "kind", kinds...)
	return cmd
}

// query returns the query to the daemon. Events before after are omitted.
func (f *eventsFlags) query(cmd *cobra.Command, kinds []string) (query url.Values, after time.Time, err error) {
	query = url.Values{"follow": {strconv.FormatBool(f.follow)}}
	for _, k := range f.kinds {
		if !slices.Contains(kinds, k) {
			return nil, after, usageError(cmd, "kind %q: not one of %s", k, strings.Join(kinds, ", "))
		}
	}
	if len(f.kinds) > 0 {
		query.Set("kind", strings.Join(f.kinds, ","))
	}
	interest := slices.Contains(f.kinds, string(event.Flow))
	filtered := false
	for name, value := range f.flows {
		if *value != "" {
			query.Set(name, *value)
			filtered = true
		}
	}
	switch {
	case interest && !filtered:
		return nil, after, usageError(cmd, "--kind flow: say which flows, as by --client 198.51.100.7 or --port 443")
	case filtered && !interest:
		return nil, after, usageError(cmd, "--client, --port and the like go with --kind flow")
	}
	if f.since == "" {
		return query, after, nil
	}
	if _, err := strconv.ParseUint(f.since, 10, 63); err == nil {
		query.Set("since", f.since)
		return query, after, nil
	}
	ago, err := time.ParseDuration(f.since)
	if err != nil || ago <= 0 {
		return nil, after, usageError(cmd, "--since %q: write the ID of an event, or a time such as 10m", f.since)
	}
	query.Set("since", "0")
	return query, time.Now().Add(-ago), nil
}

// events prints the events of the daemon.
func (a *app) events(ctx context.Context, query url.Values, after time.Time, follow bool) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	var last uint64
	show := func(e *event.Event) error {
		last = e.ID
		if e.Kind == event.Begin || e.At.Before(after) {
			return nil
		}
		return a.writeEvent(e)
	}
	for told := false; ; {
		err := c.Events(ctx, query, show)
		switch {
		case ctx.Err() != nil && follow:
			return nil
		case !follow, last == 0 && err != nil, errors.As(err, new(*api.Problem)), errors.As(err, new(writeError)):
			return err
		}
		if !told {
			a.progress("the daemon does not answer any more: waiting for it")
		}
		told = true
		query.Set("since", strconv.FormatUint(last, 10))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(eventsAgain):
		}
	}
}

// writeError is an error of writing to standard output.
type writeError struct{ error }

func (e writeError) Unwrap() error { return e.error }

func (a *app) writeEvent(e *event.Event) error {
	var err error
	if a.json {
		lines := json.NewEncoder(a.stdout)
		lines.SetEscapeHTML(false)
		err = lines.Encode(e)
	} else {
		text := e.Text
		if e.Ended {
			text = "ended: " + text
		}
		_, err = fmt.Fprintf(a.stdout, "%s %-7s  %s\n", e.At.Local().Format(time.DateTime), table.Escape(string(e.Kind)), table.Escape(text))
	}
	if err != nil {
		return writeError{err}
	}
	return nil
}
