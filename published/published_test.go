// SPDX-License-Identifier: Apache-2.0

package published

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/firewall"
)

// engine serves an answer on a socket and returns its path.
func engine(t *testing.T, status int, answer string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "docker") // short: sockets have paths of 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer))
	})}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return socket
}

// TestAsk: published ports are listed in order, exposed ports are not.
func TestAsk(t *testing.T) {
	socket := engine(t, http.StatusOK, `[
		{"Id": "1", "Names": ["/web"], "Ports": [{"PrivatePort": 443, "Type": "tcp"},
			{"IP": "::", "PrivatePort": 80, "PublicPort": 8080, "Type": "tcp"}, {"IP": "0.0.0.0", "PrivatePort": 80, "PublicPort": 8080, "Type": "tcp"}],
			"NetworkSettings": {"Networks": {"bridge": {"IPAddress": "172.17.0.2", "GlobalIPv6Address": ""}}}},
		{"Id": "2", "Names": ["/dns"], "Ports": [{"IP": "192.0.2.1", "PrivatePort": 53, "PublicPort": 5353, "Type": "udp"}],
			"NetworkSettings": {"Networks": {"bridge": {"IPAddress": "172.17.0.3", "GlobalIPv6Address": "fd00::3"}}}}]`)
	ports, err := listContainers(t.Context(), socket)
	var got []string
	for _, p := range ports {
		got = append(got, p.Container+" "+p.String()+" "+p.To.String())
	}
	want := "dns 192.0.2.1:5353/udp 172.17.0.3:53, web 8080/tcp 172.17.0.2:80, web [::]:8080/tcp 172.17.0.2:80"
	if err != nil || strings.Join(got, ", ") != want {
		t.Errorf("%v\n got %s\nwant %s", err, strings.Join(got, ", "), want)
	}
}

// TestNoEngine: the error names the socket and the next step.
func TestNoEngine(t *testing.T) {
	for socket, want := range map[string]string{
		"/nowhere/docker.sock":                                  "docker: no engine answers at /nowhere/docker.sock: connect: no such file or directory: start Docker, or name its socket with --engine",
		engine(t, http.StatusInternalServerError, "out of ink"): "answers 500 Internal Server Error: out of ink",
		engine(t, http.StatusOK, "<html>"):                      "is no engine",
	} {
		if _, err := List(context.Background(), socket); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", socket, err, want)
		}
	}
}

// TestPaths: rules precede a proxy, and do not translate between the families.
func TestPaths(t *testing.T) {
	range8080 := []firewall.PortRange{{Low: 8080, High: 8080}}
	all4, all6, to := netip.IPv4Unspecified(), netip.IPv6Unspecified(), netip.MustParseAddrPort("172.17.0.2:80")
	for _, c := range []struct {
		at      netip.Addr
		rules   firewall.Ruleset
		proxied bool
		want    string
	}{
		{all4, firewall.Ruleset{Forwarded: range8080}, true, NFT},
		{all4, firewall.Ruleset{Forwarded: range8080, ForwardedLegacy: range8080}, false, Legacy},
		{all4, firewall.Ruleset{Forwarded: []firewall.PortRange{{Low: 1, High: 8079}}}, true, Proxy},
		{all4, firewall.Ruleset{}, false, None},
		{all6, firewall.Ruleset{Forwarded: range8080}, true, Proxy},
		{all6, firewall.Ruleset{Forwarded: range8080}, false, None},
	} {
		p := Port{Address: c.at, Port: 8080, Protocol: "tcp", To: to}
		if p.findPath(&c.rules, map[proxy]bool{{"tcp", c.at, 8080}: c.proxied}); p.Path != c.want || p.Proxied != c.proxied {
			t.Errorf("%+v: %s, want %s", c, p.Path, c.want)
		}
	}
}

// TestMeasure: both kinds of servers are measured, and each other port has a reason.
func TestMeasure(t *testing.T) {
	closes := func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1)) // the end of the client's data
		c.Close()
	}
	stays := func(c net.Conn) {
		<-t.Context().Done()
		c.Close()
	}
	for name, serve := range map[string]func(net.Conn){"closes": closes, "stays": stays} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go serve(c)
			}
		}()
		at := l.Addr().(*net.TCPAddr).AddrPort()
		ports := []Port{
			{Address: at.Addr(), Port: at.Port(), Protocol: "tcp", To: at, Path: NFT},
			{Address: at.Addr(), Port: at.Port(), Protocol: "udp", To: at, Path: NFT},
			{Address: at.Addr(), Port: at.Port(), Protocol: "tcp", To: at, Path: None},
			{Address: at.Addr(), Port: at.Port(), Protocol: "tcp", Path: Proxy},
		}
		if err := Measure(t.Context(), ports); err != nil {
			t.Fatal(err)
		}
		c := ports[0].Cost
		if c == nil || c.Connections == 0 || c.OnlyOpened != (name == "stays") || c.Added != c.Published-c.Direct {
			t.Errorf("%s: %+v, %s", name, c, ports[0].NotMeasured)
		}
		for _, p := range ports[1:] {
			if p.Cost != nil || p.NotMeasured == "" {
				t.Errorf("%s: %+v", name, p)
			}
		}
	}
}
