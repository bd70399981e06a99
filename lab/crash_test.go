// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// crashing makes this test binary build a lab and wait to be killed.
const crashing = "SLUICE_LAB_TEST_CRASH"

// hostSetting is a harmless host-wide setting: whether netfilter logs packets of other namespaces.
const hostSetting = "net.netfilter.nf_log_all_netns"

func readSysctl(t *testing.T, key string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(key, ".", "/"))
	if err != nil {
		t.Skipf("the kernel has no %s: %v", key, err)
	}
	return strings.TrimSpace(string(data))
}

func TestMain(m *testing.M) {
	if os.Getenv(crashing) == "" {
		os.Exit(m.Run())
	}
	l, err := lab.Up(context.Background(), lab.Balancer())
	if err != nil {
		panic(err)
	}
	if err := l.Node("s1").Command(context.Background(), "sleep", "600").Start(); err != nil {
		panic(err)
	}
	if os.Getenv(crashing) == "crash" {
		// Without the host's lock, which another package's test may hold, the setting stays.
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		if err := l.HostSysctl(ctx, hostSetting, "1"); err != nil && ctx.Err() == nil {
			panic(err)
		}
		cancel()
	}
	if os.Getenv(crashing) == "detach" {
		if err := l.Detach(); err != nil {
			panic(err)
		}
	}
	os.Stdout.WriteString(l.ID() + "\n")
	for {
		time.Sleep(time.Hour) // until it is killed; select{} is a deadlock to the runtime where nothing else waits
	}
}

// doomed builds a lab in another process, with a process in node s1. It returns the lab and a function that kills the
// other process.
func doomed(t *testing.T, how string) (*lab.Lab, func()) {
	t.Helper()
	labtest.Require(t, labtest.Root)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashing+"="+how)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait() // it was killed
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		kill()
		t.Fatal(err)
	}
	l, err := lab.Find(strings.TrimSpace(line))
	if err != nil {
		kill()
		t.Fatal(err)
	}
	return l, kill
}

func TestSweepRemovesWhatACrashLeft(t *testing.T) {
	labtest.Require(t, labtest.Root)
	if readSysctl(t, hostSetting) != "0" {
		t.Skip("the host logs packets of other namespaces already: nothing to restore")
	}
	left, kill := doomed(t, "crash")
	id := left.ID()
	if got := readSysctl(t, hostSetting); got != "1" {
		t.Logf("%s is %s while the lab is up: another test holds the host's settings", hostSetting, got)
	}
	if !left.Record().Live {
		t.Error("the record says that its living owner is dead")
	}
	// Remains of a gateway that was also killed, and a partial record.
	state := left.Node("gateway").StateDir()
	if err := os.MkdirAll(state, 0o755); err != nil {
		t.Fatal(err)
	}
	half := "/run/sluice/lab/" + id + "half.json.new"
	if err := os.WriteFile(half, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	var pids []int
	labtest.Eventually(t, time.Minute, "the process in s1", func() error {
		if pids = processesIn(t, left.Node("s1")); len(pids) == 0 {
			return os.ErrNotExist
		}
		return nil
	})
	kill()
	// From here on any other test's Up may sweep too, so only the result counts.
	labtest.Eventually(t, time.Minute, "nothing of the lab to be left", swept(t, left))
	if _, err := os.Stat(state); err == nil {
		t.Errorf("left behind: %s", state)
	}
	if got := readSysctl(t, hostSetting); got != "0" {
		t.Errorf("%s is %s after the sweep, was 0", hostSetting, got)
	}
	for _, pid := range pids {
		// A zombie has no namespace, and may have no parent that reaps it.
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid)); err == nil {
			t.Errorf("process %d of the lab still runs", pid)
		}
	}
}

// TestSettingsOfACrashAreNotTakenForTheHosts: a lab that waited for the settings of one that was
// killed restores those from before both.
func TestSettingsOfACrashAreNotTakenForTheHosts(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := readSysctl(t, hostSetting)
	l := up(t, lab.Topology{Name: "settings", Nodes: []lab.NodeSpec{{Name: "one"}}}) // before the crash: it sweeps
	_, kill := doomed(t, "crash")
	kill()
	if err := l.HostSysctl(t.Context(), hostSetting, "1"); err != nil {
		t.Fatal(err)
	}
	if _, err := lab.Sweep(); err != nil {
		t.Error(err)
	}
	if got := readSysctl(t, hostSetting); got != "1" {
		t.Errorf("%s is %s while a lab has set it to 1", hostSetting, got)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if got := readSysctl(t, hostSetting); got != before {
		t.Errorf("%s is %s, before both labs it was %s", hostSetting, got, before)
	}
}

// TestSettingOfAnotherLab: a setting that a lab has changed and not put back, and that no sweep
// does, is not taken for the host's own.
func TestSettingOfAnotherLab(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := readSysctl(t, hostSetting)
	l := up(t, lab.Topology{Name: "settings", Nodes: []lab.NodeSpec{{Name: "one"}}})
	other := "/run/sluice/lab/detached-4711.json"
	text := fmt.Sprintf(`{"id": "detached-4711", "detached": true, "host_sysctls": {%q: "1"}}`, hostSetting)
	if err := os.WriteFile(other, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(other) })
	if err := l.HostSysctl(t.Context(), hostSetting, "1"); err == nil || !strings.Contains(err.Error(), "detached-4711") {
		t.Errorf("%v, want a refusal that names the other lab", err)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if err := l.HostSysctl(t.Context(), hostSetting, "1"); err != nil {
		t.Error(err)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if got := readSysctl(t, hostSetting); got != before {
		t.Errorf("%s is %s, before it was %s", hostSetting, got, before)
	}
}

// TestSweepGoesOnBehindALabThatStays: a lab that cannot be removed is named, and keeps no other one.
func TestSweepGoesOnBehindALabThatStays(t *testing.T) {
	stays, killFirst := doomed(t, "wait")
	goes, killSecond := doomed(t, "wait")
	obstacle := filepath.Join("/run/sluice/lab", stays.ID(), "directory", "file")
	if err := os.MkdirAll(obstacle, 0o755); err != nil {
		t.Error(err)
	}
	killFirst()
	killSecond()
	t.Cleanup(func() {
		os.Remove(obstacle)
		for _, l := range []*lab.Lab{stays, goes} {
			labtest.Eventually(t, time.Minute, "nothing of the labs to be left", swept(t, l))
		}
	})
	// Any other test's Up may sweep too, so this one may have to try again.
	labtest.Eventually(t, time.Minute, "a word on the older lab", func() error {
		if _, err := lab.Sweep(); !errors.Is(err, lab.ErrDown) || !strings.Contains(err.Error(), stays.ID()) {
			return fmt.Errorf("the sweep says: %w", err)
		}
		return nil
	})
	if found := tracesOf(t, goes.ID()); len(found) > 0 {
		t.Errorf("left of the younger lab by the same sweep: %v", found)
	}
}

// swept sweeps and checks for remains of a lab.
func swept(t *testing.T, l *lab.Lab) func() error {
	return func() error {
		_, err := lab.Sweep()
		if found := tracesOf(t, l.ID()); len(found) > 0 {
			return fmt.Errorf("%v is left: %w", found, err)
		}
		return nil
	}
}

func TestDetachedLabSurvivesItsProcess(t *testing.T) {
	l, kill := doomed(t, "detach")
	kill()
	swept, err := lab.Sweep()
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(swept, l.ID()) {
		t.Fatal("the sweep took a detached lab")
	}
	if err := ping(t, l.Node("client"), netip.Addr{}, "10.0.2.2"); err != nil {
		t.Errorf("the detached lab does not work: %v", err)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if found := tracesOf(t, l.ID()); len(found) > 0 {
		t.Errorf("left behind: %v", found)
	}
}

func TestSweepSparesLivingLabs(t *testing.T) {
	l := labtest.New(t, lab.IPv6Only())
	if _, err := lab.Sweep(); err != nil {
		t.Fatal(err)
	}
	r, err := lab.Find(l.ID())
	if err != nil {
		t.Fatal(err)
	}
	if !r.Record().Live {
		t.Error("the record of a lab that this process owns says that nobody does")
	}
	if _, err := l.Node("client").Interface("eth0"); err != nil {
		t.Error(err)
	}
}
