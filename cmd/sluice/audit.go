// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/table"
)

func newAudit(a *app) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "audit",
		GroupID: "gateway",
		Short:   "List who asked for which change, and what came of it",
		Long: `Audit lists the changes that were asked for, the refused ones too, the oldest
first: by whom, when, what, and the result. Who is the process, its program and
user at the socket; the certificate, the token and the address over TCP; or the file.
Without a daemon it reads the record itself, which takes root.

The record is files of JSON lines in /var/lib/sluice: audit.jsonl and up to four
older ones of 4 MiB each for changes; refused.jsonl and an older one of 1 MiB each
for refused requests. Of like refused requests within a minute the first one has an
entry, and another entry has the number of the others. Refused requests are at most
half of the list.`,
		Example: "  sluice audit\n  sluice audit --limit 1000 --json | jq '.[] | select(.result == \"refused\")'",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > 10000 {
				return usageError(cmd, "--limit: %d is not from 1 to 10000", limit)
			}
			entries, err := a.auditEntries(cmd.Context(), limit)
			if err != nil {
				return err
			}
			return a.print(entries, func(w io.Writer) error { return writeAudit(w, entries) })
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "at most so many, the newest")
	return cmd
}

// auditEntries returns the entries from the daemon, or reads the record if no daemon runs.
func (a *app) auditEntries(ctx context.Context, limit int) ([]audit.Entry, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	entries, err := c.Audit(ctx, limit)
	if errors.Is(err, api.ErrNoDaemon) && a.remote.Server == "" {
		entries, err = audit.Read(a.paths.ChangesDirectory(), limit)
	}
	if entries == nil {
		entries = []audit.Entry{}
	}
	return entries, err
}

func writeAudit(w io.Writer, entries []audit.Entry) error {
	if len(entries) == 0 {
		_, err := fmt.Fprintln(w, "nobody has asked for a change")
		return err
	}
	for _, e := range entries {
		result := e.Result
		switch {
		case e.Revision > 0 && e.Result == audit.Done:
			result = fmt.Sprintf("revision %d", e.Revision)
		case e.Count > 0:
			result = fmt.Sprintf("%s, %d more", e.Result, e.Count)
		}
		if _, err := fmt.Fprintf(w, "%s  %s: %s\n    by %s\n", e.At.Local().Format(time.DateTime), table.Escape(result), table.Escape(e.What), table.Escape(e.Who)); err != nil {
			return err
		}
		if e.Error == "" {
			continue
		}
		indent := "    "
		for line := range strings.SplitSeq(e.Error, "\n") {
			if _, err := fmt.Fprintf(w, "%s%s\n", indent, table.Escape(line)); err != nil {
				return err
			}
			indent = "    | " // marks continuation lines, so that a text cannot imitate an entry
		}
	}
	return nil
}
