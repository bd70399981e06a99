// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
)

// connsFlags are the flags of 'sluice conns'.
type connsFlags struct {
	conntrack.Grouping
	window                time.Duration
	netns                 []string
	list, check           bool
	terms                 map[string]*string // conditions by conntrack.FilterTerms, but zone; "" for none
	zone                  int                // -1 for none
	four, six, translated bool
}

func newConns(a *app) *cobra.Command {
	f := &connsFlags{}
	cmd := &cobra.Command{
		Use:     "conns",
		GroupID: "diagnosis",
		Short:   "Show who fills the connection table, and when it is full",
		Long: `Reads the kernel's connection table of every network namespace in one pass and
prints sums: fill (all entries, and those that the kernel does not evict), growth
and time to full, states, the largest sources and services, the occupancy of each SNAT
address towards each destination, and what to delete first.

HELD counts entries that are assured and not closing. The kernel evicts the others
by itself when the table is full, so that a table full of them is no outage.`,
		Example: `  sluice conns
  sluice conns --by source --top 20
  sluice conns --by snat-port --proto tcp
  sluice conns --state TIME_WAIT --by service
  sluice conns --list --src 10.0.0.0/8 --json
  sluice conns delete --state TIME_WAIT --netns blue --yes`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, a) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.By, "by", "", "group by "+strings.Join(conntrack.Groupings(), ", ")+" (default: an overview)")
	flags.IntVar(&f.Top, "top", 10, "rows of each ranking; 0 for all")
	flags.DurationVar(&f.window, "window", time.Second, "time between the two readings that growth and drops are computed from")
	flags.BoolVar(&f.list, "list", false, "print every connection instead of sums, as it is read")
	flags.BoolVar(&f.check, "check", false, "exit with 1 when 75 % of a table is held, with 2 when 90 % is, or when it dropped packets in the window")
	flags.Uint32Var(&f.Pool, "pool", capacity.MasqueradePorts, "ports that SNAT may use on one address")
	for _, sums := range []string{"by", "top", "window", "check", "pool"} {
		cmd.MarkFlagsMutuallyExclusive("list", sums)
	}
	f.filterFlags(cmd)
	completeFlag(cmd, "by", conntrack.Groupings()...)
	cmd.AddCommand(newConnsDelete(a))
	return cmd
}

func (f *connsFlags) filterFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.netns, "netns", nil, "network namespaces: names, paths, 'host' or 'all' (default all)")
	f.terms = map[string]*string{}
	for term, usage := range map[string]string{
		"proto":   "protocol: tcp, udp, icmp, ... or a number",
		"state":   "state: TIME_WAIT, SYN_SENT, ..., UNREPLIED, REPLIED, ASSURED",
		"src":     "the initiator's address or prefix",
		"dst":     "address or prefix that the initiator sends to",
		"nat-src": "address or prefix that the responder sees (SNAT)",
		"nat-dst": "address or prefix where the packets go (DNAT)",
		"sport":   "the initiator's port or range",
		"port":    "destination port or range",
		"mark":    "connection mark, or mark/mask",
	} {
		f.terms[term] = flags.String(term, "", usage)
	}
	flags.IntVar(&f.zone, "zone", -1, "conntrack zone")
	flags.BoolVarP(&f.four, "ipv4", "4", false, "IPv4 only")
	flags.BoolVarP(&f.six, "ipv6", "6", false, "IPv6 only")
	flags.BoolVar(&f.translated, "nat", false, "translated connections only")
	cmd.MarkFlagsMutuallyExclusive("ipv4", "ipv6")
	completeFlag(cmd, "proto", protocolWords...)
	completeFlag(cmd, "state", stateWords...)
	offerFrom(cmd, "netns", namespaces)
}

// filter turns the flags into a conntrack filter.
func (f *connsFlags) filter() (conntrack.Filter, error) {
	out := conntrack.Filter{Translated: f.translated}
	var errs []error
	for _, term := range conntrack.FilterTerms {
		text := ""
		if term == "zone" && f.zone != -1 {
			text = strconv.Itoa(f.zone)
		} else if flag, ok := f.terms[term]; ok {
			text = *flag
		}
		if text == "" {
			continue
		}
		if err := out.Set(term, text); err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", term, err))
		}
	}
	switch {
	case f.four:
		out.Family = unix.AF_INET
	case f.six:
		out.Family = unix.AF_INET6
	}
	return out, errors.Join(errs...)
}

// forEachNamespace runs fn in the selected namespaces, and reports the namespaces that it could not see.
func (f *connsFlags) forEachNamespace(a *app, fn func(netdev.Namespace) error) error {
	list, err := netdev.NamespacesAt(f.netns)
	if err != nil {
		return err
	}
	unseen, err := conntrack.EachNamespace(list, fn)
	for _, text := range unseen {
		a.progress("not seen: %s", text)
	}
	return err
}

func (f *connsFlags) run(cmd *cobra.Command, a *app) error {
	if keys := conntrack.Groupings(); f.By != "" && !slices.Contains(keys, f.By) {
		return usageError(cmd, "--by %s: not one of %s", f.By, strings.Join(keys, ", "))
	}
	switch {
	case f.Top < 0:
		return usageError(cmd, "--top %d: must not be negative", f.Top)
	case f.window < 0:
		return usageError(cmd, "--window %s: must not be negative", f.window)
	case f.Pool == 0:
		return usageError(cmd, "--pool 0: at least 1")
	}
	filter, err := f.filter()
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	if f.list {
		return listConns(cmd.Context(), a, f, &filter)
	}
	namespaces, err := netdev.NamespacesAt(f.netns)
	if err != nil {
		return err
	}
	ask := conntrack.Ask{Namespaces: namespaces, Dimensions: f.Dimensions(), Filter: &filter, Window: f.window}
	if namespaces == nil {
		ask.Sources = a.flowSources()
	}
	s, err := conntrack.Look(cmd.Context(), ask)
	if err != nil {
		return err
	}
	r := connsReport{conntrack.NewReport(s, f.Grouping)}
	if err := a.print(r.Report, r.write); err != nil {
		return err
	}
	if code := r.Level(); f.check && code != exitOK {
		return exitError{code: code}
	}
	return nil
}

// listConns prints connections while it reads them, one line or one JSON object each: from the
// kernel's tables and, if all are selected, from the eBPF datapath.
func listConns(ctx context.Context, a *app, f *connsFlags, filter *conntrack.Filter) error {
	out := bufio.NewWriterSize(a.stdout, 64<<10)
	show := func(where string) func(*conntrack.Entry) error {
		return func(e *conntrack.Entry) error {
			if a.json {
				return writeJSONLine(out, e.Listed(where))
			}
			return writeConn(out, where, e)
		}
	}
	err := f.forEachNamespace(a, func(ns netdev.Namespace) error {
		return conntrack.ListIn(ctx, ns, filter, show(ns.Name))
	})
	if namespaces, _ := netdev.NamespacesAt(f.netns); err == nil && namespaces == nil {
		for _, src := range a.flowSources() {
			if err = conntrack.EachFlow(ctx, src, filter, show(src.Name())); err != nil {
				break
			}
		}
	}
	return cmp.Or(err, out.Flush())
}

func writeConn(w io.Writer, namespace string, e *conntrack.Entry) error {
	f := e.Flow()
	nat := ""
	if f.SourceTranslated() {
		nat += " snat " + f.Reply.Dest.String()
	}
	if f.DestTranslated() {
		nat += " dnat " + f.Reply.Source.String()
	}
	_, err := table.Line(w, "%s %s %s %s%s", namespace, f.Original, e.StateName(), f.Timeout, nat)
	return err
}

// newConnsDelete returns the command 'sluice conns delete'.
func newConnsDelete(a *app) *cobra.Command {
	f := &connsFlags{}
	var yes bool
	cmd := &cobra.Command{
		Use:   "delete",
		Short: "Remove the connections that the filters choose",
		Long: `Removes entries from the kernel's connection table. Translated connections of these
entries break, because their packets are no longer translated. Without --yes it only
counts the entries. At least one filter is needed.`,
		Example: "  sluice conns delete --src 10.0.0.7\n" +
			"  sluice conns delete --src 10.0.0.7 --yes",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := f.filter()
			if err != nil {
				return usageError(cmd, "%w", err)
			}
			if filter == (conntrack.Filter{}) {
				return usageError(cmd, "no filter given: that would cut every connection")
			}
			return deleteConns(cmd.Context(), a, f, &filter, yes)
		},
	}
	f.filterFlags(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "remove them")
	return cmd
}

func deleteConns(ctx context.Context, a *app, f *connsFlags, filter *conntrack.Filter, yes bool) error {
	type result struct {
		Namespace string `json:"namespace"`
		Entries   int    `json:"entries"`
		Deleted   bool   `json:"deleted"`
	}
	results := []result{}
	err := f.forEachNamespace(a, func(ns netdev.Namespace) (err error) {
		r := result{Namespace: ns.Name, Deleted: yes}
		if r.Entries, err = conntrack.CountIn(ctx, ns, filter, yes); err != nil {
			return fmt.Errorf("namespace %s: %w", ns.Name, err)
		}
		if r.Entries > 0 {
			results = append(results, r)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.print(results, func(w io.Writer) error {
		verb := "would go; add --yes to remove them"
		if yes {
			verb = "removed"
		}
		t := table.New("NAMESPACE", ">ENTRIES", "")
		for _, r := range results {
			t.Row(r.Namespace, r.Entries, verb)
		}
		if t.Len() == 0 {
			_, err := fmt.Fprintln(w, "no connection matches")
			return err
		}
		return t.Write(w)
	})
}
