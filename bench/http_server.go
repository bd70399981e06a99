// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/pause"
)

// tool returns a check for programs that a row needs. The check names a missing program, or returns "".
func tool(names ...string) func(Point) string {
	return func(Point) string {
		for _, n := range names {
			if _, err := exec.LookPath(n); err != nil {
				return n + " is not installed"
			}
		}
		return ""
	}
}

// daemon runs a program in a node until the trial ends. Its files are in a private directory, which replaces DIR in
// the arguments.
func daemon(t *Trial, node *lab.Node, files map[string]string, args ...string) (*exec.Cmd, error) {
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() error { return os.RemoveAll(dir) })
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.ReplaceAll(text, "DIR", dir)), 0o644); err != nil {
			return nil, err
		}
	}
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "DIR", dir)
	}
	cmd := node.Command(t, args[0], args[1:]...)
	// The daemon ends its own child processes. They may keep the output open, so the wait for them is bounded.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 3 * time.Second
	var words bytes.Buffer
	cmd.Stdout, cmd.Stderr = &words, &words
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", args[0], err)
	}
	ended := make(chan struct{})
	go func() {
		cmd.Wait() // after the interrupt, the exit status does not matter
		close(ended)
	}()
	t.Cleanup(func() error {
		select {
		case <-ended:
			if t.Err() != nil {
				return nil
			}
			return fmt.Errorf("%s ended early: %.300s", args[0], strings.TrimSpace(words.String()))
		default:
		}
		cmd.Process.Signal(os.Interrupt)
		select {
		case <-ended:
		case <-time.After(3 * time.Second):
			cmd.Process.Kill()
			<-ended
		}
		return nil
	})
	return cmd, nil
}

// nginxConf serves 210 bytes from memory with two workers.
const nginxConf = `daemon off; worker_processes 2; worker_rlimit_nofile 40000; pid DIR/nginx.pid; error_log stderr crit;
events { worker_connections 20000; }
http { access_log off; client_body_temp_path DIR/a; proxy_temp_path DIR/b; fastcgi_temp_path DIR/c; uwsgi_temp_path DIR/d; scgi_temp_path DIR/e;
 server { listen 80 backlog=20000 reuseport; listen [::]:80 backlog=20000 reuseport; location / { return 200 "%s"; } } }
`

// startWeb runs nginx on the server node and waits until it listens.
func startWeb(t *Trial, n *network) (*exec.Cmd, error) { return startWebOn(t, n, n.server) }

// startWebOn runs nginx on a node and waits until it listens.
func startWebOn(t *Trial, n *network, node *lab.Node) (*exec.Cmd, error) {
	conf := fmt.Sprintf(nginxConf, strings.Repeat("x", 60))
	cmd, err := daemon(t, node, map[string]string{"nginx.conf": conf}, "nginx", "-c", "DIR/nginx.conf", "-e", "stderr")
	if err != nil {
		return nil, err
	}
	return cmd, n.waitFor(t, node, "127.0.0.1:80")
}

// waitFor waits until something listens.
func (n *network) waitFor(ctx context.Context, node *lab.Node, address string) error {
	var err error
	for range 200 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c, dialErr := node.Dial(ctx, nil, "tcp", address)
		if dialErr == nil {
			return c.Close()
		}
		err = dialErr
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// askWeb runs the HTTP client in the client node. The client is a second process of this program, because a Go
// process cannot move all its threads into a namespace.
func askWeb(t *Trial, n *network, url string, connections int) (*load.HTTPResult, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := n.client.Command(t, self, "load", "http", "--json", "--seconds", strconv.FormatFloat(t.Seconds, 'f', -1, 64),
		"--connections", strconv.Itoa(connections), "--timeout", "5s", url)
	var words bytes.Buffer
	cmd.Stderr = &words
	var out []byte
	err = t.withProfile("", func() (err error) {
		out, err = cmd.Output()
		if len(out) > 0 { // the client failed without an answered request and reports why
			err = nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("load http: %w: %.300s", err, strings.TrimSpace(words.String()))
	}
	var r load.HTTPResult
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, fmt.Errorf("load http: %w", err)
	}
	return &r, nil
}

// wait sleeps for ms milliseconds or until the trial ends.
func wait(ctx context.Context, ms int) error {
	return pause.For(ctx, time.Duration(ms)*time.Millisecond)
}

func isReadable(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
