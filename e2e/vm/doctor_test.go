// SPDX-License-Identifier: Apache-2.0

//go:build vm

package vm

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDiagnosisOnOldestKernel runs the diagnosis of one faulty router, and the commands, on Debian's 6.1 kernel.
// It lacks many features of newer kernels: each command must work, or name the invisible part.
func TestDiagnosisOnOldestKernel(t *testing.T) {
	kernels, err := filepath.Glob("/boot/vmlinuz-6.1.*")
	if err != nil || len(kernels) == 0 {
		t.Fatalf("no 6.1 kernel in /boot (%v): make deps-dev installs it", err)
	}
	dir := t.TempDir()
	var console bytes.Buffer
	m := Machine{Kernel: kernels[0], Modules: modules, Output: io.MultiWriter(&console, consoleOf(t)),
		Programs: []string{"nft", "ip", "ethtool"}, Files: map[string]string{"src/testdata": "../../testdata"}}
	build := func(to string, args ...string) {
		cmd := exec.CommandContext(t.Context(), "go", append(args[:len(args)-1:len(args)-1], "-o", filepath.Join(dir, to), args[len(args)-1])...)
		cmd.Dir, cmd.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", to, err, out)
		}
	}
	build("sluice", "build", "./cmd/sluice")
	build("doctor.test", "test", "-c", "./doctor")
	build("trace.test", "test", "-c", "./trace")
	m.Files["src/bin/sluice"] = filepath.Join(dir, "sluice")
	m.Files["src/doctor/doctor.test"] = filepath.Join(dir, "doctor.test")
	m.Files["src/trace/trace.test"] = filepath.Join(dir, "trace.test")
	m.Commands = []string{
		"/src/doctor/doctor.test -test.run 'TestFaultyRouters/snat-ports$'",
		"/src/trace/trace.test -test.run 'TestDropCauses/deny-rule$'",
		"/src/bin/sluice doctor --seconds 1",
		"/src/bin/sluice drops --seconds 1",
		"/src/bin/sluice profile --seconds 1",
		"/src/bin/sluice conns",
		"/src/bin/sluice top --once",
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	codes, err := m.Run(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i, code := range codes {
		// The doctor's 1 and 2 are its verdict on the machine.
		if bad := code != 0; bad && !(strings.Contains(m.Commands[i], "sluice doctor") && code <= 2) {
			t.Errorf("%s: exit code %d", m.Commands[i], code)
		}
	}
	for _, want := range []string{
		"before 6.7: without backports drops by nftables rules look like those by iptables-legacy", // KV01
		"Conclusion",
		"NAMESPACE",   // conns
		"[1 Sources]", // top
	} {
		if !strings.Contains(console.String(), want) {
			t.Errorf("the console lacks %q", want)
		}
	}
}
