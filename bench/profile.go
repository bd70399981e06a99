// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/sluice-lb/sluice/trace"
)

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

const folded = ".folded" // folded stacks

// profileName is the file of a row's folded stacks, such as flows-nft-dnat-http.folded.
func profileName(suite, row, point string) string {
	name := notInNames.ReplaceAllString(strings.ToLower(suite+"-"+row+"-"+point), "-")
	return strings.Trim(name, "-") + folded
}

// withProfile samples while f runs, if a profile was requested, and writes the folded stacks. Measurements other than
// the first metric have their own file. Several parts of one trial share a file.
func (t *Trial) withProfile(what string, f func() error) error {
	if t.profile == "" {
		return f()
	}
	p, err := trace.ProfileWhile(t, nil, f)
	if err != nil {
		return err
	}
	path := t.profile
	if what != "" {
		path = strings.TrimSuffix(path, folded) + "-" + what + folded
	}
	if t.profiles == nil {
		t.profiles = map[string]string{}
	}
	t.profiles[path] += p.Folded()
	return os.WriteFile(path, []byte(t.profiles[path]), 0o644)
}

// takeProfile samples for the trial's duration and writes the folded stacks.
func (t *Trial) takeProfile(ctx context.Context) error {
	p, err := trace.TakeProfile(ctx, t.Duration(), nil)
	if err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	t.profiles = map[string]string{t.profile: p.Folded()}
	return os.WriteFile(t.profile, []byte(p.Folded()), 0o644)
}
