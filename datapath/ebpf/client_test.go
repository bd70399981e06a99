// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// nginxBehindProxy parses the header, answers with the address in it, and serves and accepts large files.
const nginxBehindProxy = `daemon off;
master_process off;
pid %[1]s/pid;
error_log %[1]s/error.log;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	client_max_body_size 64m;
	server {
		listen 8080 proxy_protocol;
		listen [::]:8080 proxy_protocol;
		location / { return 200 "$proxy_protocol_addr $proxy_protocol_port $proxy_protocol_server_addr $proxy_protocol_server_port"; }
		location /files/ { alias %[1]s/files/; dav_methods PUT; }
	}
}
`

// TestProxyV2 lets nginx parse the PROXY header: connections of both families to backends of both families,
// downloads and uploads of several megabytes on both hooks.
func TestProxyV2(t *testing.T) {
	const yaml = `
services:
  - {name: p44, listen: [{address: 192.0.2.20, ports: [44]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: p66, listen: [{address: "2001:db8::20", ports: [66]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: p64, listen: [{address: "2001:db8::20", ports: [64]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: own, listen: [{address: 192.0.2.20, ports: [45]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`
	labtest.Require(t, labtest.Tool("nginx"))
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			dir := t.TempDir()
			file := bytes.Repeat([]byte("sluice carries bytes in order\n"), 1<<17) // 3.9 MB
			serveNginx(t, l.Node("s1"), dir, file)
			d := gateway(t, l.Node("gateway"), hook, yaml)
			for _, c := range []struct{ addr, client string }{
				{"192.0.2.20:44", "10.0.1.2"}, {"[2001:db8::20]:66", "fd00:1::2"}, {"[2001:db8::20]:64", "fd00:1::2"}, {"192.0.2.20:45", "10.0.1.2"},
			} {
				var local string
				client := http.Client{Timeout: 2 * patience, Transport: &http.Transport{DialContext: func(context.Context, string, string) (conn net.Conn, err error) {
					err = l.Node("client").Do(func() (err error) { conn, err = net.DialTimeout("tcp", c.addr, patience); return err })
					if err == nil {
						local = conn.LocalAddr().String()
					}
					return conn, err
				}}}
				body, err := fetch(&client, "http://"+c.addr+"/")
				if err != nil {
					t.Fatalf("%s: %v\n%s", c.addr, err, describeReasons(d))
				}
				from, to := netip.MustParseAddrPort(local), netip.MustParseAddrPort(c.addr)
				if want := fmt.Sprintf("%s %d %s %d", from.Addr(), from.Port(), to.Addr(), to.Port()); string(body) != want || from.Addr().String() != c.client {
					t.Errorf("%s: the server reads %q from the header, want %q", c.addr, body, want)
				}
				if body, err = fetch(&client, "http://"+c.addr+"/files/big"); err != nil || sha256.Sum256(body) != sha256.Sum256(file) {
					t.Errorf("%s: download of %d bytes: %v, got %d", c.addr, len(file), err, len(body))
				}
				req, _ := http.NewRequest(http.MethodPut, "http://"+c.addr+"/files/up", bytes.NewReader(file))
				if r, err := client.Do(req); err != nil || r.StatusCode >= 300 {
					t.Errorf("%s: upload: %v %v", c.addr, r, err)
					continue
				}
				if up, err := os.ReadFile(filepath.Join(dir, "files", "up")); err != nil || !bytes.Equal(up, file) {
					t.Errorf("%s: upload: %v, the server has %d bytes of %d", c.addr, err, len(up), len(file))
				}
				os.Remove(filepath.Join(dir, "files", "up"))
				client.CloseIdleConnections()
			}
		})
	}
}

func fetch(c *http.Client, url string) ([]byte, error) {
	r, err := c.Get(url)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	return io.ReadAll(r.Body)
}

// serveNginx runs nginx on a node until the test ends.
func serveNginx(t *testing.T, n *lab.Node, dir string, file []byte) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, "files"), 0o777); err != nil {
		t.Fatal(err)
	}
	os.Chmod(dir, 0o777)
	os.Chmod(filepath.Join(dir, "files"), 0o777)
	conf := filepath.Join(dir, "nginx.conf")
	for name, b := range map[string][]byte{conf: fmt.Appendf(nil, nginxBehindProxy, dir), filepath.Join(dir, "files", "big"): file} {
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var log strings.Builder
	cmd := exec.Command("nginx", "-c", conf, "-p", dir, "-e", filepath.Join(dir, "error.log"))
	cmd.Stderr = &log
	if err := n.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	labtest.Eventually(t, patience, "nginx", func() error {
		return n.Do(func() error {
			c, err := net.Dial("tcp", "127.0.0.1:8080")
			if err != nil {
				return fmt.Errorf("%w: %s", err, log.String())
			}
			return c.Close()
		})
	})
}

// TestClientAddress passes the client's address to test servers. The server sends first, which it can only do
// after the header. With TOA, the connection also works with a kernel that does not know the option. Without a
// pool, the source is the address of the gateway.
func TestClientAddress(t *testing.T) {
	const yaml = `
services:
  - {name: p44, listen: [{address: 192.0.2.20, ports: [44]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, backends: [{name: a, address: 10.0.2.2, port: 9090}]}
  - {name: p64, listen: [{address: "2001:db8::20", ports: [64]}], protocol: tcp, mode: fullnat, client-address: proxy-v2, mss-clamp: true, backends: [{name: a, address: 10.0.2.2, port: 9090}]}
  - {name: t44, listen: [{address: 192.0.2.20, ports: [54]}], protocol: tcp, mode: fullnat, client-address: toa, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: t66, listen: [{address: "2001:db8::20", ports: [56]}], protocol: tcp, mode: fullnat, client-address: toa, mss-clamp: true, backends: [{name: a, address: "fd00:2::2", port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			serve(t, l.Node("s1"), ":8080")
			greet(t, l.Node("s1"), ":9090")
			d := gateway(t, l.Node("gateway"), hook, yaml)
			for _, c := range []struct{ addr, header string }{
				{"192.0.2.20:44", "\x21\x11\x00\x0c\x0a\x00\x01\x02\xc0\x00\x02\x14"},
				{"[2001:db8::20]:64", "\x21\x21\x00\x24\xfd\x00\x00\x01"},
			} {
				conn := transfer(t, l.Node("client"), c.addr)
				conn.SetDeadline(time.Now().Add(patience))
				b := make([]byte, 28)
				if _, err := io.ReadFull(conn, b); err != nil {
					t.Fatalf("%s: the server that speaks first: %v\n%s", c.addr, err, describeReasons(d))
				}
				if want := "\r\n\r\n\x00\r\nQUIT\n" + c.header; !strings.HasPrefix(string(b), want) {
					t.Errorf("%s: the server got %q, want %q first", c.addr, b, want)
				}
			}
			for addr, source := range map[string]string{"192.0.2.20:54": "10.0.2.1", "[2001:db8::20]:56": "fd00:2::1"} {
				_, client, err := ask(l.Node("client"), "tcp", addr)
				if err != nil {
					t.Fatalf("%s: %v\n%s", addr, err, describeReasons(d))
				}
				if a := netip.MustParseAddrPort(client).Addr().Unmap().String(); !strings.HasPrefix(a, source) {
					t.Errorf("%s: the server sees %s, want one of the gateway's, %s or more", addr, a, source)
				}
			}
		})
	}
}

// greet runs a server that first returns the first 28 bytes of the client.
func greet(t *testing.T, n *lab.Node, addr string) {
	t.Helper()
	listen(t, n, addr, func(c net.Conn) {
		io.CopyN(c, c, 28)
		io.Copy(io.Discard, c)
	})
}
