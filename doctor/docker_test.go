// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// startDocker runs dockerd with file systems of control groups of its own: those of the node
// are hidden by its /sys. $0 is the base of its files, the rest its arguments.
const startDocker = `mount -t tmpfs none /sys/fs/cgroup
for c in $(awk 'NR > 1 && $2 > 0 { print $1 }' /proc/cgroups); do mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c || rmdir /sys/fs/cgroup/$c; done
[ -n "$(ls /sys/fs/cgroup)" ] || mount -t cgroup2 none /sys/fs/cgroup
exec dockerd --data-root $0/data --exec-root $0/run --pidfile $0/pid -H unix://$0/sock --storage-driver vfs --userland-proxy=false`

// TestDocker wants no warning for a real Docker daemon that publishes a port, with either kind
// of iptables, and the first line to name a rule that drops what the port is for.
func TestDocker(t *testing.T) {
	if os.Getenv("SLUICE_DOCKER") == "" {
		t.Skip("SLUICE_DOCKER=1 starts a Docker daemon")
	}
	needs(t)
	for _, tool := range []string{"dockerd", "docker", "busybox", "curl", "iptables-nft", "iptables-legacy"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			l := labtest.New(t, faults.Topology("docker"))
			docker := dockerd(ctx, t, l, kind)
			docker("run", "-d", "-p", "8080:8080", "own", "/bin/busybox", "httpd", "-f", "-p", "8080")
			ask := func(ctx context.Context, l *lab.Lab) error {
				for range 20 {
					// Nobody answers where the rule is.
					_ = l.Node("client").Command(ctx, "curl", "-s", "-o", "/dev/null", "-m", "0.5", "http://"+faults.Gateway+":8080/").Run()
				}
				return nil
			}
			labtest.Eventually(t, 10*time.Second, "an answer of the container", func() error {
				return l.Node("client").Command(ctx, "curl", "-s", "-o", "/dev/null", "-m", "1", "http://"+faults.Gateway+":8080/").Run()
			})
			healthy := func(when string) {
				for _, f := range watched(ctx, t, l, ask).Findings {
					if f.Verdict >= doctor.Warn && f.Namespace != "" {
						t.Errorf("%s: false alarm: %s %s", when, f.Check, said(f))
					}
				}
			}
			healthy("as Docker makes it")
			rule := func(action string) {
				if text, err := l.Node("gateway").Command(ctx, "iptables-"+kind, action, "FORWARD", "-p", "tcp", "--dport", "8080", "-j", "DROP").CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, text)
				}
			}
			rule("-I")
			if r := watched(ctx, t, l, ask); r.Conclusion[0].Check != "RL15" || r.ExitCode() == 0 {
				t.Errorf("with the published port dropped: %v", r.Conclusion)
			}
			rule("-D")
			healthy("after the rule")
		})
	}
}

// dockerd starts a daemon in the router's namespace, with an image "own" of busybox, and
// returns what runs its client.
func dockerd(ctx context.Context, t *testing.T, l *lab.Lab, kind string) func(args ...string) {
	t.Helper()
	base, err := os.MkdirTemp("", "docker") // short: sockets have paths of 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	bin, root := filepath.Join(base, "bin"), filepath.Join(base, "root", "bin")
	script := fmt.Sprintf(`mkdir -p %[1]s %[2]s; cp $(command -v busybox) %[2]s
for f in iptables ip6tables; do for s in "" -save -restore; do ln -s $(command -v $f-%[3]s$s) %[1]s/$f$s; done; done`, bin, root, kind)
	if text, err := exec.CommandContext(ctx, "sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	log := &strings.Builder{}
	daemon := exec.Command("ip", "netns", "exec", l.Node("gateway").Name(), "unshare", "-m", "sh", "-ec", startDocker, base)
	daemon.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	daemon.Stdout, daemon.Stderr = log, log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	client := func(args ...string) ([]byte, error) {
		return exec.Command("docker", append([]string{"-H", "unix://" + base + "/sock"}, args...)...).CombinedOutput()
	}
	t.Cleanup(func() {
		if ids, _ := client("ps", "-aq"); len(ids) > 0 {
			_, _ = client(append([]string{"rm", "-f"}, strings.Fields(string(ids))...)...)
		}
		_ = daemon.Process.Signal(syscall.SIGTERM)
		_ = daemon.Wait()
		if t.Failed() {
			t.Log(log)
		}
	})
	labtest.Eventually(t, 30*time.Second, "an answer of dockerd", func() error {
		_, err := client("info")
		return err
	})
	run := func(args ...string) {
		t.Helper()
		if text, err := client(args...); err != nil {
			t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, text)
		}
	}
	tar := filepath.Join(base, "own.tar")
	if text, err := exec.CommandContext(ctx, "tar", "-C", filepath.Join(base, "root"), "-cf", tar, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	run("import", tar, "own")
	return run
}
