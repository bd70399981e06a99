// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/store"
)

// checkResult is the JSON output of check.
type checkResult struct {
	File   string        `json:"file"`
	Valid  bool          `json:"valid"`
	Errors config.Errors `json:"errors,omitempty"`
	// Conflict describes a contradiction between the file and the run-time changes.
	Conflict string `json:"conflict,omitempty"`
	// Numbers of configured objects; zero for an invalid file.
	Services int `json:"services"`
	Backends int `json:"backends"`
	NAT      int `json:"nat"`
	Rules    int `json:"rules"`
	Uplinks  int `json:"uplinks"`
}

func newCheck(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "check FILE",
		GroupID: "gateway",
		Short:   "Validate a configuration file",
		Long: `Check reads a configuration file and reports everything that is wrong with it, with the place in the file and
what to write instead. It needs no root, no daemon and no kernel feature, and changes nothing. FILE may be - for
standard input. The exit code is 1 when the file is not valid, or contradicts changes that were made at run time:
the daemon would not put it in force.`,
		Example:           "  sluice check /etc/sluice/sluice.yaml\n  sluice check --json - < new.yaml",
		Args:              requireArgs("file"),
		ValidArgsFunction: completeYAML,
		RunE:              func(_ *cobra.Command, args []string) error { return a.check(args[0]) },
	}
}

func (a *app) check(file string) error {
	c, err := a.load(file)
	var errs config.Errors
	if err != nil && !errors.As(err, &errs) {
		return err
	}
	result := checkResult{File: file, Valid: err == nil, Errors: errs}
	if c != nil {
		result.count(c)
		if result.Conflict, err = a.conflict(file, c); err != nil {
			return err
		}
	}
	perr := a.print(result, func(w io.Writer) error {
		if err != nil {
			errs.Render(a.stderr, a.usesColour(a.stderr))
			_, err := fmt.Fprintf(a.stderr, "\n%s\n", a.colour(a.stderr, red, plural(len(errs), "error")))
			return err
		}
		if result.Conflict != "" {
			fmt.Fprintf(a.stderr, "%s %s\n", a.colour(a.stderr, red, file+":"), result.Conflict)
		}
		counts := []string{plural(result.Services, "service"), plural(result.Backends, "backend"), plural(result.NAT, "NAT rule"), plural(result.Rules, "firewall rule")}
		if result.Uplinks > 0 {
			counts = append(counts, plural(result.Uplinks, "uplink"))
		}
		_, err := fmt.Fprintf(w, "%s: %s: %s\n", file, a.colour(w, green, "valid"), strings.Join(counts, ", "))
		return err
	})
	if perr == nil && (err != nil || result.Conflict != "") {
		return exitError{code: exitFailure}
	}
	return perr
}

// conflict describes the contradiction between the file and the run-time changes; empty if there is
// none.
func (a *app) conflict(file string, c *config.Config) (string, error) {
	if file == "-" {
		return "", nil
	}
	path, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	s, err := store.Open(a.paths.ChangesDirectory(), path)
	if errors.Is(err, fs.ErrPermission) {
		a.progress("whether it fits the changes made at run time is not known: %v", err)
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if _, err := s.Merge(c); err != nil {
		return err.Error(), nil
	}
	return "", nil
}

// load reads a configuration file, or standard input for "-".
func (a *app) load(file string) (*config.Config, error) {
	if file != "-" {
		return config.Load(file)
	}
	data, err := io.ReadAll(io.LimitReader(a.stdin, config.MaxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("standard input: %w", err)
	}
	return config.Decode(os.Stdin.Name(), data)
}

func (r *checkResult) count(c *config.Config) {
	r.Services, r.NAT, r.Rules, r.Uplinks = len(c.Services), len(c.NAT), len(c.Firewall.Rules), len(c.Uplinks)
	for i := range c.Services {
		r.Backends += len(c.Services[i].Backends)
	}
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
