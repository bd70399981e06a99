// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// lines collects log lines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestServiceLog finds new connections in the log, with prefix and level, and not more than the rate allows.
func TestServiceLog(t *testing.T) {
	const yaml = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, log: {prefix: "web: ", level: warning, rate: 1/hour, burst: 2}, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`
	hook := hooks[0]
	l := labFor(t, lab.Balancer(), hook)
	serve(t, l.Node("s1"), ":8080")
	var out lines
	var d *Datapath
	err := l.Node("gateway").Do(func() (err error) {
		d, err = Open(Options{StateDir: t.TempDir(), Dir: pinsOf(t), Log: slog.New(slog.NewTextHandler(&out, nil))})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	defer d.Remove(context.Background())
	apply(t, d, hook, yaml)
	for range 4 {
		if _, _, err := ask(l.Node("client"), "tcp", "192.0.2.10:80"); err != nil {
			t.Fatal(err)
		}
	}
	labtest.Eventually(t, patience, "two lines", func() error {
		if n := strings.Count(out.String(), "web: IN=wan0 OUT= SRC=10.0.1.2 DST=192.0.2.10 LEN="); n != 2 {
			return fmt.Errorf("%d lines in:\n%s", n, out.String())
		}
		return nil
	})
	if s := out.String(); !strings.Contains(s, "level=WARN") || !strings.Contains(s, "PROTO=TCP SPT=") || !strings.Contains(s, " DPT=80") {
		t.Errorf("log:\n%s", s)
	}
}
