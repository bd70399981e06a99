// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// asNobody holds the arguments of this test binary when it runs sluice as a user without rights, separated by
// spaces.
const asNobody = "SLUICE_TEST_AS_NOBODY"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "sluice" {
		main()
	}
	if args, set := os.LookupEnv(asNobody); set {
		os.Args = append([]string{"sluice"}, strings.Fields(args)...)
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestWithoutRights expects each diagnosis of an ordinary user to report the hidden parts and the remedy, and to
// show the rest.
func TestWithoutRights(t *testing.T) {
	labtest.Require(t, labtest.Root)
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"doctor --seconds 0.2", -1, []string{"Conclusion", "Not visible", "run as root", "CAP_BPF", "are hidden from this user"}},
		{"drops --seconds 0.2", exitFailure, []string{"run as root, or with CAP_BPF"}},
		{"profile --seconds 0.2", exitFailure, []string{"run as root", "CAP_"}},
		{"conns", exitOK, []string{"NAMESPACE", "not seen:"}},
		{"conns --list", exitFailure, []string{"run as root", "CAP_NET_ADMIN"}},
		{"top --once", exitFailure, []string{"root is needed", "CAP_NET_ADMIN"}},
		{"tune --dry-run", exitOK, []string{"SETTING", "Risk:"}},
		{"accelerate --dry-run", exitFailure, []string{"root is needed", "CAP_NET_ADMIN"}},
		{"accelerate", exitFailure, []string{"root is needed", "CAP_NET_ADMIN"}},
		{"show accelerated", exitFailure, []string{"no acceleration is running"}},
		{"tune rollback", exitFailure, []string{"root is needed"}},
		{"lab case-study --allow-host-sysctl", exitFailure, []string{"root is needed"}},
	} {
		t.Run(c.args, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), asNobody+"="+c.args)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			err := cmd.Run()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if code := cmd.ProcessState.ExitCode(); c.code >= 0 && code != c.code || code > 2 && code != 4 { // 4: the doctor has no result
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			for _, want := range c.says {
				if !strings.Contains(out.String(), want) {
					t.Errorf("lacks %q:\n%s", want, out.String())
				}
			}
			for _, odd := range []string{"panic", "MEMLOCK", "goroutine"} {
				if strings.Contains(out.String(), odd) {
					t.Errorf("says %q:\n%s", odd, out.String())
				}
			}
		})
	}
}

// TestCaptureStays expects that an existing capture stays unchanged if nothing can be written.
func TestCaptureStays(t *testing.T) {
	labtest.Require(t, labtest.Root)
	file := filepath.Join(os.TempDir(), t.Name()+".pcapng") // t.TempDir is not accessible to other users
	if err := os.WriteFile(file, []byte("earlier"), 0o666); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file)
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), asNobody+"=drops --seconds 0.2 --pcap "+file)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "CAP_BPF") {
		t.Errorf("%v: %s", err, out)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "earlier" {
		t.Errorf("the file holds %q, %v", text, err)
	}
}
