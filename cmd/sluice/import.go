// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/importer/verify"
)

// exitLossy is the exit code if the import lost or changed something.
const exitLossy = 2

// importResult is the JSON output of import.
type importResult struct {
	Source string `json:"source"`
	File   string `json:"file"`
	// Lost and Changed are the numbers of notes of each kind.
	Lost    int `json:"lost"`
	Changed int `json:"changed"`
	*draft.Result
	Verify *verifyResult `json:"verify,omitempty"`
}

// importFlags are the flags that the command handles by itself.
type importFlags struct {
	rest, addresses string
	all, verify     bool
}

func newImport(a *app) *cobra.Command {
	var o importer.Options
	var f importFlags
	cmd := &cobra.Command{
		Use:     "import " + strings.Join(importSources(), "|") + " FILE",
		GroupID: "gateway",
		Short:   "Turn another program's configuration into ours",
		Long: `Import reads what another program has configured and prints a configuration of
Sluice that does the same, with comments: which line each part comes from, and what
has no equivalent. A report of the latter goes to standard error, with the line, the
reason and the next step. FILE may be - for standard input. It needs no root and no
daemon, and changes nothing. Only --verify needs root: it loads the rules in a
network namespace and their import in another, and sends the same probes through
both.

` + sourceTable() + `
The exit code is 0 when all lines have an equivalent, 2 when something was lost or acts
otherwise, and 1 when the file could not be read as that program's.`,
		Example: `  iptables-save | sluice import iptables - > sluice.yaml
  sluice import iptables saved.rules --outside wan0 --rest keep.rules
  ip -j addr > addr.json
  sluice import nft /etc/nftables.conf --addresses addr.json --verify
  sluice check sluice.yaml`,
		Args: requireArgs("source", "file"),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				return importSources(), cobra.ShellCompDirectiveNoFileComp
			case 1:
				return nil, cobra.ShellCompDirectiveDefault
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "nft" {
				args[0] = "nftables"
			}
			if near := config.Nearest(args[0], importSources()); !knownSource(args[0]) {
				hint := "there are " + strings.Join(importSources(), ", ")
				if near != "" {
					hint = "did you mean " + near + "?"
				}
				return usageError(cmd, "unknown source %q: %s", args[0], hint)
			}
			return a.importFile(cmd.Context(), args[0], args[1], o, f)
		},
	}
	cmd.Flags().StringSliceVar(&o.Outside, "outside", nil, "interface whose address is meant where the source takes what is sent to any address of the host; several with commas")
	cmd.Flags().StringVar(&f.rest, "rest", "", "file for the rules that have no equivalent, in the source's own form, to be loaded beside Sluice (iptables)")
	cmd.Flags().BoolVar(&f.all, "all", false, "also list the lines that Sluice needs no rule for")
	cmd.Flags().StringVar(&f.addresses, "addresses", "", "file with the output of 'ip -j addr' on that host, so that its own addresses are known")
	cmd.Flags().BoolVar(&f.verify, "verify", false, "compare the rules with their import, by probes in network namespaces (iptables, nftables; needs root)")
	offerFrom(cmd, "outside", interfaces)
	_ = cmd.MarkFlagFilename("rest")
	_ = cmd.MarkFlagFilename("addresses")
	return cmd
}

func importSources() (names []string) {
	for _, s := range importer.Sources {
		names = append(names, s.Name)
	}
	return names
}

func knownSource(name string) bool {
	for _, s := range importer.Sources {
		if s.Name == name {
			return true
		}
	}
	return false
}

// sourceTable lists the sources, for the help.
func sourceTable() string {
	var b strings.Builder
	for _, s := range importer.Sources {
		fmt.Fprintf(&b, "  %-11s %s\n", s.Name, s.What)
		fmt.Fprintf(&b, "  %-11s   from: %s\n", "", s.Command)
	}
	return b.String()
}

func (a *app) importFile(ctx context.Context, source, file string, o importer.Options, f importFlags) error {
	text, err := a.text(file)
	if err != nil {
		return err
	}
	if f.addresses != "" {
		listing, err := a.text(f.addresses)
		if err == nil {
			o.Addresses, err = importer.ParseAddresses(listing)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.addresses, err)
		}
	}
	if start := strings.TrimSpace(text); source == "nftables" && start != "" && start[0] != '{' {
		if text, err = verify.JSON(text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	r, err := importer.Import(source, text, o)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if f.rest != "" {
		if err := os.WriteFile(f.rest, []byte(r.Rest), 0o600); err != nil {
			return fmt.Errorf("rest of the rules: %w", err)
		}
	}
	var compared *verifyResult
	if f.verify {
		if compared, err = a.verifyImport(ctx, source, text, r, o); err != nil {
			return err
		}
	}
	err = a.print(importResult{source, file, r.Count(draft.Lost), r.Count(draft.Changed), r, compared}, func(w io.Writer) error {
		if _, err := io.WriteString(w, r.YAML); err != nil {
			return err
		}
		if err := r.Report(a.stderr, f.all); err != nil || compared == nil {
			return err
		}
		_, err := io.WriteString(a.stderr, strings.Join(compared.lines(), "\n")+"\n")
		return err
	})
	switch {
	case err != nil:
		return err
	case compared != nil && compared.unannounced() > 0:
		return fmt.Errorf("%d probes have another fate than by the original rules, and no note announces it", compared.unannounced())
	case r.Lossy():
		return exitError{code: exitLossy}
	}
	return nil
}

// text reads a file, or standard input for "-".
func (a *app) text(file string) (string, error) {
	in := a.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, importer.MaxSize+1))
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	return string(data), nil
}
