// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/table"
)

func newShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "show",
		GroupID: "gateway",
		Short:   "Show what is in force: services, backends, NAT rules, flows",
		Long:    "Show the running gateway. Without an argument it prints an overview.",
		Example: "  sluice show\n  sluice show backends\n  sluice show flows --owner web --state ESTABLISHED",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fetchAndPrint(cmd.Context(), a, (*api.Client).Status, a.writeStatus)
		},
	}
	sub := func(use, short string, run func(context.Context) error) {
		cmd.AddCommand(&cobra.Command{Use: use, Short: short, Example: "  sluice show " + use, Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context()) }})
	}
	sub("services", "Services, their datapath and counters", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Services, writeServices)
	})
	sub("backends", "Backends, their state and why", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Backends, a.writeBackends)
	})
	sub("nat", "NAT rules, their datapath and counters", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).NAT, writeNAT)
	})
	sub("interfaces", "Interfaces, and the hooks of the eBPF datapath there", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Interfaces, writeInterfaces)
	})
	sub("addresses", "Addresses of services and pools, and which host answers for them", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Addresses, writeAddresses)
	})
	sub("uplinks", "Uplinks, their state and why", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Uplinks, a.writeUplinks)
	})
	sub("announcements", "Addresses that are announced to routers, or withdrawn, and why", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Announcements, a.writeAnnouncements)
	})
	sub("nodes", "Gateways of the cluster, and the pool addresses of each", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Nodes, writeNodes)
	})
	sub("mappings", "Outside ports that inside hosts have asked for by PCP", func(ctx context.Context) error {
		return fetchAndPrint(ctx, a, (*api.Client).Mappings, writeMappings)
	})
	cmd.AddCommand(newShowFlows(a), newShowAccelerated(a))
	return cmd
}

// fetchAndPrint fetches a value from the daemon and prints it.
func fetchAndPrint[T any](ctx context.Context, a *app, fetch func(*api.Client, context.Context) (T, error), text func(io.Writer, T) error) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	v, err := fetch(c, ctx)
	if err != nil {
		return err
	}
	return a.print(v, func(w io.Writer) error { return text(w, v) })
}

func newShowFlows(a *app) *cobra.Command {
	keys := []struct{ flag, usage string }{
		{"protocol", "tcp, udp, ..."}, {"client", "address or prefix of the client"}, {"destination", "address or prefix that the client asked for"},
		{"port", "port that the client asked for"}, {"owner", "service or NAT rule"}, {"backend", "backend's name"},
		{"state", "as in ESTABLISHED"}, {"datapath", "nftables, ebpf, or kernel: tracked for no service or rule"}, {"limit", "list at most so many (default 1000)"},
	}
	values := make([]string, len(keys))
	cmd := &cobra.Command{
		Use:     "flows",
		Short:   "Tracked connections of both datapaths",
		Example: "  sluice show flows --client 198.51.100.0/24 --port 443 --limit 20",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			query := url.Values{}
			for i, k := range keys {
				if values[i] != "" {
					query.Set(k.flag, values[i])
				}
			}
			fetch := func(c *api.Client, ctx context.Context) (*api.Flows, error) { return c.Flows(ctx, query) }
			return fetchAndPrint(cmd.Context(), a, fetch, writeFlows)
		},
	}
	for i, k := range keys {
		cmd.Flags().StringVar(&values[i], k.flag, "", k.usage)
	}
	completeFlag(cmd, "protocol", protocolWords...)
	completeFlag(cmd, "state", stateWords...)
	completeFlag(cmd, "datapath", "nftables", "ebpf", "kernel")
	offerFrom(cmd, "owner", a.owners)
	offerFrom(cmd, "backend", a.backends)
	return cmd
}

func (a *app) writeStatus(w io.Writer, s *api.Status) error {
	table.Line(w, "sluice %s, process %d, up %s", s.Version, s.PID, time.Duration(s.Uptime*float64(time.Second)).Round(time.Second))
	table.Line(w, "configuration %s, revision %d, applied %s", s.File, s.Revision, s.AppliedAt.Local().Format(time.DateTime))
	table.Line(w, "datapaths %s", strings.Join(s.Datapaths, ", "))
	table.Line(w, "%s, %d of %s up, %s", plural(s.Services, "service"), s.BackendsUp, plural(s.Backends, "backend"), plural(s.NATRules, "NAT rule"))
	if s.Drain != nil {
		table.Line(w, "the gateway drains: %s", drainText(s.Drain))
	}
	if s.NodeDrains {
		table.Line(w, "the node drains: the addresses of its services are withdrawn; 'sluice node auto' announces them again")
	}
	if s.Error != "" {
		table.Line(w, "the last change was refused: %s", strings.ReplaceAll(s.Error, "\n", "; "))
	}
	for _, warning := range s.Warnings {
		table.Line(w, "warning: %s", warning)
	}
	if len(s.Uplinks) == 0 {
		return nil
	}
	return a.writeUplinks(w, s.Uplinks)
}

func writeServices(w io.Writer, services []api.Service) error {
	t := table.New("SERVICE", "LISTEN", "MODE", "DATAPATH", ">UP", ">NEW", ">ACTIVE", ">REFUSED", ">BYTES")
	for _, s := range services {
		up := 0
		for _, b := range s.Backends {
			if b.State == "up" {
				up++
			}
		}
		t.Row(s.Name, s.Protocol+" "+strings.Join(s.Listen, " "), s.Mode, s.Datapath, fmt.Sprintf("%d/%d", up, len(s.Backends)), s.Connections, countOrUnknown(s.Active), s.Refused, size(s.Bytes))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, s := range services {
		for _, name := range slices.Sorted(maps.Keys(s.Why)) {
			table.Line(w, "%s is not on %s: %s", s.Name, name, s.Why[name])
		}
	}
	return nil
}

func (a *app) writeBackends(w io.Writer, backends []api.Backend) error {
	color := map[string]string{"up": green, "drain": yellow, "down": red}
	t := table.New("SERVICE", "BACKEND", "ADDRESS", ">WEIGHT", "STATE", "USED", ">NEW", ">ACTIVE", "WHY")
	for _, b := range backends {
		used := "no"
		if b.InUse {
			used = "yes"
		}
		t.Row(b.Service, b.Name, endpoint(b), fmt.Sprintf("%d (%d)", b.Weight, b.Priority), table.Styled(a.colour(w, color[b.State], table.Escape(b.State))), used, b.Connections, countOrUnknown(b.Active), joinTexts(b.Why, leftText(b.Drain)))
	}
	return t.Write(w)
}

func endpoint(b api.Backend) string {
	if b.Address.Port() == 0 {
		return b.Address.Addr().String()
	}
	return b.Address.String()
}

func writeNAT(w io.Writer, rules []api.NATRule) error {
	t := table.New("RULE", "TYPE", "TRANSLATES", "DATAPATH", ">PACKETS", ">BYTES")
	for _, r := range rules {
		t.Row(r.Name, r.Type, r.Summary, r.Datapath, r.Packets, size(r.Bytes))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, r := range rules {
		for _, name := range slices.Sorted(maps.Keys(r.Why)) {
			table.Line(w, "%s is not on %s: %s", r.Name, name, r.Why[name])
		}
	}
	return nil
}

func writeInterfaces(w io.Writer, interfaces []api.Interface) error {
	if len(interfaces) == 0 {
		fmt.Fprintln(w, "the eBPF datapath carries nothing: it is attached nowhere")
		return nil
	}
	t := table.New("INTERFACE", "KIND", "HOOKS")
	for _, i := range interfaces {
		t.Row(i.Name, i.Kind, cmp.Or(strings.Join(i.Hooks, ", "), "-"))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, i := range interfaces {
		if i.Why != "" {
			table.Line(w, "%s: %s", i.Name, i.Why)
		}
	}
	return nil
}

func writeAddresses(w io.Writer, addresses []api.Address) error {
	t := table.New("ADDRESS", "OF", "STATE", "INTERFACE")
	for _, a := range addresses {
		t.Row(a.Address, strings.Join(a.Owners, ", "), a.State, cmp.Or(a.Interface, "-"))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, a := range addresses {
		if a.Why != "" {
			table.Line(w, "%s: %s", a.Address, a.Why)
		}
	}
	return nil
}

func (a *app) writeUplinks(w io.Writer, uplinks []api.Uplink) error {
	if len(uplinks) == 0 {
		fmt.Fprintln(w, "the configuration has no uplinks: the routing table decides")
		return nil
	}
	color := map[string]string{"carrying": green, "standby": yellow, "down": red}
	join := func(list []netip.Addr) string {
		words := make([]string, len(list))
		for i := range list {
			words[i] = list[i].String()
		}
		return cmp.Or(strings.Join(words, " "), "-")
	}
	t := table.New("UPLINK", "INTERFACE", "STATE", ">IPV4", ">IPV6", ">WEIGHT", "ADDRESS", "GATEWAY", ">TABLE")
	for _, u := range uplinks {
		t.Row(u.Name, u.Interface, table.Styled(a.colour(w, color[u.State], table.Escape(u.State))), percent(u.ShareIPv4), percent(u.ShareIPv6),
			fmt.Sprintf("%d (%d)", u.Weight, u.Priority), join(u.Addresses), join(u.Gateways), u.Table)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, u := range uplinks {
		if u.Why != "" {
			table.Line(w, "%s: %s", u.Name, u.Why)
		}
	}
	return nil
}

func (a *app) writeAnnouncements(w io.Writer, announcements []api.Announcement) error {
	if len(announcements) == 0 {
		fmt.Fprintln(w, "no address is announced: the configuration has no cluster.announce, or no addresses")
		return nil
	}
	color := map[string]string{"announced": green, "withdrawn": red}
	t := table.New("ADDRESS", "STATE", ">TABLE", ">METRIC", "OF")
	for _, n := range announcements {
		t.Row(n.Address, table.Styled(a.colour(w, color[n.State], table.Escape(n.State))), n.Table, n.Metric, strings.Join(n.Owners, ", "))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, n := range announcements {
		if n.Why != "" {
			table.Line(w, "%s: %s", n.Address, n.Why)
		}
	}
	return nil
}

func writeNodes(w io.Writer, nodes []api.Node) error {
	if len(nodes) == 0 {
		fmt.Fprintln(w, "a single gateway: the configuration has no cluster.nodes")
		return nil
	}
	if nodes[0].Shared != nil {
		if err := writeShared(w, nodes); err != nil {
			return err
		}
		if !slices.ContainsFunc(nodes, func(n api.Node) bool { return len(n.Pools) > 0 }) {
			return nil
		}
		fmt.Fprintln(w)
	}
	t := table.New("NODE", "STATE", "ADDRESS", "POOL", "ALLOCATES FROM", "BACKUP FOR")
	for _, n := range nodes {
		name := n.Name
		if n.This {
			name += " (this)"
		}
		state := cmp.Or(n.State, "-")
		if len(n.Pools) == 0 {
			t.Row(name, state, n.Address, "-", "-", "-")
		}
		for i, p := range n.Pools {
			address := n.Address
			if i > 0 {
				name, state, address = "", "", ""
			}
			t.Row(name, state, address, p.Owner, cmp.Or(strings.Join(p.Addresses, ", "), "-"), cmp.Or(strings.Join(p.Backup, ", "), "-"))
		}
	}
	return t.Write(w)
}

// writeShared prints the nodes according to the cluster's store.
func writeShared(w io.Writer, nodes []api.Node) error {
	t := table.New("NODE", "STATE", "ADDRESS", ">REVISION", "LAST SEEN", "VERSION")
	for _, n := range nodes {
		name, seen, revision := n.Name, "live", strconv.FormatInt(n.Shared.Revision, 10)
		if n.This {
			name += " (this)"
		}
		switch {
		case !n.Shared.Live && n.Shared.Since.IsZero():
			seen, revision = "not seen", "-"
		case !n.Shared.Live:
			seen = time.Since(n.Shared.Since).Round(time.Second).String() + " ago"
		case n.Shared.Revision == 0:
			revision = "its file"
		}
		t.Row(name, cmp.Or(n.State, "-"), n.Address, revision, seen, cmp.Or(n.Shared.Version, "-"))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, n := range nodes {
		if n.Shared.Error != "" {
			table.Line(w, "%s refuses revision %d: %s", n.Name, n.Shared.Refused, n.Shared.Error)
		}
	}
	return nil
}

func writeMappings(w io.Writer, mappings []api.Mapping) error {
	t := table.New("RULE", "PROTO", "INSIDE", "OUTSIDE", ">EXPIRES IN")
	for _, m := range mappings {
		t.Row(m.Rule, m.Protocol, m.Inside, m.Outside, time.Duration(m.Expires*float64(time.Second)).Round(time.Second))
	}
	return t.Write(w)
}

func writeFlows(w io.Writer, f *api.Flows) error {
	t := table.New("PROTO", "CLIENT", "ASKED FOR", "ANSWERED BY", "SEEN AS", "STATE", "OWNER", ">LEFT", ">PACKETS")
	for _, x := range f.Flows {
		left := time.Duration(x.Timeout * float64(time.Second)).Round(time.Second)
		t.Row(x.Protocol, x.Client, x.Dest, x.Replier, x.ReplyTo, x.State, x.Owner, left, x.Packets[0]+x.Packets[1])
	}
	if err := t.Write(w); err != nil {
		return err
	}
	table.Line(w, "%d of %d flows", len(f.Flows), f.Total)
	return nil
}

// countOrUnknown prints a count that may be unknown.
func countOrUnknown(n int) string {
	if n < 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// size prints bytes in binary units (IEC 80000-13).
func size(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	f, i := float64(n), 0
	for f >= 1024 && i < len(units)-1 {
		f /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}
