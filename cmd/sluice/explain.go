// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/table"
)

func newExplain(a *app) *cobra.Command {
	var in string
	var bytes int
	var host bool
	cmd := &cobra.Command{
		Use:     "explain PROTO SRC[:PORT] DST[:PORT]",
		GroupID: "gateway",
		Short:   "Say what the gateway would do with a packet, without sending it",
		Long: `Say what the gateway would do with a packet that arrives: the service or rule, the
backend, the packet as it leaves, the next hop or uplink, and why. Nothing is sent.

The eBPF datapath runs the packet through its program, which changes nothing. For
the nftables datapath the packet is replayed in a network namespace of its own,
with the host's interfaces, addresses, routes and the rules in force: the answer
names every rule that the packet met. If the kernel already tracks the
connection, the replay has that entry too. If both datapaths carry something, the
packet meets eBPF first.

With --host all rules of this network namespace are replayed instead, of nftables,
iptables-nft and iptables-legacy, of all programs. This needs root and no daemon.
Explain does it by itself when no daemon answers (as root, without --socket).

PROTO is a name or a number. Protocols without ports (esp, gre, 41) take addresses
only. icmp and icmpv6 mean a ping; the port of the source is its identifier.`,
		Example: "  sluice explain tcp 198.51.100.7:40000 192.0.2.10:80\n  sluice explain udp [2001:db8::7]:5353 [2001:db8::20]:53 --in wan0\n  sluice explain esp 10.0.2.2 198.51.100.7",
		Args:    requireArgs("protocol", "source", "destination"),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return protocolWords, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			protocol, err := flow.ParseProtocol(args[0])
			if err != nil {
				return usageError(cmd, "%w", err)
			}
			var ends [2]netip.AddrPort
			for i, end := range []string{"source", "destination"} {
				if ends[i], err = protocol.ParseEnd(args[1+i]); err != nil {
					return usageError(cmd, "%s %w", end, err)
				}
			}
			question := datapath.Question{Tuple: flow.Tuple{Protocol: protocol, Source: ends[0], Dest: ends[1]}, Interface: in, Size: bytes}
			query := url.Values{"protocol": {args[0]}, "source": {args[1]}, "destination": {args[2]}, "interface": {in}, "size": {fmt.Sprint(bytes)}}
			if host {
				return explainHost(cmd.Context(), a, question, query)
			}
			fetch := func(c *api.Client, ctx context.Context) (*datapath.Explanation, error) { return c.Explain(ctx, query) }
			err = fetchAndPrint(cmd.Context(), a, fetch, func(w io.Writer, x *datapath.Explanation) error {
				if err := writeExplanation(w, x); err != nil {
					return err
				}
				_, err := table.Line(w, "%-10s Sluice's own rules; --host traces all rules of the host", "knows")
				return err
			})
			if errors.Is(err, api.ErrNoDaemon) && os.Geteuid() == 0 && a.paths.Socket == "" && a.remote.Server == "" {
				a.progress("no daemon runs: tracing the host's own rules")
				return explainHost(cmd.Context(), a, question, nil)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&in, "in", "", "interface that the packet arrives on (default the one by which its source would be answered)")
	offerFrom(cmd, "in", interfaces)
	cmd.Flags().BoolVar(&host, "host", false, "trace the packet through all rules of this network namespace; needs no daemon")
	cmd.Flags().IntVar(&bytes, "size", 60, "bytes of the network packet")
	return cmd
}

// explainHost replays the packet with the rules of this network namespace. A running daemon first
// reports whether its eBPF programs handle the packet before any rule.
func explainHost(ctx context.Context, a *app, q datapath.Question, query url.Values) error {
	if os.Geteuid() != 0 {
		return daemon.ErrNoRoot
	}
	x, err := nft.ExplainHost(ctx, q)
	if err != nil {
		return err
	}
	if first := askDaemon(ctx, a, query); first != nil && first.Datapath == "ebpf" && first.Action != "pass" {
		x.Notes = append(x.Notes, fmt.Sprintf("the packet does not meet these rules: Sluice's eBPF program on %s takes it first (%s: %s); 'sluice explain' without --host says more", first.Interface, first.Action, first.Reason))
	}
	return a.print(x, func(w io.Writer) error { return writeExplanation(w, x) })
}

// askDaemon returns the daemon's explanation of a packet, or nil without a daemon.
func askDaemon(ctx context.Context, a *app, query url.Values) *datapath.Explanation {
	if query == nil {
		return nil
	}
	c, err := a.client()
	if err != nil {
		return nil
	}
	x, err := c.Explain(ctx, query)
	if err != nil {
		return nil
	}
	return x
}

func writeExplanation(w io.Writer, x *datapath.Explanation) error {
	line := func(label string, value any) { table.Line(w, "%-10s %v", label, value) }
	line("verdict", x.Action+": "+x.Reason)
	line("datapath", x.Datapath+" on "+x.Interface)
	if len(x.Path) > 1 {
		line("met first", x.Path[0]+", which left it to "+x.Path[1])
	}
	if x.Owner != "" {
		line("owner", x.Owner)
	}
	if x.Backend != "" {
		line("backend", x.Backend)
	}
	line("before", x.Before)
	if x.After != x.Before {
		line("after", x.After)
	}
	if x.Out != "" {
		way := x.Out
		if x.NextHop.IsValid() {
			way += " to " + x.NextHop.String()
		}
		line("leaves by", way)
	}
	if x.Uplink != "" {
		line("uplink", x.Uplink+": "+x.UplinkWhy)
	}
	if x.Existing {
		line("flow", "an existing flow decided")
	}
	for _, r := range x.Rules {
		line("rule", fmt.Sprintf("%s: %s (%s)", r.Chain, r.Rule, r.Verdict))
	}
	for _, s := range x.Steps {
		line("step", s)
	}
	for _, n := range x.Notes {
		line("note", n)
	}
	return nil
}
