// SPDX-License-Identifier: Apache-2.0

// Package program runs programs of other projects in the nodes of a lab: dnsmasq (DHCP and DNS) and OpenVPN. An
// office router runs them next to Sluice.
package program

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// Missing returns the reason why a program cannot run on this host, or "".
func Missing(names ...string) string {
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			return name + " is not installed"
		}
	}
	return ""
}

// readyTime bounds the wait for the start of a program, endTime for its end after SIGTERM.
const (
	readyTime = time.Minute
	endTime   = 5 * time.Second
)

// Program is a running program.
type Program struct {
	name   string
	cmd    *exec.Cmd
	log    *log
	exited chan struct{} // closed after the process has exited
}

// start runs a program in a node and returns when its output contains the text ready. The end of ctx ends the wait
// and the program.
func start(ctx context.Context, n *lab.Node, ready string, args ...string) (*Program, error) {
	if why := Missing(args[0]); why != "" {
		return nil, fmt.Errorf("node %s: %s", n.Short(), why)
	}
	p := &Program{name: args[0], exited: make(chan struct{}), log: &log{ready: ready, seen: make(chan struct{})}}
	p.cmd = n.Command(context.WithoutCancel(ctx), args[0], args[1:]...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C at the terminal must reach only the caller
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.WaitDelay = time.Second // a child may keep the output open
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("node %s: %s: %w", n.Short(), p.name, err)
	}
	go func() {
		_ = p.cmd.Wait() // the output holds the reason
		close(p.exited)
	}()
	var err error
	select {
	case <-p.log.seen:
		return p, nil
	case <-p.exited:
		err = fmt.Errorf("exited (%v)", p.cmd.ProcessState)
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(readyTime):
		err = fmt.Errorf("not ready after %v", readyTime)
	}
	_ = p.Stop() // err contains the reason
	return nil, fmt.Errorf("node %s: %s: %w\n%s", n.Short(), p.name, err, p.Log())
}

// PID returns the process id of the program.
func (p *Program) PID() int { return p.cmd.Process.Pid }

// Log returns the last part of the program's output.
func (p *Program) Log() string { return p.log.String() }

// Stop ends the program with SIGTERM and, five seconds later, with SIGKILL. An earlier exit is an error.
func (p *Program) Stop() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended early (%v)\n%s", p.name, p.cmd.ProcessState, p.Log())
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // the process has already exited
	select {
	case <-p.exited:
	case <-time.After(endTime):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
	return nil
}

// log holds the last part of a program's output. It closes seen when the output contains ready.
type log struct {
	mu    sync.Mutex // protects buf and found
	buf   bytes.Buffer
	found bool

	ready string
	seen  chan struct{}
}

// logBytes is the size of the stored output.
const logBytes = 8 << 10

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(b)
	if !l.found && bytes.Contains(l.buf.Bytes(), []byte(l.ready)) {
		l.found = true
		close(l.seen)
	}
	if over := l.buf.Len() - logBytes; over > 0 {
		l.buf.Next(over)
	}
	return len(b), nil
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(l.buf.String())
}
