// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/demo"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func TestDemoKeepsItsPromises(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	if testing.Short() {
		t.Skip("the demo takes half a minute: run without -short")
	}
	cmd := exec.Command(binary, "demo", "--json")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	runErr := cmd.Run()
	var report demo.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		t.Fatalf("%v: %v\n%s%s", runErr, err, &stdout, &stderr)
	}
	for _, r := range report.Broken() {
		t.Errorf("%s: %s: %s", r.Example, r.Promise, r.Measured)
	}
	if runErr != nil {
		t.Errorf("%v\n%s", runErr, &stderr)
	}
	shown := make(map[string]bool)
	for _, r := range report.Results {
		if r.Skipped != "" {
			t.Logf("%s is not shown: %s", r.Example, r.Skipped)
		}
		shown[r.Example] = true
	}
	if len(shown) != 6 {
		t.Errorf("the demo showed %v, want all six examples", shown)
	}
}

// TestDemoInterrupted presses Ctrl-C in the middle: nothing may be left.
func TestDemoInterrupted(t *testing.T) {
	labtest.Require(t, labtest.Root)
	cmd := exec.Command(binary, "demo")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id := ""
	var text strings.Builder
	for sc := bufio.NewScanner(stderr); sc.Scan(); {
		text.WriteString(sc.Text() + "\n")
		if rest, ok := strings.CutPrefix(sc.Text(), "  lab "); ok && id == "" {
			id, _, _ = strings.Cut(rest, " ")
		}
		if strings.Contains(sc.Text(), "examples/") {
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
		}
	}
	err = cmd.Wait()
	if err == nil || id == "" || !strings.Contains(text.String(), "interrupted") {
		t.Errorf("exit %v, lab %q, and the demo said:\n%s", err, id, text.String())
	}
	if id == "" {
		return
	}
	for _, pattern := range []string{"/run/netns/*" + id + "*", "/run/sluice/lab/*" + id + "*", "/run/sluice/netns/*" + id + "*"} {
		if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v %v", left, err)
		}
	}
	labtest.Eventually(t, 5*time.Second, "the lab's processes to be gone", func() error {
		return noProcessOf(id)
	})
}

// noProcessOf fails when a process has the lab's id on its command line.
func noProcessOf(id string) error {
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, name := range names {
		line, err := os.ReadFile(name)
		if err == nil && bytes.Contains(line, []byte("sluice/netns/")) && bytes.Contains(line, []byte(id)) {
			return &os.PathError{Op: "still runs:", Path: string(line), Err: os.ErrExist}
		}
	}
	return nil
}
