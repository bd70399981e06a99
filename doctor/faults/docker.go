// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// dockerKeeper runs dockerd with its own cgroup file systems, because the node's /sys hides them.
// When the other end of its input is closed, for whatever reason, it removes the containers and
// ends the daemon. $0 is the base of its files, "$@" are further options of dockerd.
const dockerKeeper = `trap '' HUP INT TERM
mount -t tmpfs none /sys/fs/cgroup
for c in $(awk 'NR > 1 && $2 > 0 { print $1 }' /proc/cgroups); do mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c || rmdir /sys/fs/cgroup/$c; done
[ -n "$(ls /sys/fs/cgroup)" ] || mount -t cgroup2 none /sys/fs/cgroup
(trap - HUP INT TERM; exec dockerd --data-root $0/data --exec-root $0/run --pidfile $0/pid -H unix://$0/sock --storage-driver vfs --userland-proxy=false "$@") </dev/null &
cat >/dev/null
for id in $(docker -H unix://$0/sock ps -aq); do docker -H unix://$0/sock rm -f $id; done
kill $!
wait $!
rm -rf $0`

// Docker is a real Docker daemon in the namespace of a node.
type Docker struct {
	base   string
	keeper *exec.Cmd
	hold   io.Closer
	log    bytes.Buffer
}

// StartDocker starts a daemon that makes its rules by one kind of iptables, "nft" or "legacy". Options of dockerd
// override those of this package.
func StartDocker(ctx context.Context, node *lab.Node, iptables string, options ...string) (*Docker, error) {
	base, err := os.MkdirTemp("", "docker") // short: sockets have paths of 108 bytes at most
	if err != nil {
		return nil, err
	}
	bin := filepath.Join(base, "bin")
	script := fmt.Sprintf(`mkdir -p %[1]s; for f in iptables ip6tables; do for s in "" -save -restore; do ln -s $(command -v $f-%[2]s$s) %[1]s/$f$s; done; done`, bin, iptables)
	if text, err := exec.CommandContext(ctx, "sh", "-ec", script).CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("docker: iptables-%s: %w: %s", iptables, err, bytes.TrimSpace(text)), os.RemoveAll(base))
	}
	d := &Docker{base: base}
	d.keeper = exec.Command("ip", "netns", "exec", node.Name(), "unshare", "-m", "sh", "-c", dockerKeeper, base)
	d.keeper.Args = append(d.keeper.Args, options...)
	d.keeper.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	d.keeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	d.keeper.Stdout, d.keeper.Stderr = &d.log, &d.log
	if d.hold, err = d.keeper.StdinPipe(); err != nil {
		return nil, err
	}
	if err := d.keeper.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("docker: %w", err), os.RemoveAll(base))
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if _, err = d.Run(ctx, "info"); err == nil {
			return d, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			_ = d.Stop()
			return nil, fmt.Errorf("docker: the daemon does not answer: %w: %s", err, bytes.TrimSpace(d.log.Bytes()))
		}
	}
}

// Socket returns the path of the engine's socket.
func (d *Docker) Socket() string { return d.base + "/sock" }

// Run runs the docker program and returns its output.
func (d *Docker) Run(ctx context.Context, args ...string) (string, error) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "docker", append([]string{"-H", "unix://" + d.Socket()}, args...)...)
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", args[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(string(text)), nil
}

// Image makes an image of programs of this host, with the libraries that they are linked with,
// and of files by their paths.
func (d *Docker) Image(ctx context.Context, name string, programs []string, files map[string]string) error {
	root := filepath.Join(d.base, "root")
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			return err
		}
	}
	script := `mkdir -p "$0/bin" "$0/tmp"
for p in "$@"; do
	cp "$(command -v "$p")" "$0/bin/"
	for l in $(ldd "$(command -v "$p")" 2>/dev/null | grep -o '/[^ ]*'); do mkdir -p "$0$(dirname "$l")"; cp "$l" "$0$l"; done
done
tar -C "$0" -cf "$0.tar" .`
	if text, err := exec.CommandContext(ctx, "sh", append([]string{"-ec", script, root}, programs...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("docker: image of %v: %w: %s", programs, err, bytes.TrimSpace(text))
	}
	_, err := d.Run(ctx, "import", root+".tar", name)
	return err
}

// Log returns the daemon's log.
func (d *Docker) Log() string { return d.log.String() }

// Stop removes the containers, ends the daemon and removes its files.
func (d *Docker) Stop() error {
	d.hold.Close()
	if err := d.keeper.Wait(); err != nil {
		return fmt.Errorf("docker: %w: %s", err, bytes.TrimSpace(d.log.Bytes()))
	}
	return nil
}
