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

// profileName is the file of a row's folded stacks, such as flows-nft-dnat-http.folded.
func profileName(suite, row, point string) string {
	name := notInNames.ReplaceAllString(strings.ToLower(suite+"-"+row+"-"+point), "-")
	return strings.Trim(name, "-") + ".folded"
}

// takeProfile samples for the trial's duration and writes the folded stacks.
func (t *Trial) takeProfile(ctx context.Context) error {
	p, err := trace.TakeProfile(ctx, t.Duration(), nil)
	if err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	return os.WriteFile(t.profile, []byte(p.Folded()), 0o644)
}
