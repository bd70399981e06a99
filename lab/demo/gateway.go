// SPDX-License-Identifier: Apache-2.0

package demo

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
	"github.com/sluice-lb/sluice/examples"
	"github.com/sluice-lb/sluice/lab"
)

// gateway is a running daemon.
type gateway struct {
	*api.Client
	stage  *stage
	node   *lab.Node
	file   string
	cmd    *exec.Cmd
	log    *logTail
	exited chan struct{} // closed when the process has ended
}

// start runs the daemon in a node with one of the examples, and returns when it is ready.
func (s *stage) start(ctx context.Context, node, example string) (*gateway, error) {
	s.example = example
	s.opt.Progress("examples/" + example)
	n := s.lab.Node(node)
	data, err := examples.Files.ReadFile(example)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(n.StateDir(), "config", example)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(file, data, 0o644); err != nil {
		return nil, err
	}
	g := &gateway{stage: s, node: n, file: file, Client: api.NewClient(filepath.Join(n.StateDir(), "sluice.sock"))}
	if err := g.run(ctx); err != nil {
		return nil, err
	}
	return g, g.sayPlaces(ctx)
}

// run starts the process and waits until it answers.
func (g *gateway) run(ctx context.Context) error {
	g.log = &logTail{}
	g.exited = make(chan struct{})
	// The demo ends the daemon itself: neither its context nor the terminal's Ctrl-C may.
	g.cmd = g.node.Command(context.WithoutCancel(ctx), g.stage.opt.Sluice, "run", "-c", g.file, "--state-dir", g.node.StateDir())
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	if err := g.cmd.Start(); err != nil {
		return err
	}
	exited := g.exited
	go func() {
		_ = g.cmd.Wait() // the exit code is asked for where it matters
		close(exited)
	}()
	err := eventually(ctx, 20*time.Second, "the daemon to be ready", func() (bool, error) {
		select {
		case <-exited:
			return true, nil
		default:
		}
		_, err := g.Status(ctx)
		return err == nil, err
	})
	select {
	case <-exited:
		return g.ended()
	default:
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%w\n%s", err, g.log), g.kill())
	}
	return nil
}

func (g *gateway) ended() error {
	return fmt.Errorf("the daemon has ended (%v):\n%s", g.cmd.ProcessState, g.log)
}

// sayPlaces tells which datapath carries what.
func (g *gateway) sayPlaces(ctx context.Context) error {
	services, err := g.Services(ctx)
	if err != nil {
		return err
	}
	for _, s := range services {
		g.stage.say("service %s: %s, %s, on %s", s.Name, s.Mode, s.Scheduler, s.Datapath)
	}
	rules, err := g.NAT(ctx)
	if err != nil {
		return err
	}
	for _, r := range rules {
		g.stage.say("nat rule %s: %s, on %s", r.Name, r.Type, r.Datapath)
	}
	return nil
}

// stop ends the daemon, which takes its rules along.
func (g *gateway) stop() error {
	if err := g.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-g.exited:
	case <-time.After(10 * time.Second):
		return errors.Join(errors.New("the daemon did not end within 10 s of SIGTERM"), g.kill())
	}
	if code := g.cmd.ProcessState.ExitCode(); code != 0 {
		return g.ended()
	}
	return nil
}

// kill ends the daemon as a crash would.
func (g *gateway) kill() error {
	err := g.cmd.Process.Kill()
	<-g.exited
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// backend returns the present state of a backend.
func (g *gateway) backend(ctx context.Context, service, name string) (api.Backend, error) {
	all, err := g.Backends(ctx)
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

// until waits for a backend to take, or not to take, new flows, and returns when that was.
func (g *gateway) until(ctx context.Context, service, name string, inUse bool) (time.Time, error) {
	what := fmt.Sprintf("backend %s of %s to be in use: %t", name, service, inUse)
	err := eventually(ctx, 15*time.Second, what, func() (bool, error) {
		b, err := g.backend(ctx, service, name)
		return b.InUse == inUse, err
	})
	return time.Now(), err
}

// logTail keeps the last lines that the daemon wrote.
type logTail struct {
	mu  sync.Mutex // protects buf
	buf bytes.Buffer
}

// tailBytes is how much of the daemon's log an error shows.
const tailBytes = 4096

// Write adds to the log.
func (t *logTail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - 4*tailBytes; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *logTail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf.Bytes()
	if len(b) > tailBytes {
		b = b[len(b)-tailBytes:]
	}
	return strings.TrimSpace(string(b))
}
