// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/importer/verify"
)

// verifyProbes is the number of probes of --verify: some per rule of a usual file, in less than 10 s.
const verifyProbes = 400

// verifyResult is the outcome of --verify.
type verifyResult struct {
	Host        string              `json:"host"`
	Probes      int                 `json:"probes"`
	Differences []verify.Difference `json:"differences"`
}

// unannounced counts the differences that no note announces.
func (v *verifyResult) unannounced() (n int) {
	for _, d := range v.Differences {
		if !d.Announced && d.Known == "" {
			n++
		}
	}
	return n
}

// lines describes the comparison for people: the differences by the lines of the rules that matched.
func (v *verifyResult) lines() (list []string) {
	silent := v.unannounced()
	list = append(list, fmt.Sprintf("verify: %d probes, %d differences: %d announced by the notes, %d not", v.Probes, len(v.Differences), len(v.Differences)-silent, silent),
		"  on a host with "+v.Host)
	known := map[string]int{}
	for _, d := range v.Differences {
		switch {
		case d.Known != "":
			known[d.Known]++
		case !d.Announced:
			list = append(list, fmt.Sprintf("not announced: %s, lines %s", d.Probe, strings.Trim(fmt.Sprint(d.Lines), "[]")))
			for _, l := range append(slices.Clone(d.Original), "") {
				list = append(list, "  original: "+l)
			}
			for _, l := range append(slices.Clone(d.Imported), "") {
				list = append(list, "  imported: "+l)
			}
		}
	}
	for reason, n := range known {
		list = append(list, fmt.Sprintf("  %d: %s", n, reason))
	}
	slices.Sort(list[2:])
	return list
}

// verifyProgram returns the program that loads the rules of a source.
func verifyProgram(source string) (verify.Program, error) {
	candidates := map[string][]verify.Program{"iptables": {verify.IPTables, verify.IPTablesLegacy}, "nftables": {verify.Nftables}}[source]
	if candidates == nil {
		return "", fmt.Errorf("--verify compares rules of iptables and nftables; it cannot run %s", source)
	}
	for _, p := range candidates {
		name := string(p)
		if p != verify.Nftables {
			name += "-restore"
		}
		if _, err := exec.LookPath(name); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("--verify needs the program %s: install it", candidates[0])
}

// verifyImport compares rules with their import in network namespaces, which end with the comparison.
func (a *app) verifyImport(ctx context.Context, source, text string, r *draft.Result, o importer.Options) (v *verifyResult, err error) {
	program, err := verifyProgram(source)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("--verify needs root: it loads the rules in network namespaces of its own")
	}
	dir, err := os.MkdirTemp("", "sluice-verify")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	h := verify.Guess(r, o.Outside, o.Addresses)
	pair, err := verify.NewPair(h, func() (verify.Datapath, error) {
		log := slog.New(slog.DiscardHandler)
		paths, err := daemon.OpenDatapaths(dir, log)
		if err != nil {
			return nil, err
		}
		return &comparedGateway{engine.New(engine.Options{Datapaths: paths, Log: log})}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	defer func() { err = errors.Join(err, pair.Close()) }()
	if err := pair.Load(program, text, r); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	probes := verify.Probes(h, r, verifyProbes, rand.New(rand.NewPCG(1, 1)))
	v = &verifyResult{Host: verify.Describe(h), Probes: len(probes)}
	if v.Differences, err = pair.Compare(ctx, probes); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	return v, nil
}

// comparedGateway carries a configuration in a namespace, each object on the datapath that the daemon
// would choose.
type comparedGateway struct{ engine *engine.Engine }

func (g *comparedGateway) Apply(ctx context.Context, c *config.Config) error {
	_, err := g.engine.Apply(ctx, c)
	return err
}

func (g *comparedGateway) Close() error { return g.engine.Stop(context.Background(), false) }
