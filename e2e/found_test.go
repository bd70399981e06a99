// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestBackendsOfOthers sends requests to servers that the configuration does not name: servers of a farm in
// nftlb's API, of a DNS name, and of a directory. It follows changes of all three.
func TestBackendsOfOthers(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		names := serveNames(t, l.Node("s9"), "10.0.2.9:53")
		names.Store([]string{"app.test. 1 A 10.0.2.2"})
		dir, key := t.TempDir(), filepath.Join(t.TempDir(), "key")
		list := func(text string) {
			t.Helper()
			file := filepath.Join(dir, "web.yaml")
			if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(file+".new", file); err != nil {
				t.Fatal(err)
			}
		}
		list("[{name: a, address: 10.0.2.2, port: 8080}]\n")
		if err := os.WriteFile(key, []byte("secret\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		gateway := l.Node("gateway")
		d := start(t, gateway, force+fmt.Sprintf(`
services:
  - {name: dns, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.10, ports: [80]}], backends-from: {dns: app.test, servers: ["10.0.2.9"], port: 8080, hold: 1s}}
  - {name: files, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.11, ports: [80]}], backends-from: {directory: %q}}
`, dir), "--nftlb-api", "127.0.0.1:5555", "--nftlb-key", key)
		served := func(target string, by ...string) {
			t.Helper()
			labtest.Eventually(t, patience, fmt.Sprintf("%s is served by %v", target, by), func() error {
				tally := webLoad(l, target, 20).Run(t.Context())
				if got := slices.Sorted(maps.Keys(tally.Servers())); tally.Good() != 20 || !slices.Equal(got, by) {
					return fmt.Errorf("%d of 20 answered, by %v, causes %v", tally.Good(), got, tally.Causes())
				}
				return nil
			})
		}
		served("192.0.2.10:80", "a")
		served("192.0.2.11:80", "a")
		farm := func(method, path, body string) {
			t.Helper()
			if err := askNftlb(t, gateway, method, path, body); err != nil {
				t.Fatal(err)
			}
		}
		farm("POST", "/farms", `{"farms": [{"name": "web", "virtual-addr": "192.0.2.12", "virtual-ports": "80", "mode": "dnat", "state": "up", "backends": [
			{"name": "a", "ip-addr": "10.0.2.2", "port": "8080", "state": "up"}, {"name": "b", "ip-addr": "10.0.2.3", "port": "8080", "state": "up"}]}]}`)
		// Discovery takes time, while a request to the API is in force when it returns.
		names.Store([]string{"app.test. 1 A 10.0.2.3"})
		list("[{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]\n")
		if by := mustAnswer(t, webLoad(l, "192.0.2.12:80", 20)).Servers(); by["a"] == 0 || by["b"] == 0 {
			t.Errorf("the farm is served by %v", by)
		}
		farm("DELETE", "/farms/web/backends/a", "")
		if by := mustAnswer(t, webLoad(l, "192.0.2.12:80", 20)).Servers(); by["b"] != 20 {
			t.Errorf("without one of its backends the farm is served by %v", by)
		}
		served("192.0.2.10:80", "b")
		served("192.0.2.11:80", "a", "b")
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// serveNames answers DNS queries with the records of the queried name and type.
func serveNames(t *testing.T, n *lab.Node, at string) *atomic.Value {
	t.Helper()
	c, err := n.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	var records atomic.Value // of []string
	s := &dns.Server{PacketConn: c, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		for _, text := range records.Load().([]string) {
			rr, err := dns.NewRR(text)
			if h := q.Question[0]; err == nil && rr.Header().Name == h.Name && rr.Header().Rrtype == h.Qtype {
				m.Answer = append(m.Answer, rr)
			}
		}
		_ = w.WriteMsg(m) // the client repeats a query without an answer
	})}
	go func() { _ = s.ActivateAndServe() }()
	t.Cleanup(func() { _ = s.Shutdown() })
	return &records
}

// askNftlb asks the API of nftlb on the gateway; another status than 200 is an error.
func askNftlb(t *testing.T, gateway *lab.Node, method, path, body string) error {
	c, err := gateway.Dial(t.Context(), &net.Dialer{}, "tcp", "127.0.0.1:5555")
	if err != nil {
		return err
	}
	defer c.Close()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://127.0.0.1:5555"+path, bytes.NewBufferString(body))
	if err != nil {
		return err
	}
	r.Header.Set("Key", "secret")
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return c, nil }, DisableKeepAlives: true}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	return err
}
