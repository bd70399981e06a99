// SPDX-License-Identifier: Apache-2.0

package main

//go:generate go run . docs markdown ../../docs/cli
//go:generate go run . docs openapi ../../docs/api

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/sluice-lb/sluice/server"
)

// newDocs writes the manual from the commands themselves.
func newDocs(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:       "docs man|markdown|openapi DIR",
		Short:     "Write the man pages, the command reference or the API's description",
		Hidden:    true,
		Example:   "  sluice docs man /usr/local/share/man/man1",
		Args:      requireArgs("form", "directory"),
		ValidArgs: []string{"man", "markdown", "openapi"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := newRoot(a)
			root.DisableAutoGenTag = true
			root.Version = "" // the reference does not change with every commit
			if err := os.MkdirAll(args[1], 0o755); err != nil {
				return err
			}
			switch args[0] {
			case "man":
				epoch := time.Unix(0, 0).UTC()
				return doc.GenManTree(root, &doc.GenManHeader{Title: "SLUICE", Section: "1", Source: "Sluice", Manual: "Sluice", Date: &epoch}, args[1])
			case "markdown":
				if err := removeStale(args[1]); err != nil {
					return err
				}
				return doc.GenMarkdownTree(root, args[1])
			case "openapi":
				text, err := server.OpenAPI("v1")
				if err != nil {
					return err
				}
				return os.WriteFile(filepath.Join(args[1], "openapi.yaml"), text, 0o644)
			}
			return usageError(cmd, "%q: write man, markdown or openapi", args[0])
		},
	}
	return cmd
}

// removeStale deletes the pages of removed commands.
func removeStale(dir string) error {
	pages, err := filepath.Glob(filepath.Join(dir, "sluice*.md"))
	if err != nil {
		return err
	}
	for _, p := range pages {
		if !strings.HasPrefix(filepath.Base(p), "sluice") {
			continue
		}
		if err := os.Remove(p); err != nil {
			return fmt.Errorf("stale page: %w", err)
		}
	}
	return nil
}
