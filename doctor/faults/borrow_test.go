// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
)

const (
	borrowed = "net.core.netdev_budget"
	asChild  = "SLUICE_TEST_BORROW"
)

// TestMain plays the process that borrows and is killed.
func TestMain(m *testing.M) {
	if value := os.Getenv(asChild); value != "" {
		if _, err := Borrow(context.Background(), map[string]string{borrowed: value}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("borrowed")
		for {
			time.Sleep(time.Hour) // until it is killed; select{} is a deadlock to the runtime where nothing else waits
		}
	}
	os.Exit(m.Run())
}

func read(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(sysctlPath(borrowed))
	if err != nil {
		t.Skipf("the setting is not here: %v", err)
	}
	return strings.TrimSpace(string(b))
}

func TestBorrowGivesBack(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := read(t)
	restore, err := Borrow(t.Context(), map[string]string{borrowed: before + "1"})
	if err != nil {
		t.Fatal(err)
	}
	if now := read(t); now != before+"1" {
		t.Errorf("%s is %s, want %s", borrowed, now, before+"1")
	}
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	if now := read(t); now != before {
		t.Errorf("%s is %s afterwards, was %s", borrowed, now, before)
	}
}

// TestKilledBorrower wants the old value back after SIGKILL.
func TestKilledBorrower(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := read(t)
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), asChild+"="+before+"2")
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 200)
	n, _ := out.Read(said)
	if string(said[:n]) != "borrowed\n" || read(t) != before+"2" {
		t.Errorf("the child said %q, the value is %s", said[:n], read(t))
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait()
	labtest.Eventually(t, time.Minute, "the old value", func() error {
		if now := read(t); now != before {
			return fmt.Errorf("%s is %s, was %s", borrowed, now, before)
		}
		return nil
	})
}
