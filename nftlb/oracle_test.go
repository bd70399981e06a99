// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// oracle is a real nftlb.
type oracle struct {
	client *http.Client
	node   *lab.Node
	log    *logged
}

// logged is the log of nftlb.
type logged struct {
	mu   sync.Mutex
	text []byte
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	return len(b), nil
}

// confused reports whether the kernel refused rules of nftlb. nftlb then recreates all rules and forgets
// elements of lists and its position in the document.
func (l *logged) confused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.text, []byte("nft command error"))
}

func newOracle(t *testing.T) *oracle {
	t.Helper()
	if os.Getenv("SLUICE_NFTLB") == "" {
		t.Skip("SLUICE_NFTLB=1 compares with a real nftlb, which ends now and then at requests that are right")
	}
	labtest.Require(t, labtest.Root, labtest.Tool("nftlb"))
	o := &oracle{log: &logged{}, node: labtest.New(t, lab.Balancer()).Node("gateway")}
	cmd := o.node.Command(context.Background(), "nftlb", "-k", testKey, "-H", "127.0.0.1", "-P", "5555", "-l", "3", "-L", "1")
	cmd.Stdout = o.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	o.client = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return o.node.Dial(ctx, &net.Dialer{}, network, address)
	}}}
	labtest.Eventually(t, 10*time.Second, "nftlb answers", func() error {
		_, _, err := o.ask("GET", "/farms", "")
		return err
	})
	return o
}

func (o *oracle) ask(method, path, body string) (int, string, error) {
	r, err := http.NewRequest(method, "http://127.0.0.1:5555"+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	r.Header.Set("Key", testKey)
	answer, err := o.client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	raw, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(raw), err
}

// compare sends a request to both, and returns how their answers differ.
func (o *oracle) compare(t *testing.T, a *API, method, path, body string) (string, error) {
	t.Helper()
	wantCode, want, err := o.ask(method, path, body)
	if err != nil {
		return "", fmt.Errorf("%s %s %s: %w", method, path, body, err) // nftlb crashed, or works forever
	}
	var code int
	var got string
	if err := o.node.Do(func() error { code, got = ask(t, a, method, path, body); return nil }); err != nil {
		t.Fatal(err)
	}
	if code == wantCode && got == want {
		return "", nil
	}
	return fmt.Sprintf("%s %s %s\ngot:  %d %s\nwant: %d %s", method, path, body, code, difference(got, want), wantCode, difference(want, got)), nil
}

// TestSuiteAgainstNftlb sends the requests of nftlb's test suite to nftlb and to Sluice.
func TestSuiteAgainstNftlb(t *testing.T) {
	root := os.Getenv("SLUICE_NFTLB_SUITE")
	if root == "" {
		t.Skip("SLUICE_NFTLB_SUITE names no directory with the test suite of nftlb")
	}
	o := newOracle(t)
	a, _ := newTestAPI(t, Host{})
	for _, c := range suite(t, root) {
		kind, _, _ := strings.Cut(c.path, "/")
		diff, err := o.compare(t, a, c.method, "/"+c.path, c.body)
		objects, err2 := o.compare(t, a, "GET", "/"+kind, "")
		if err = errors.Join(err, err2); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if diff+objects != "" {
			t.Errorf("%s: %s\n%s", c.name, diff, objects)
		}
	}
}

// TestAgainstNftlb sends random requests to nftlb and to Sluice. SLUICE_NFTLB_RUNS says how often
// both begin anew.
func TestAgainstNftlb(t *testing.T) {
	runs, _ := strconv.Atoi(os.Getenv("SLUICE_NFTLB_RUNS"))
	compared := 0
	for range max(runs, 3) {
		compared += againstNftlb(t, rand.Uint64())
	}
	t.Logf("%d requests compared", compared)
	if compared < 10 {
		t.Errorf("only %d requests were compared: nftlb fails at them", compared)
	}
}

// againstNftlb returns how many requests were compared before the kernel refused rules of nftlb.
func againstNftlb(t *testing.T, seed uint64) int {
	t.Helper()
	g := &generator{rand.New(rand.NewPCG(seed, 0))}
	o := newOracle(t)
	a, _ := newTestAPI(t, Host{})
	var sent []string
	for range 150 {
		method, path, body := g.request()
		sent = append(sent, method+" "+path+" "+body)
		diff, err := o.compare(t, a, method, path, body)
		for _, kind := range []string{"/farms", "/addresses", "/policies"} {
			if diff == "" && err == nil {
				diff, err = o.compare(t, a, "GET", kind, "")
			}
		}
		if err != nil || o.log.confused() {
			return len(sent) - 1
		}
		if diff != "" {
			t.Fatalf("seed %d, after %d requests: %s\n%s", seed, len(sent), strings.Join(sent[max(0, len(sent)-8):], "\n"), diff)
		}
	}
	return len(sent)
}
