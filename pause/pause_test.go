// SPDX-License-Identifier: Apache-2.0

package pause

import (
	"context"
	"errors"
	"testing"
	"time"
)

// TestFor: the end of the context ends a pause, and is reported also for a pause of no length.
func TestFor(t *testing.T) {
	if err := For(t.Context(), time.Millisecond); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, d := range []time.Duration{-1, 0, time.Hour} {
		if err := For(ctx, d); !errors.Is(err, context.Canceled) {
			t.Errorf("a pause of %s after the end of the context: %v", d, err)
		}
	}
	if err := For(t.Context(), -1); err != nil {
		t.Error(err)
	}
}
