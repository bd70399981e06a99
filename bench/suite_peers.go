// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/load"
)

func peersSuite() Suite {
	s := Suite{
		Name: "peers", Title: "Beside proxies and other NATs, with real clients and servers",
		About: "A real HTTP client with 50 connections at once, a new connection for every request, asks nginx through each of " +
			"the peers that are installed; all on the CPUs of this machine. CPU is that of the whole machine, client and server included.",
		AllCPUs: true, Seconds: 2, MaxReps: 3,
		Points:  []Point{{Name: "50 connections", Value: 50}},
		Metrics: []Metric{{Name: "requests", Unit: "1/s"}, {Name: "CPU", Unit: "µs a request", LowerIsBetter: true, Digits: 1}},
		NotShown: []string{
			"Proxies' own strengths: they end connections, retry, and read HTTP; a NAT does none of this.",
		},
	}
	row := func(name, about string, absent func(Point) string, dest string, sets ...setup) Row {
		return Row{Name: name, About: about, Absent: absent, Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			if err := t.needConntrack(1 << 20); err != nil {
				return err
			}
			for _, set := range sets {
				if err := set(t, n); err != nil {
					return err
				}
			}
			return n.reportPeer(t, dest)
		}}
	}
	haproxy := func(t *Trial, n *network) error {
		_, err := daemon(t, n.gateway, map[string]string{"haproxy.cfg": fmt.Sprintf(haproxyConf, server4)}, "haproxy", "-db", "-f", "DIR/haproxy.cfg")
		if err != nil {
			return err
		}
		return n.waitFor(t, n.gateway, "127.0.0.1:8080")
	}
	stream := func(t *Trial, n *network) error {
		_, err := daemon(t, n.gateway, map[string]string{"nginx.conf": "load_module " + streamModulePath + ";\n" + fmt.Sprintf(streamConf, server4)}, "nginx", "-c", "DIR/nginx.conf", "-e", "stderr")
		if err != nil {
			return err
		}
		return n.waitFor(t, n.gateway, "127.0.0.1:8080")
	}
	gateway := "http://10.0.1.1:8080/"
	s.Rows = []Row{
		row("direct", "the gateway routes", tool("nginx"), "http://"+server4.String()+"/"),
		row("iptables DNAT", "one rule", tool("nginx", "iptables-legacy"), "http://"+vip4.String()+"/", iptablesRule("PREROUTING", "-d", vip4.String(), "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", server4.String()+":80")),
		row("HAProxy, TCP mode", "two threads", tool("nginx", "haproxy"), gateway, haproxy),
		row("nginx stream", "two workers", func(p Point) string {
			if why := tool("nginx")(p); why != "" {
				return why
			}
			if !isReadable(streamModulePath) {
				return "the stream module of nginx is not installed"
			}
			return ""
		}, gateway, stream),
		row("Tayga, NAT64", "a stateless translator in user space, IPv6 client, IPv4 server", tool("nginx", "tayga"), "http://[2001:db8:64::a00:202]/", setTayga),
		row("nftlb, dnat", "a load balancer on nftables: its own rules", tool("nginx", "nftlb"), "http://"+vip4.String()+"/", nftlb("dnat", "tcp", 80)),
		row("nftlb, snat", "the same, source addresses hidden", tool("nginx", "nftlb"), "http://"+vip4.String()+"/", nftlb("snat", "tcp", 80)),
	}
	real := func(r Row, dest string, conf service) Row {
		return sluiceRow(r.Name, r.About, map[bool]string{true: "nftables", false: "ebpf"}[conf.attach == ""],
			func(Point) string { return conf.yaml(Point{Value: 1 << 17}) },
			func(t *Trial, n *network) error { return n.reportPeer(t, dest) })
	}
	at4 := func(vip netip.Addr) string { return "http://" + netip.AddrPortFrom(vip, 80).String() + "/" }
	s.Rows = append(s.Rows,
		real(Row{Name: "sluice nftables dnat", About: "one service in mode dnat"}, at4(vip4), service{mode: "dnat", protocol: "tcp", port: 80, vip: vip4, backend: server4}),
		real(Row{Name: "sluice ebpf dnat (tc)", About: "one service in mode dnat"}, at4(vip4), service{mode: "dnat", protocol: "tcp", attach: "tc", port: 80, vip: vip4, backend: server4}),
		real(Row{Name: "sluice ebpf fullnat (tc)", About: "one service in mode fullnat"}, at4(vip4), service{mode: "fullnat", protocol: "tcp", attach: "tc", port: 80, vip: vip4, backend: server4}),
		real(Row{Name: "sluice ebpf FNAT64 (tc)", About: "IPv6 clients, an IPv4 server"}, at4(vip6), service{mode: "fullnat", protocol: "tcp", attach: "tc", port: 80, vip: vip6, backend: server4}))
	return s
}

const haproxyConf = `global
 maxconn 5000
 nbthread 2
defaults
 mode tcp
 timeout connect 5s
 timeout client 10s
 timeout server 10s
listen web
 bind :8080
 server a %s:80
`

const streamConf = `daemon off; worker_processes 2; pid DIR/nginx.pid; error_log stderr crit;
events { worker_connections 20000; }
stream { server { listen 8080 backlog=20000 reuseport; proxy_pass %s:80; } }
`

// streamModulePath is where Debian has nginx's stream module.
const streamModulePath = "/usr/lib/nginx/modules/ngx_stream_module.so"

// setTayga runs Tayga with a translation device on the gateway.
func setTayga(t *Trial, n *network) error {
	conf := "tun-device nat64\nipv4-addr 192.168.255.1\nipv6-addr fd00:2::ff\nprefix 2001:db8:64::/96\ndynamic-pool 192.168.255.0/24\ndata-dir DIR\n"
	if _, err := daemon(t, n.gateway, map[string]string{"tayga.conf": conf}, "sh", "-c", "tayga -c DIR/tayga.conf --mktun && exec tayga -d -c DIR/tayga.conf"); err != nil {
		return err
	}
	var err error
	for range 100 {
		if err = command(t, n.gateway, "", "ip", "link", "set", "nat64", "up"); err == nil {
			break
		}
		if waitErr := wait(t, 20); waitErr != nil {
			return waitErr
		}
	}
	for _, args := range [][]string{
		{"ip", "route", "add", "192.168.255.0/24", "dev", "nat64"},
		{"ip", "-6", "route", "add", "2001:db8:64::/96", "dev", "nat64"},
	} {
		if err == nil {
			err = command(t, n.gateway, "", args...)
		}
	}
	return err
}

// reportPeer sends requests for the trial's duration and reports the CPU time of the whole machine.
func (n *network) reportPeer(t *Trial, url string) error {
	if _, err := startWeb(t, n); err != nil {
		return err
	}
	before := readLoad()
	r, err := askWeb(t, n, url, t.Point.Value)
	if err != nil {
		return err
	}
	if r.Complete == 0 {
		return fmt.Errorf("no request was answered: %v", r.Errors)
	}
	if r.Failed > 0 {
		t.Note("%s requests failed: %v", load.Count(r.Failed), r.Errors)
	}
	t.Report("requests", r.RequestsPerSecond)
	t.Report("CPU", (readLoad().total-before.total)*1e6/float64(r.Complete))
	return nil
}
