// SPDX-License-Identifier: Apache-2.0

// Package pause waits for a duration or for the end of a context.
package pause

import (
	"context"
	"time"
)

// For waits for d, and returns the context's error if the context ends before. Without a positive d it returns at once.
func For(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
