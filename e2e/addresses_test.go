// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// flat is a gateway between two networks without routes: a host is reachable only if it, or another host for it,
// answers ARP or neighbour discovery.
func flat(hook string) lab.Topology {
	t := lab.Topology{Name: "flat", Nodes: []lab.NodeSpec{
		{Name: "client"},
		{Name: "gateway", Forward: true},
		{Name: "lan", Switch: true},
		{Name: "near", Routes: []lab.Route{{To: "default", Via: "10.0.2.1"}, {To: "default6", Via: "fd00:2::1"}}},
		{Name: "s1", Routes: []lab.Route{{To: "default", Via: "10.0.2.1"}, {To: "default6", Via: "fd00:2::1"}},
			Addresses: []string{"10.0.2.30/32", "fd00:2::30/128"}, // the address for direct server return, on lo
			Sysctls:   map[string]string{"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}},
	}}
	end := func(node, iface string, addresses ...string) lab.End {
		return lab.End{Node: node, Iface: iface, Addresses: addresses, GRO: hook == "xdp", NoTxChecksum: hook == "xdp"}
	}
	t.Links = []lab.LinkSpec{
		{A: end("client", "eth0", "198.51.100.2/24", "2001:db8:100::2/64"), B: end("gateway", "wan0", "198.51.100.1/24", "2001:db8:100::1/64")},
		{A: end("gateway", "lan0", "10.0.2.1/24", "fd00:2::1/64"), B: end("lan", "gateway")},
		{A: end("s1", "eth0", "10.0.2.2/24", "fd00:2::2/64"), B: end("lan", "s1")},
		{A: end("near", "eth0", "10.0.2.50/24", "fd00:2::50/64"), B: end("lan", "near")},
	}
	return t
}

// heldCase is a configuration with addresses of no host, and an exchange that needs them.
type heldCase struct {
	name, config, held string
	from, to           string // node and endpoint of the request
	client             string // the client that the server sees
}

var heldCases = []heldCase{
	{"dnat", service("dnat", "198.51.100.20", "10.0.2.2", ""), "198.51.100.20", "client", "198.51.100.20:80", "198.51.100.2"},
	{"dnat6", service("dnat", "2001:db8:100::20", "fd00:2::2", ""), "2001:db8:100::20", "client", "[2001:db8:100::20]:80", "2001:db8:100::2"},
	{"fullnat", service("fullnat", "198.51.100.20", "10.0.2.2", "source-pool: [10.0.2.100]"), "10.0.2.100 198.51.100.20", "client", "198.51.100.20:80", "10.0.2.100"},
	{"fullnat6", service("fullnat", "2001:db8:100::20", "fd00:2::2", `source-pool: ["fd00:2::100"]`), "2001:db8:100::20 fd00:2::100", "client", "[2001:db8:100::20]:80", "fd00:2::100"},
	{"fullnat46", service("fullnat", "198.51.100.20", "fd00:2::2", `source-pool: ["fd00:2::100"]`), "198.51.100.20 fd00:2::100", "client", "198.51.100.20:80", "fd00:2::100"},
	{"stateless", service("stateless", "198.51.100.20", "10.0.2.2", ""), "198.51.100.20", "client", "198.51.100.20:80", "198.51.100.2"},
	{"stateless6", service("stateless", "2001:db8:100::20", "fd00:2::2", ""), "2001:db8:100::20", "client", "[2001:db8:100::20]:80", "2001:db8:100::2"},
	{"dsr", service("dsr", "10.0.2.30", "10.0.2.2", ""), "10.0.2.30", "near", "10.0.2.30:80", "10.0.2.50"},
	{"dsr6", service("dsr", "fd00:2::30", "fd00:2::2", ""), "fd00:2::30", "near", "[fd00:2::30]:80", "fd00:2::50"},
	{"port-forward", `nat: [{name: x, type: port-forward, listen: {address: 198.51.100.20, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2}}]`,
		"198.51.100.20", "client", "198.51.100.20:80", "198.51.100.2"},
	{"static", `nat: [{name: x, type: static, external: 198.51.100.20/32, internal: 10.0.2.2/32}]`,
		"198.51.100.20", "client", "198.51.100.20:80", "198.51.100.2"},
	{"static outwards", `nat: [{name: x, type: static, external: 198.51.100.20/32, internal: 10.0.2.50/32}]`,
		"198.51.100.20", "near", "198.51.100.2:80", "198.51.100.20"},
	{"snat", `nat: [{name: x, type: snat, source: [10.0.2.0/24], out: wan0, to: [198.51.100.30]}]`,
		"198.51.100.30", "near", "198.51.100.2:80", "198.51.100.30"},
	{"snat6", `nat: [{name: x, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:100::30"]}]`,
		"2001:db8:100::30", "near", "[2001:db8:100::2]:80", "2001:db8:100::30"},
	{"nat64", `nat: [{name: x, type: nat64, source: ["fd00:2::/64"], prefix: "64:ff9b::/96", pool: [198.51.100.30]}]`,
		"198.51.100.30", "near", "[64:ff9b::c633:6402]:80", "198.51.100.30"},
	{"masquerade", `services: [{name: web, listen: [{address: 198.51.100.20, ports: [80]}], protocol: tcp, mode: dnat, backends: [{address: 10.0.2.2}]}]
nat: [{name: x, type: masquerade, source: [10.0.2.0/24], out: wan0}]`, "198.51.100.20", "near", "198.51.100.2:80", "198.51.100.1"},
	{"masquerade6", `services: [{name: web, listen: [{address: "2001:db8:100::20", ports: [80]}], protocol: tcp, mode: dnat, backends: [{address: "fd00:2::2"}]}]
nat: [{name: x, type: masquerade, source: ["fd00:2::/64"], out: wan0}]`, "2001:db8:100::20", "near", "[2001:db8:100::2]:80", "2001:db8:100::1"},
}

func service(mode, vip, backend, extra string) string {
	if extra != "" {
		extra = ", " + extra
	}
	return fmt.Sprintf(`services: [{name: web, listen: [{address: "%s", ports: [80]}], protocol: tcp, mode: %s, backends: [{address: "%s"}]%s}]`, vip, mode, backend, extra)
}

// TestHeldAddresses reaches addresses that only Sluice holds, in every mode, from neighbours that use ARP or
// neighbour discovery alone. At the end they are gone.
func TestHeldAddresses(t *testing.T) {
	t.Parallel()
	labtest.Require(t, labtest.Root)
	for _, hook := range []string{"nftables", "tc", "xdp"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel() // most of the time is duplicate address detection
			l := labtest.New(t, flat(hook))
			for _, s := range []string{"s1", "client"} {
				serveWeb(t, l, s+" "+s+" [::]:80")
			}
			for _, c := range heldCases {
				t.Run(c.name, func(t *testing.T) { c.run(t, l, hook) })
			}
		})
	}
}

func (c heldCase) run(t *testing.T, l *lab.Lab, hook string) {
	d := start(t, l.Node("gateway"), forced(hook, ""))
	_, err := d.Apply(t.Context(), "test.yaml", []byte(forced(hook, c.config)))
	if err != nil && strings.Contains(err.Error(), "no datapath carries it") {
		t.Skipf("%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if hook == "nftables" && c.name == "stateless" { // the kernel cannot do this with an address of its own
		status, err := d.Status(t.Context())
		if err != nil || !strings.Contains(fmt.Sprint(status.Warnings), "address 198.51.100.20 on wan0 is not held: on nftables") {
			t.Errorf("%v: no warning in %q", err, status.Warnings)
		}
		return
	}
	holds(t, l.Node("gateway"), d, c.held)
	to := netip.MustParseAddrPort(c.to)
	labtest.Eventually(t, patience, "an answer of "+c.to, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience/20)
		defer cancel()
		a, err := host.AskWeb(ctx, l.Node(c.from), netip.AddrPort{}, to)
		if err == nil && !strings.HasPrefix(strings.TrimPrefix(a.Client, "["), c.client) {
			err = fmt.Errorf("the server saw %s, want %s", a.Client, c.client)
		}
		return err
	})
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
	holdsNothing(t, l.Node("gateway"))
	forget(t, l.Node("gateway"))
}

// forced returns the configuration for a datapath, and for a hook of the eBPF datapath.
func forced(hook, config string) string {
	if hook == "nftables" {
		return "datapath: nftables\n" + config + "\n"
	}
	return "datapath: ebpf\nattach: " + hook + "\ntables: {flows: 4096, flows6: 4096}\n" + config + "\n"
}

// holds waits until the daemon holds exactly these addresses, and the kernel has them.
func holds(t *testing.T, n *lab.Node, d *daemon.Daemon, want string) {
	t.Helper()
	labtest.Eventually(t, patience, "held: "+want, func() error {
		list, err := d.Addresses(t.Context())
		if err != nil {
			return err
		}
		var held []string
		for _, a := range list {
			if a.State == "held" {
				held = append(held, a.Address)
			} else if a.State != "own" {
				return fmt.Errorf("%+v", a)
			}
		}
		if got := strings.Join(held, " "); got != want {
			return errors.New(got)
		}
		return nil
	})
	out := addressesOf(t, n)
	for _, a := range strings.Fields(want) {
		if !strings.Contains(out, " "+a+"/") {
			t.Errorf("the kernel does not have %s:\n%s", a, out)
		}
	}
}

func addressesOf(t *testing.T, n *lab.Node) string {
	t.Helper()
	out, err := n.Command(t.Context(), "ip", "-o", "address").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func holdsNothing(t *testing.T, n *lab.Node) {
	t.Helper()
	if out := addressesOf(t, n); strings.Contains(out, "/32 ") || strings.Contains(out, "/128 scope global") {
		t.Errorf("addresses are left:\n%s", out)
	}
	if _, err := os.Stat(filepath.Join(n.StateDir(), "addresses.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the record is left: %v", err)
	}
}

// TestHeldAddressesAfterACrash: held addresses remain after kill -9, and the next start adopts them. Without a
// next start, "sluice stop --force" removes them.
func TestHeldAddressesAfterACrash(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, flat("tc"))
	g := l.Node("gateway")
	serveWeb(t, l, "s1 s1 [::]:80")
	d := start(t, g, "datapath: nftables\n"+service("dnat", "198.51.100.20", "10.0.2.2", "")+"\n")
	holds(t, g, d, "198.51.100.20")
	if err := errors.Join(d.Kill(), d.Restart(t.Context())); err != nil {
		t.Fatal(err)
	}
	holds(t, g, d, "198.51.100.20")
	if err := d.Kill(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(addressesOf(t, g), "198.51.100.20/32") {
		t.Error("the address went with the process")
	}
	if out, err := g.Command(t.Context(), binary, "stop", "--force", "--state-dir", g.StateDir()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	holdsNothing(t, g)
}
