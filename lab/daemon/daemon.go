// SPDX-License-Identifier: Apache-2.0

// Package daemon runs the real sluice program as the gateway of a lab.
package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
)

// readyTime bounds the wait for the start of a daemon, endTime for its end.
const (
	readyTime = 2 * time.Minute
	endTime   = 2 * time.Minute
)

// Daemon is "sluice run" in a node. The embedded client uses its API.
type Daemon struct {
	*api.Client
	// File is the configuration that the daemon watches.
	File string

	node   *lab.Node
	binary string
	args   []string // of "run", in addition to the file
	cmd    *exec.Cmd
	log    *tail
	exited chan struct{} // closed after the process has exited
}

// Start writes the configuration to a file and runs the binary as "sluice run" in the node with the arguments. It
// returns when the daemon is ready: its rules are in force.
func Start(ctx context.Context, n *lab.Node, binary, name string, config []byte, args ...string) (*Daemon, error) {
	d := &Daemon{
		Client: api.NewClient(filepath.Join(n.StateDir(), "sluice.sock")),
		File:   filepath.Join(n.StateDir(), "config", name),
		node:   n,
		binary: binary,
		args:   args,
	}
	if err := os.MkdirAll(filepath.Dir(d.File), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(d.File, config, 0o644); err != nil {
		return nil, err
	}
	return d, d.Restart(ctx)
}

// Restart runs the daemon again after [Daemon.Kill] or [Daemon.Stop].
func (d *Daemon) Restart(ctx context.Context) error {
	d.log = &tail{}
	d.exited = make(chan struct{})
	d.cmd = d.Command(ctx, append([]string{"run", "-c", d.File}, d.args...)...)
	// Ctrl-C at the terminal must reach only the caller, which ends the daemon itself.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	if err := d.cmd.Start(); err != nil {
		return err
	}
	cmd, exited := d.cmd, d.exited
	go func() {
		_ = cmd.Wait() // Stop checks the exit code
		close(exited)
	}()
	deadline := time.NewTimer(readyTime)
	defer deadline.Stop()
	for {
		_, err := d.Status(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-d.exited:
			return d.exitError()
		case <-ctx.Done():
			return errors.Join(ctx.Err(), d.Kill())
		case <-deadline.C:
			return errors.Join(fmt.Errorf("the daemon is not ready after %v: %w\n%s", readyTime, err, d.log), d.Kill())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Command prepares another command of the binary in the daemon's node, for example "show". The end of ctx does not
// end it.
func (d *Daemon) Command(ctx context.Context, args ...string) *exec.Cmd {
	return d.node.Command(context.WithoutCancel(ctx), d.binary, append(args, "--state-dir", d.node.StateDir())...)
}

// PID returns the process id of the daemon.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Log returns the last part of the daemon's output.
func (d *Daemon) Log() string { return d.log.String() }

// Signal sends a signal to the daemon.
func (d *Daemon) Signal(sig syscall.Signal) error { return d.cmd.Process.Signal(sig) }

// Stop ends the daemon, which removes its rules, and waits for its exit. An exit code other than 0 is an error.
func (d *Daemon) Stop() error {
	if err := d.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return d.AwaitEnd()
}

// AwaitEnd waits for the daemon's exit. An exit code other than 0 is an error.
func (d *Daemon) AwaitEnd() error {
	select {
	case <-d.exited:
	case <-time.After(endTime):
		_ = d.Signal(syscall.SIGQUIT) // the Go runtime prints the stack of every goroutine and exits
		select {
		case <-d.exited:
		case <-time.After(time.Second):
		}
		return errors.Join(fmt.Errorf("the daemon did not end within %v:\n%s", endTime, d.log), d.Kill())
	}
	if !d.cmd.ProcessState.Success() {
		return d.exitError()
	}
	return nil
}

// Kill ends the daemon with SIGKILL, as a crash would.
func (d *Daemon) Kill() error {
	err := d.cmd.Process.Kill()
	<-d.exited
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func (d *Daemon) exitError() error {
	return fmt.Errorf("the daemon has ended (%v):\n%s", d.cmd.ProcessState, d.log)
}

// Backend returns the current state of a backend.
func (d *Daemon) Backend(ctx context.Context, service, name string) (api.Backend, error) {
	all, err := d.Backends(ctx)
	if err != nil {
		return api.Backend{}, err
	}
	for _, b := range all {
		if b.Service == service && b.Name == name {
			return b, nil
		}
	}
	return api.Backend{}, fmt.Errorf("service %s has no backend %s", service, name)
}

// AwaitUse waits until a backend accepts new flows (inUse) or accepts none, and returns the time of the observation.
func (d *Daemon) AwaitUse(ctx context.Context, service, name string, inUse bool) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for {
		b, err := d.Backend(ctx, service, name)
		if err == nil && b.InUse == inUse {
			return time.Now(), nil
		}
		select {
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("service %s: backend %s: wait for in-use %t (state %q): %w\n%s",
				service, name, inUse, b.State, errors.Join(err, ctx.Err()), d.log)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// tail holds the last lines of the daemon's output.
type tail struct {
	mu  sync.Mutex // protects buf
	buf bytes.Buffer
}

// tailBytes is the size of the stored output.
const tailBytes = 32 << 10

// Write appends to the log.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - tailBytes; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(t.buf.String())
}
