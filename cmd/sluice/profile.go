// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/table"
	"github.com/sluice-lb/sluice/trace"
)

// profileFlags are the flags of sluice profile.
type profileFlags struct {
	seconds     float64
	svg, folded string
	netns       string
}

func newProfile(a *app) *cobra.Command {
	var f profileFlags
	cmd := &cobra.Command{
		Use:     "profile",
		Short:   "Show where the network stack spends CPU time",
		GroupID: "diagnosis",
		Args:    noArgs,
		Long: "Profile samples every CPU about 1,000 times a second and sorts the samples by the phases of\n" +
			"the network stack: receive, conntrack lookup, NAT, rules, routing and so on, in percent of all\n" +
			"CPUs and in microseconds for each packet. It needs neither perf nor debug symbols.",
		Example: "  sluice profile --seconds 10\n" +
			"  sluice profile --svg flame.svg",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkSeconds(f.seconds); err != nil {
				return usageError(cmd, "%w", err)
			}
			if f.folded == "-" && a.json {
				return usageError(cmd, "--folded - and --json both write to standard output: give --folded a file")
			}
			return f.run(cmd.Context(), a)
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&f.seconds, "seconds", 5, "how long to watch; 0: until Ctrl-C")
	flags.StringVar(&f.svg, "svg", "", "write a flame graph to this file, one SVG for any browser")
	flags.StringVar(&f.folded, "folded", "", "write folded stacks to this file (- for standard output)")
	flags.StringVar(&f.netns, "netns", "all", "network namespace in which packets are counted: a name, host, or all")
	offerFrom(cmd, "netns", namespaces)
	return cmd
}

func (f *profileFlags) run(ctx context.Context, a *app) error {
	namespaces, _, err := chooseNamespaces(f.netns)
	if err != nil {
		return err
	}
	// Files are checked before the measurement, so that no result is lost.
	for _, path := range []string{f.svg, f.folded} {
		if path == "" || path == "-" {
			continue
		}
		if err := unix.Access(filepath.Dir(path), unix.W_OK); err != nil {
			return fmt.Errorf("profile: %s: %w", path, err)
		}
	}
	p, err := trace.ProfileWhile(ctx, namespaces, func() error {
		a.progress("sampling for %s", watchText(f.seconds))
		wait(ctx, f.seconds)
		return nil
	})
	if err != nil {
		return err
	}
	if f.svg != "" {
		if err := writeFile(f.svg, p.WriteFlameGraph); err != nil {
			return err
		}
	}
	switch f.folded {
	case "":
	case "-":
		_, err := io.WriteString(a.stdout, p.Folded())
		return err
	default:
		if err := os.WriteFile(f.folded, []byte(p.Folded()), 0o644); err != nil {
			return err
		}
	}
	return a.print(p, func(w io.Writer) error { return printProfile(w, p) })
}

// writeFile creates a file and fills it.
func writeFile(path string, fill func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(fill(file), file.Close())
}

func printProfile(w io.Writer, p *trace.Profile) error {
	fmt.Fprintf(w, "%s\n\n", wrap(fmt.Sprintf("%d samples in %.1f s on %d CPUs; %d %s; busiest CPU %d: %.0f %%",
		p.Samples, p.Window.Seconds(), p.CPUs, p.Packets, p.Counted, p.Busiest, 100*p.BusiestShare), reportWidth, "\n"))
	t := table.New("phase", ">share of all CPUs", ">µs/packet")
	sum := trace.PhaseShare{Phase: "network stack in all"}
	for _, s := range p.Phases {
		micros := ""
		if s.Network {
			sum.Share += s.Share
			sum.MicrosPerPacket += s.MicrosPerPacket
			micros = fmt.Sprintf("%.2f", s.MicrosPerPacket)
		}
		t.Row(s.Phase, fmt.Sprintf("%.1f %%", 100*s.Share), micros)
	}
	t.Row(sum.Phase, fmt.Sprintf("%.1f %%", 100*sum.Share), fmt.Sprintf("%.2f", sum.MicrosPerPacket))
	if err := t.Write(w); err != nil {
		return err
	}
	if p.Lost > 0 {
		fmt.Fprintf(w, "%d samples found no room and are left out; watch for a shorter time\n", p.Lost)
	}
	for _, limit := range p.Limits {
		fmt.Fprintln(w, wrap("not visible here: "+limit, reportWidth, "\n"))
	}
	return nil
}
