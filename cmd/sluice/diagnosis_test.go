// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// console collects the output of a running command.
type console struct {
	mu   sync.Mutex
	text strings.Builder
}

func (c *console) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.Write(b)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String()
}

// faultyRouter returns a router with a fault that needs no host-wide setting.
func faultyRouter(t *testing.T, name string) (*lab.Lab, faults.Case) {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	for _, c := range faults.Cases() {
		if c.Name == name && c.Host == nil {
			l := labtest.New(t, faults.Topology("cli"))
			if err := c.Setup(t.Context(), l); err != nil {
				t.Fatal(err)
			}
			return l, c
		}
	}
	t.Fatalf("there is no case %s", name)
	return nil, faults.Case{}
}

// during runs a command that runs until Ctrl-C, and starts traffic once it watches.
func during(t *testing.T, traffic func(context.Context) error, args ...string) (stdout string) {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out, errs console
	done := make(chan int, 1)
	go func() { done <- execute(ctx, args, strings.NewReader(""), &out, &errs) }()
	labtest.Eventually(t, time.Minute, "the command to begin", func() error {
		if !strings.Contains(errs.String(), "watching") && !strings.Contains(errs.String(), "sampling") {
			return fmt.Errorf("it says %q", errs.String())
		}
		return nil
	})
	if err := traffic(ctx); err != nil {
		t.Error(err)
	}
	interrupt()
	if code := <-done; code != exitOK {
		t.Errorf("%v: exit code %d: %s", args, code, errs.String())
	}
	return out.String()
}

// TestDrops watches a router without free SNAT ports. It checks the cause, both sides of NAT, the line that
// reconciles events and counter, and the capture.
func TestDrops(t *testing.T) {
	l, c := faultyRouter(t, "snat-ports")
	capture := filepath.Join(t.TempDir(), "drops.pcapng")
	refused := 0
	text := during(t, func(ctx context.Context) (err error) {
		refused, err = c.Traffic(ctx, l)
		return err
	}, "drops", "--netns", l.Node("gateway").Path(), "--seconds", "0", "--pcap", capture, "--stack")
	for _, want := range []string{
		fmt.Sprintf("events %d, Δconntrack.drop %d (0 unexplained)", refused, refused),
		fmt.Sprintf("events %d, Δconntrack.insert_failed %d (0 unexplained)", refused, refused),
		"tcp 198.51.100.1:", // after NAT
		"before NAT 192.0.2.2:", "nf_hook_slow",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("lacks %q:\n%s", want, text)
		}
	}
	packets, err := os.ReadFile(capture)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(packets, []byte{0x0a, 0x0d, 0x0d, 0x0a}) || !bytes.Contains(packets, []byte("snat-ports")) && !bytes.Contains(packets, []byte("port")) {
		t.Errorf("%d bytes that are no pcapng with the cause as comment", len(packets))
	}
	// A filter that matches no packet.
	text = during(t, func(ctx context.Context) error { _, err := c.Traffic(ctx, l); return err },
		"drops", "udp", "port", "53", "--netns", l.Node("gateway").Path(), "--seconds", "0")
	if !strings.Contains(text, "nothing was dropped") {
		t.Errorf("a filter lets through what it does not match:\n%s", text)
	}
}

// TestProfileFiles expects a self-contained flame graph with search and zoom.
func TestProfileFiles(t *testing.T) {
	l, c := faultyRouter(t, "linear-rules")
	svg := filepath.Join(t.TempDir(), "flame.svg")
	folded := filepath.Join(t.TempDir(), "folded")
	text := during(t, func(ctx context.Context) error { _, err := c.Traffic(ctx, l); return err },
		"profile", "--netns", l.Node("gateway").Path(), "--seconds", "0", "--svg", svg, "--folded", folded)
	if !strings.Contains(text, "µs") {
		t.Errorf("no time for each packet:\n%s", text)
	}
	picture, err := os.ReadFile(svg)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<svg", "<script", "search", "zoom"} {
		if !bytes.Contains(bytes.ToLower(picture), []byte(want)) {
			t.Errorf("the flame graph has no %s", want)
		}
	}
	if m := regexp.MustCompile(`(?:href|src)="https?:`).Find(picture); m != nil {
		t.Errorf("the flame graph needs the network: %s", m)
	}
	if stacks, err := os.ReadFile(folded); err != nil || !regexp.MustCompile(`(?m)^\S.*;.* \d+$`).Match(stacks) {
		t.Errorf("folded stacks: %v\n%.200s", err, stacks)
	}
}

// TestDoctorForms reads the report of a faulty router in each format. All must begin with the same cause.
func TestDoctorForms(t *testing.T) {
	l, c := faultyRouter(t, "deny-rule")
	run := func(args ...string) (string, int) {
		t.Helper()
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond): // 1,000 packets a second
					if _, err := c.Traffic(t.Context(), l); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
		defer func() { close(stop); wg.Wait() }()
		out, errs, code := sluice(t, append([]string{"doctor", "--netns", l.Node("gateway").Path(), "--seconds", "1"}, args...)...)
		if code > 2 {
			t.Errorf("%v: exit code %d: %s", args, code, errs)
		}
		return out, code
	}
	text, code := run()
	if _, conclusion, _ := strings.Cut(text, "Conclusion"); code != 1 || !strings.Contains(conclusion, "udp dport 53") {
		t.Errorf("exit code %d:\n%s", code, text)
	}
	text, _ = run("--markdown")
	if !strings.HasPrefix(text, "#") || !strings.Contains(text, "RL15") {
		t.Errorf("no Markdown:\n%s", text)
	}
	text, _ = run("--json")
	var report struct {
		Conclusion []struct{ Check string }
		Worst      string
	}
	if err := json.Unmarshal([]byte(text), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Conclusion) == 0 || report.Conclusion[0].Check != "RL15" || report.Worst != "warn" {
		t.Errorf("%s, %+v", report.Worst, report.Conclusion)
	}
}

// TestUnexamined expects different exit codes for a failed examination and a warning.
func TestUnexamined(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"doctor", "--netns", "/nowhere"}, exitUnexamined},
		{[]string{"doctor", "--seconds", "0"}, exitUsage},
	} {
		if _, errs, code := sluice(t, c.args...); code != c.want || errs == "" {
			t.Errorf("%v: exit code %d, want %d: %s", c.args, code, c.want, errs)
		}
	}
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	var out, errs console
	if code := execute(ctx, []string{"doctor", "--netns", "/proc/self/ns/net"}, strings.NewReader(""), &out, &errs); code != exitUnexamined || !strings.Contains(errs.String(), "interrupted") {
		t.Errorf("interrupted: exit code %d, want %d: %s", code, exitUnexamined, errs.String())
	}
}
