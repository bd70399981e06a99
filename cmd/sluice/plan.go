// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/table"
)

// planFlags are the flags of 'sluice plan'.
type planFlags struct {
	file              string
	classes, requests []string
	load              capacity.Load
	reverse           bool
	habits            capacity.Habits
	output            string
}

func newPlan(a *app) *cobra.Command {
	f := &planFlags{}
	cmd := &cobra.Command{
		Use:     "plan",
		GroupID: "diagnosis",
		Short:   "Plan a gateway for a load, or compute what load a host can carry",
		Long: `Computes what a load needs: tracked connections, hash buckets and bytes, ports and
public addresses, port blocks, cores for the packets, bandwidth of each client;
and with --reverse what a host of that memory and those cores can carry.

The load comes from flags or from a YAML file:

  classes:
    - {name: browsing, clients: 170, connections: 20}
    - {name: file sharing, clients: 30, connections: 400}
  requests:
    - {name: api, rate: 800, lifetime: 2s}
  bandwidth: 90Mbit
  public-addresses: 1
  subscribers: 200
  host: {memory: 512MiB, cores: 1}`,
		Example: `  sluice plan --class 170x20 --class 30x400 --bandwidth 90Mbit
  sluice plan --requests 800/s:2s --memory 4GiB --cores 2 --output sysctl
  sluice plan --for load.yaml --json
  sluice plan --reverse --memory 4GiB --cores 4 --connections 100`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, a) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.file, "for", "", "read the load from this YAML file ('-': standard input); flags add to it")
	flags.StringArrayVar(&f.classes, "class", nil, "clients x connections of each, optionally named: 30x400 or sharing=30x400")
	flags.StringArrayVar(&f.requests, "requests", nil, "new connections: RATE/s[:LIFETIME[:LINGER]], udp in front for UDP: 800/s:2s, udp:2000/s")
	flags.Float64Var(&f.load.Headroom, "headroom", 0, "factor on the entries (default 2)")
	flags.Var(&f.load.Bandwidth, "bandwidth", "of the line, in one direction: 100Mbit, 10Gbit")
	flags.IntVar(&f.load.Frame, "frame", 0, "mean length of frames in bytes (default 512)")
	flags.IntVar(&f.load.Rules, "rules", 0, "rules that each packet is compared with")
	flags.Uint64Var(&f.load.BusiestDestination, "busiest-destination", 0, "connections to the busiest address and port (default all)")
	flags.BoolVar(&f.load.EndpointIndependent, "endpoint-independent", false, "a mapping keeps its port for every destination (RFC 4787)")
	flags.Uint64Var(&f.load.PublicAddresses, "public-addresses", 0, "public addresses that exist")
	flags.Uint64Var(&f.load.Subscribers, "subscribers", 0, "subscribers that get a port block each")
	flags.Uint64Var(&f.load.Mappings, "mappings", 0, "mappings that 99 in 100 subscribers never exceed (default from the classes)")
	flags.BoolVar(&f.load.Helper, "helper", false, "a helper such as FTP watches the connections")
	flags.Var(&f.load.Host.Memory, "memory", "of the host: 512MiB, 4GiB")
	flags.IntVar(&f.load.Host.Cores, "cores", 0, "of the host")
	flags.BoolVar(&f.reverse, "reverse", false, "compute what load the host can carry")
	flags.Uint64Var(&f.habits.Connections, "connections", 0, "connections of each client, for --reverse")
	flags.DurationVar(&f.habits.Lifetime, "lifetime", 0, "of a connection, for --reverse")
	flags.DurationVar(&f.habits.Linger, "linger", 0, "of the entry after the last packet, for --reverse (default 2m)")
	flags.StringVar(&f.output, "output", "table", "table, sysctl (lines for /etc/sysctl.d) or sluice (part of a configuration)")
	completeFlag(cmd, "output", "table", "sysctl", "sluice")
	_ = cmd.MarkFlagFilename("for", "yaml", "yml")
	return cmd
}

func (f *planFlags) run(cmd *cobra.Command, a *app) error {
	if f.reverse {
		return f.runPlan(cmd, a)
	}
	if a.json && f.output != "table" {
		return usageError(cmd, "--output %s: --json has it in the document's sysctls and sluice", f.output)
	}
	load, err := f.readLoad(cmd, a)
	if err != nil {
		return err
	}
	p, err := capacity.For(load)
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	switch f.output {
	case "sysctl":
		_, err = io.WriteString(a.stdout, p.SysctlFile())
		return err
	case "sluice":
		_, err = io.WriteString(a.stdout, p.Fragment())
		return err
	case "table":
		return a.print(planReport{p, p.Settings(), p.Fragment()}, func(w io.Writer) error { return writePlan(w, &p) })
	}
	return usageError(cmd, "--output %s: not table, sysctl or sluice", f.output)
}

// planReport is the JSON form of a plan, including the resulting configuration.
type planReport struct {
	capacity.Plan
	Sysctls  []capacity.Setting `json:"sysctls"`
	Fragment string             `json:"sluice"`
}

// readLoad joins the file, if there is one, with the flags.
func (f *planFlags) readLoad(cmd *cobra.Command, a *app) (capacity.Load, error) {
	load := f.load
	if f.file != "" {
		fromFile, err := readLoadFile(f.file, a.stdin)
		if err != nil {
			return load, err
		}
		load = overlay(fromFile, f.load, func(flag string) bool { return cmd.Flags().Changed(flag) })
	}
	var errs []error
	for i, text := range f.classes {
		c, err := capacity.ParseClass(text, i)
		if err != nil {
			errs = append(errs, fmt.Errorf("--class %w", err))
		}
		load.Classes = append(load.Classes, c)
	}
	for _, text := range f.requests {
		r, err := capacity.ParseRequests(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("--requests %w", err))
		}
		load.Requests = append(load.Requests, r)
	}
	if err := errors.Join(errs...); err != nil {
		return load, usageError(cmd, "%w", err)
	}
	return load, nil
}

// readLoadFile reads a load from a YAML file; "-" is standard input.
func readLoadFile(path string, stdin io.Reader) (load capacity.Load, err error) {
	var text []byte
	if path == "-" {
		text, err = io.ReadAll(stdin)
	} else {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return load, fmt.Errorf("load: %w", err)
	}
	if load, err = capacity.DecodeLoad(text); err != nil {
		return load, fmt.Errorf("load %s: %w", path, err)
	}
	return load, nil
}

// overlay replaces values of file by the flags that are set.
func overlay(file, flags capacity.Load, given func(string) bool) capacity.Load {
	for name, set := range map[string]func(){
		"headroom":             func() { file.Headroom = flags.Headroom },
		"bandwidth":            func() { file.Bandwidth = flags.Bandwidth },
		"frame":                func() { file.Frame = flags.Frame },
		"rules":                func() { file.Rules = flags.Rules },
		"busiest-destination":  func() { file.BusiestDestination = flags.BusiestDestination },
		"endpoint-independent": func() { file.EndpointIndependent = flags.EndpointIndependent },
		"public-addresses":     func() { file.PublicAddresses = flags.PublicAddresses },
		"subscribers":          func() { file.Subscribers = flags.Subscribers },
		"mappings":             func() { file.Mappings = flags.Mappings },
		"helper":               func() { file.Helper = flags.Helper },
		"memory":               func() { file.Host.Memory = flags.Host.Memory },
		"cores":                func() { file.Host.Cores = flags.Host.Cores },
	} {
		if given(name) {
			set()
		}
	}
	return file
}

func writePlan(w io.Writer, p *capacity.Plan) error {
	t := table.New("NEEDED", ">VALUE", "BECAUSE")
	t.Width = reportWidth
	t.Row("connections at the peak", p.Peak, "clients x each + rate x (life + linger)")
	t.Row("nf_conntrack_max", p.Entries, "peak with headroom, a power of two")
	t.Row("nf_conntrack_buckets", p.Buckets, "one for each entry: mean chain of two")
	t.Row("flows, eBPF", p.Flows, "the same, kept for Sluice's timeouts")
	t.Row("kernel memory", p.Memory, fmt.Sprintf("%d bytes an entry, 8 a bucket", p.EntryBytes))
	if p.RateCeiling > 0 {
		t.Row("new connections/s", fmt.Sprintf("%.0f", capacity.RateFill*p.RateCeiling), fmt.Sprintf("half of the ceiling of %.0f", p.RateCeiling))
	}
	t.Row("ports of a protocol", p.Ports, portsBecause(p))
	t.Row("public addresses", p.PublicAddresses, fmt.Sprintf("80 %% of %d ports of a protocol each", capacity.MasqueradePorts))
	if p.Load.PublicAddresses > 0 {
		t.Row("refused connections", percent(p.Refused), fmt.Sprintf("%s of the ports of %d addresses taken", percent(p.Occupancy), p.Load.PublicAddresses))
	}
	if p.PortBlock > 0 {
		t.Row("port block", p.PortBlock, "99 in 100 subscribers, and 30 %")
		t.Row("subscribers/address", p.PerAddress, fmt.Sprintf("%d addresses for %d", p.BlockAddresses, p.Load.Subscribers))
	}
	if p.PacketRate > 0 {
		if p.ClientBandwidth > 0 {
			t.Row("each client", p.ClientBandwidth.String()+"/s", "of "+p.Load.Bandwidth.String()+" when all are active")
		}
		t.Row("packets/s", p.PacketRate, "the line full of frames of the mean length")
		t.Row("cores, nftables", p.CoresNftables, fmt.Sprintf("%v a packet and %d rules", capacity.CostNftables, p.Load.Rules))
		t.Row("cores, eBPF", p.CoresEBPF, fmt.Sprintf("%v a packet", capacity.CostEBPF))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "\nnote: %s", wrap(n, reportWidth-6, "\n      "))
	}
	if len(p.Notes) > 0 {
		fmt.Fprintln(w)
	}
	_, err := fmt.Fprintf(w, "\n%s\n%s", p.SysctlFile(), p.Fragment())
	return err
}

func portsBecause(p *capacity.Plan) string {
	switch {
	case p.Load.EndpointIndependent:
		return "a mapping each, as long as it is kept"
	case p.Load.BusiestDestination > 0:
		return "to the busiest destination"
	}
	return "if all go to one destination"
}

func (f *planFlags) runPlan(cmd *cobra.Command, a *app) error {
	h := f.load.Host
	if h.Memory == 0 || h.Cores == 0 {
		return usageError(cmd, "--reverse: give the host's --memory and --cores")
	}
	t := f.habits
	t.Frame, t.Rules, t.Bandwidth, t.PublicAddresses = f.load.Frame, f.load.Rules, f.load.Bandwidth, f.load.PublicAddresses
	if err := t.Validate(h); err != nil {
		return usageError(cmd, "--reverse: %w", err)
	}
	c := capacity.Capacity(h, t)
	return a.print(c, func(w io.Writer) error {
		t := table.New("CARRIES", ">VALUE", "BECAUSE")
		t.Width = reportWidth
		t.Row("tracked connections", c.Entries, "a tenth of the memory: "+c.Memory.String())
		t.Row("new connections/s", fmt.Sprintf("%.0f", c.Connects), "half of entries / (lifetime + linger)")
		if c.Clients > 0 {
			t.Row("clients", c.Clients, fmt.Sprintf("with %d connections, half of the table", f.habits.Connections))
		}
		t.Row("to one destination", c.OneService, "80 % of the ports of the public addresses")
		t.Row("packets/s, nftables", c.PPSNft, c.BitsNft.String())
		t.Row("packets/s, eBPF", c.PPSEBPF, c.BitsEBPF.String())
		t.Row("kernel's default limit", c.Default, "what Linux sets for this memory by itself")
		t.Row("old guides' limit", c.OldRule, "one entry for 16 KiB of memory")
		return t.Write(w)
	})
}
