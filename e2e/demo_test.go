// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/lab"
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
	if len(shown) != 7 {
		t.Errorf("the demo showed %v, want all seven examples", shown)
	}
}

// TestDemoInterrupted presses Ctrl-C in the middle, or closes the terminal. Nothing may be left.
func TestDemoInterrupted(t *testing.T) {
	labtest.Require(t, labtest.Root)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			id, text, err := signalDemo(t, sig)
			if err == nil || !strings.Contains(text, "interrupted; everything is as it was before") {
				t.Errorf("exit %v, and the demo said:\n%s", err, text)
			}
			nothingLeft(t, id)
		})
	}
}

// TestDemoKilled kills the demo, so that it cannot clean up. The next lab cleans up.
func TestDemoKilled(t *testing.T) {
	labtest.Require(t, labtest.Root)
	id, _, err := signalDemo(t, syscall.SIGKILL)
	if err == nil {
		t.Error("the killed demo ended without an error")
	}
	if _, err := lab.Sweep(); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, id)
}

// signalDemo starts the demo and sends it a signal when its first daemon runs. It returns the id of the lab, the
// output of the demo, and its end.
func signalDemo(t *testing.T, sig syscall.Signal) (id, text string, err error) {
	t.Helper()
	cmd := exec.Command(binary, "demo")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sent := false
	for sc := bufio.NewScanner(stderr); sc.Scan(); {
		text += sc.Text() + "\n"
		if rest, ok := strings.CutPrefix(sc.Text(), "  lab "); ok && id == "" {
			id, _, _ = strings.Cut(rest, " ")
		}
		if strings.Contains(sc.Text(), "service web") && !sent {
			sent = true
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
		}
	}
	err = cmd.Wait()
	if id == "" || !sent {
		t.Fatalf("the demo said neither which lab it uses nor that its first service is up:\n%s", text)
	}
	return id, text, err
}

// nothingLeft looks for traces of a lab.
func nothingLeft(t *testing.T, id string) {
	t.Helper()
	labtest.Eventually(t, patience, "the lab and its processes to be gone", func() error {
		for _, pattern := range []string{"/run/netns/*" + id + "*", "/run/sluice/lab/*" + id + "*", "/run/sluice/netns/*" + id + "*"} {
			if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
				return fmt.Errorf("left behind: %v (%v)", left, err)
			}
		}
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
