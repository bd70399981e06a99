// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// TestFreed: who stops a daemon waits until it has let go of its lock, and hears what it
// could not remove.
func TestFreed(t *testing.T) {
	dir := t.TempDir()
	if err := freed(t.Context(), dir); err != nil {
		t.Errorf("no daemon was ever here: %v", err)
	}
	l, err := acquire(dir, "sluice run")
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := freed(soon, dir); err == nil || !strings.Contains(err.Error(), "has not ended yet") {
		t.Errorf("while it is held: %v", err)
	}
	l.leave(errors.New("ebpf: device busy"))
	l.release()
	if err := freed(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "device busy") {
		t.Errorf("after a bad end: %v", err)
	}
	if l, err = acquire(dir, "sluice run"); err != nil {
		t.Fatal(err)
	}
	l.leave(nil)
	l.release()
	if err := freed(t.Context(), dir); err != nil {
		t.Errorf("after a good end: %v", err)
	}
}
