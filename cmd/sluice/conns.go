// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
)

// connsKeys are the values of --by.
var connsKeys = []string{"state", "source", "destination", "service", "backend", "snat-port", "netns", "age"}

// connsFlags are the flags of 'sluice conns'.
type connsFlags struct {
	by                        string
	top                       int
	window                    time.Duration
	netns                     []string
	list, check               bool
	pool                      uint32
	proto, state              string
	src, dst, natSrc, backend string
	sport, port               string
	mark                      string
	zone                      int
	four, six, translated     bool
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
	flags.StringVar(&f.by, "by", "", "group by "+strings.Join(connsKeys, ", ")+" (default: an overview)")
	flags.IntVar(&f.top, "top", 10, "rows of each ranking; 0 for all")
	flags.DurationVar(&f.window, "window", time.Second, "time between the two readings that growth and drops are computed from")
	flags.BoolVar(&f.list, "list", false, "print every connection instead of sums, as it is read")
	flags.BoolVar(&f.check, "check", false, "exit with 1 when 75 % of a table is held, with 2 when 90 % is, or when it dropped packets in the window")
	flags.Uint32Var(&f.pool, "pool", capacity.MasqueradePorts, "ports that SNAT may use on one address")
	for _, sums := range []string{"by", "top", "window", "check", "pool"} {
		cmd.MarkFlagsMutuallyExclusive("list", sums)
	}
	f.filterFlags(cmd)
	offer(cmd, "by", connsKeys...)
	cmd.AddCommand(newConnsDelete(a))
	return cmd
}

func (f *connsFlags) filterFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.netns, "netns", nil, "network namespaces: names, paths, 'host' or 'all' (default all)")
	flags.StringVar(&f.proto, "proto", "", "protocol: tcp, udp, icmp, ... or a number")
	flags.StringVar(&f.state, "state", "", "state: TIME_WAIT, SYN_SENT, ..., UNREPLIED, REPLIED, ASSURED")
	flags.StringVar(&f.src, "src", "", "the initiator's address or prefix")
	flags.StringVar(&f.dst, "dst", "", "address or prefix that the initiator sends to")
	flags.StringVar(&f.natSrc, "nat-src", "", "address or prefix that the responder sees (SNAT)")
	flags.StringVar(&f.backend, "nat-dst", "", "address or prefix where the packets go (DNAT)")
	flags.StringVar(&f.sport, "sport", "", "the initiator's port or range")
	flags.StringVar(&f.port, "port", "", "destination port or range")
	flags.StringVar(&f.mark, "mark", "", "connection mark, or mark/mask")
	flags.IntVar(&f.zone, "zone", -1, "conntrack zone")
	flags.BoolVarP(&f.four, "ipv4", "4", false, "IPv4 only")
	flags.BoolVarP(&f.six, "ipv6", "6", false, "IPv6 only")
	flags.BoolVar(&f.translated, "nat", false, "translated connections only")
	cmd.MarkFlagsMutuallyExclusive("ipv4", "ipv6")
	offer(cmd, "proto", protocolWords...)
	offer(cmd, "state", stateWords...)
	offerFrom(cmd, "netns", namespaces)
}

// filter turns the flags into a conntrack filter.
func (f *connsFlags) filter() (conntrack.Filter, error) {
	out := conntrack.Filter{State: f.state, Translated: f.translated}
	var errs []error
	note := func(flag string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", flag, err))
		}
	}
	if f.proto != "" {
		p, err := flow.ParseProtocol(f.proto)
		out.Protocol = p
		note("proto", err)
	}
	for _, p := range []struct {
		flag, text string
		to         *netip.Prefix
	}{{"src", f.src, &out.Source}, {"dst", f.dst, &out.Dest}, {"nat-src", f.natSrc, &out.TranslatedSource}, {"nat-dst", f.backend, &out.TranslatedDest}} {
		if p.text != "" {
			v, err := parsePrefix(p.text)
			*p.to = v
			note(p.flag, err)
		}
	}
	for _, p := range []struct {
		flag, text string
		to         *flow.Ports
	}{{"sport", f.sport, &out.SourcePort}, {"port", f.port, &out.DestPort}} {
		if p.text != "" {
			v, err := flow.ParsePorts(p.text)
			*p.to = v
			note(p.flag, err)
		}
	}
	if f.mark != "" {
		note("mark", parseMark(f.mark, &out.Mark, &out.MarkMask))
	}
	note("state", conntrack.CheckState(f.state))
	if f.zone >= 0 {
		out.Zone, out.HasZone = uint16(f.zone), true
	}
	if f.zone > math.MaxUint16 || f.zone < -1 {
		note("zone", fmt.Errorf("%d: not a number from 0 to 65535", f.zone))
	}
	switch {
	case f.four:
		out.Family = unix.AF_INET
	case f.six:
		out.Family = unix.AF_INET6
	}
	return out, errors.Join(errs...)
}

// parsePrefix reads a prefix or a single address.
func parsePrefix(s string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("%q: neither an address nor a prefix such as 192.0.2.0/24", s)
	}
	return p.Masked(), nil
}

func parseMark(s string, mark, mask *uint32) error {
	m, k, masked := strings.Cut(s, "/")
	v, err := strconv.ParseUint(m, 0, 32)
	if err != nil {
		return fmt.Errorf("%q: not a number", m)
	}
	*mark, *mask = uint32(v), 0xffffffff
	if masked {
		if v, err = strconv.ParseUint(k, 0, 32); err != nil {
			return fmt.Errorf("mask %q: not a number", k)
		}
		if v == 0 {
			return fmt.Errorf("%q: every mark fits mask 0", s)
		}
		*mask = uint32(v)
	}
	return nil
}

// chosenNamespaces resolves names or paths to namespaces, without duplicates.
func chosenNamespaces(names []string) (list []netdev.Namespace, err error) {
	for _, name := range names {
		ns, err := netdev.NamespaceAt(name)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(list, func(other netdev.Namespace) bool { return other.Inode == ns.Inode }) {
			list = append(list, ns)
		}
	}
	return list, nil
}

// namespaces resolves --netns; nil means all.
func (f *connsFlags) namespaces() ([]netdev.Namespace, error) {
	if slices.Contains(f.netns, "all") {
		return nil, nil
	}
	return chosenNamespaces(f.netns)
}

// each runs fn in the selected namespaces. If all are selected, inaccessible namespaces are
// reported, and namespaces that ended are skipped.
func (f *connsFlags) each(a *app, fn func(netdev.Namespace) error) error {
	list, err := f.namespaces()
	if err != nil {
		return err
	}
	all, hidden := list == nil, 0
	if all {
		list, hidden = netdev.Namespaces()
	}
	var failed []error
	for _, ns := range list {
		err := fn(ns)
		switch {
		case all && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist)):
			failed = append(failed, err)
		case err != nil:
			return err
		}
	}
	if len(failed) > 0 && len(failed) == len(list) {
		return failed[0]
	}
	for _, text := range conntrack.Unseen(hidden, failed) {
		a.progress("not seen: %s", text)
	}
	return nil
}

func (f *connsFlags) run(cmd *cobra.Command, a *app) error {
	if f.by != "" && !slices.Contains(connsKeys, f.by) {
		return usageError(cmd, "--by %s: not one of %s", f.by, strings.Join(connsKeys, ", "))
	}
	switch {
	case f.top < 0:
		return usageError(cmd, "--top %d: must not be negative", f.top)
	case f.window < 0:
		return usageError(cmd, "--window %s: must not be negative", f.window)
	case f.pool == 0:
		return usageError(cmd, "--pool 0: at least 1")
	}
	filter, err := f.filter()
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	if f.list {
		return listConns(cmd.Context(), a, f, &filter)
	}
	namespaces, err := f.namespaces()
	if err != nil {
		return err
	}
	ask := conntrack.Ask{Namespaces: namespaces, Dimensions: f.dimensions(), Filter: &filter, Window: f.window}
	if namespaces == nil {
		ask.Sources = a.flowSources()
	}
	s, err := conntrack.Look(cmd.Context(), ask)
	if err != nil {
		return err
	}
	r := newConnsReport(s, f)
	if err := a.print(r, r.write); err != nil {
		return err
	}
	if code := r.verdict(); f.check && code != exitOK {
		return exitError{code: code}
	}
	return nil
}

func (f *connsFlags) dimensions() conntrack.Dimension {
	switch f.by {
	case "source":
		return conntrack.BySource
	case "destination":
		return conntrack.ByDest
	case "service":
		return conntrack.ByService
	case "backend":
		return conntrack.ByBackend
	case "snat-port":
		return conntrack.BySNATPort
	case "":
		return conntrack.BySource | conntrack.ByService | conntrack.BySNATPort
	}
	return 0
}

// listedConn is one line of 'sluice conns --list --json'. Source and Destination are the endpoints
// in packets of the initiator; ReplySource and ReplyDestination the endpoints in packets of the
// responder before translation.
type listedConn struct {
	Namespace        string         `json:"namespace"`
	Protocol         flow.Protocol  `json:"protocol"`
	Source           netip.AddrPort `json:"source"`
	Destination      netip.AddrPort `json:"destination"`
	ReplySource      netip.AddrPort `json:"reply_source"`
	ReplyDestination netip.AddrPort `json:"reply_destination"`
	State            string         `json:"state"`
	Assured          bool           `json:"assured"`
	Offloaded        bool           `json:"offloaded,omitempty"`
	Timeout          float64        `json:"timeout_seconds"`
	Mark             uint32         `json:"mark,omitempty"`
	Zone             uint16         `json:"zone,omitempty"`
	Packets          *[2]uint64     `json:"packets,omitempty"` // original, reply
	Bytes            *[2]uint64     `json:"bytes,omitempty"`
}

func newListedConn(namespace string, e *conntrack.Entry) listedConn {
	f := e.Flow()
	l := listedConn{Namespace: namespace, Protocol: f.Original.Protocol, Source: f.Original.Source, Destination: f.Original.Dest,
		ReplySource: f.Reply.Source, ReplyDestination: f.Reply.Dest, State: e.StateName(), Assured: f.Assured, Offloaded: f.Offloaded,
		Timeout: f.Timeout.Seconds(), Mark: f.Mark, Zone: f.Zone}
	if f.Counted {
		l.Packets, l.Bytes = &f.Packets, &f.Bytes
	}
	return l
}

// listConns prints connections while it reads them, one line or one JSON object each: from the
// kernel's tables and, if all are selected, from the eBPF datapath.
func listConns(ctx context.Context, a *app, f *connsFlags, filter *conntrack.Filter) error {
	out := bufio.NewWriterSize(a.stdout, 64<<10)
	show := func(where string) func(*conntrack.Entry) error {
		return func(e *conntrack.Entry) error {
			if a.json {
				return writeJSONLine(out, newListedConn(where, e))
			}
			return writeConn(out, where, e)
		}
	}
	err := f.each(a, func(ns netdev.Namespace) error {
		c, err := conntrack.OpenIn(ns)
		if err != nil {
			return err
		}
		defer c.Close()
		if err = c.Dump(ctx, filter, show(ns.Name)); errors.Is(err, conntrack.ErrInterrupted) {
			return nil
		}
		return err
	})
	if namespaces, _ := f.namespaces(); err == nil && namespaces == nil {
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
	err := f.each(a, func(ns netdev.Namespace) (err error) {
		r := result{Namespace: ns.Name, Deleted: yes}
		if r.Entries, err = deleteIn(ctx, ns, filter, yes); err != nil {
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

func deleteIn(ctx context.Context, ns netdev.Namespace, f *conntrack.Filter, yes bool) (n int, err error) {
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if yes {
		return c.DeleteAll(ctx, f)
	}
	err = c.Dump(ctx, f, func(*conntrack.Entry) error { n++; return nil })
	return n, err
}
