// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// asFound lists everything in a node that the gateway program could change: rules, settings,
// interfaces, addresses, neighbours that are kept resolved, routes, classifiers and pins.
func asFound(t *testing.T, n *lab.Node) []string {
	t.Helper()
	lines := strings.Split(nft(t, n, "", "-a", "list", "ruleset"), "\n")
	lines = append(lines, settings(t, n)...)
	h, err := n.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		a := link.Attrs()
		xdp := "no xdp"
		if a.Xdp != nil && a.Xdp.Attached {
			xdp = fmt.Sprintf("xdp %d", a.Xdp.ProgId)
		}
		lines = append(lines, fmt.Sprintf("link %s %s mtu %d promisc %d %s", a.Name, a.Flags, a.MTU, a.Promisc, xdp))
		addrs, err := h.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		for _, addr := range addrs {
			lines = append(lines, "address "+a.Name+" "+addr.IPNet.String())
		}
		qdiscs, err := h.QdiscList(link)
		if err != nil {
			t.Fatal(err)
		}
		neighbours, err := h.NeighList(a.Index, netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range neighbours {
			if n.FlagsExt&netlink.NTF_EXT_MANAGED != 0 {
				lines = append(lines, fmt.Sprintf("neighbour %s kept on %s", n.IP, a.Name))
			}
		}
		for _, q := range qdiscs {
			lines = append(lines, "qdisc "+a.Name+" "+q.Type())
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := h.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE)
		if err != nil {
			t.Fatal(err)
		}
		rules, err := h.RuleList(family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			lines = append(lines, fmt.Sprintf("route %v via %v dev %d table %d", r.Dst, r.Gw, r.LinkIndex, r.Table))
		}
		for _, r := range rules {
			lines = append(lines, "rule "+r.String())
		}
	}
	lines = append(lines, pins(t, n)...)
	sort.Strings(lines)
	return lines
}

// settings reads the writable network settings of the node.
func settings(t *testing.T, n *lab.Node) (lines []string) {
	t.Helper()
	err := n.Do(func() error {
		return filepath.WalkDir("/proc/sys/net", func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			info, err := e.Info()
			if err != nil || info.Mode()&0o222 == 0 {
				return err
			}
			value, err := os.ReadFile(path)
			if err != nil {
				return nil // written only
			}
			lines = append(lines, path+" = "+strings.TrimSpace(string(value)))
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// pins lists the pinned objects in the gateway's bpffs.
func pins(t *testing.T, n *lab.Node) []string {
	t.Helper()
	out, err := n.Command(t.Context(), "find", "/sys/fs/bpf", "-mindepth", "1").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.Split("pin "+strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\npin "), "\n")
}

func TestStopLeavesTheHostAsFound(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		before := asFound(t, l.Node("gateway"))
		d := start(t, l.Node("gateway"), force+webAndLine)
		mustAsk(t, dial(), "before")
		if cmp.Equal(before, asFound(t, l.Node("gateway"))) {
			t.Error("the gateway runs and nothing is different: the test looks in the wrong places")
		}
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, patience, "the host to be as it was found", func() error {
			if diff := cmp.Diff(before, asFound(t, l.Node("gateway"))); diff != "" {
				return fmt.Errorf("-found +left:\n%s", diff)
			}
			return nil
		})
		if _, err := os.Stat(filepath.Join(l.Node("gateway").StateDir(), "sluice.sock")); err == nil {
			t.Error("the socket is still there")
		}
	})
}

// foreignRules are tables of the kind that Docker, firewalld and an administrator create.
const foreignRules = `
table ip nat {
	chain DOCKER {
		iifname "docker0" return
		iifname != "docker0" tcp dport 8081 dnat to 172.17.0.2:80
	}
	chain PREROUTING {
		type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local jump DOCKER
	}
	chain POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept;
		oifname != "docker0" ip saddr 172.17.0.0/16 masquerade
	}
}
table ip filter {
	chain DOCKER-USER {
		return
	}
	chain FORWARD {
		type filter hook forward priority filter; policy accept;
		jump DOCKER-USER
		oifname "docker0" ct state related,established accept
	}
}
table inet firewalld {
	set trusted {
		type ipv4_addr
		flags interval
		elements = { 10.0.0.0/8, 192.0.2.0/24 }
	}
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ip saddr @trusted accept
		meta nfproto ipv6 accept
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
	}
}
table netdev mine {
	chain early {
		type filter hook ingress device "lan0" priority -500; policy accept;
		ether type arp accept
	}
}
`

func TestForeignTablesAreNeverTouched(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		gateway := l.Node("gateway")
		nft(t, gateway, foreignRules, "-f", "-")
		foreign := func() (text string) {
			for _, table := range []string{"ip nat", "ip filter", "inet firewalld", "netdev mine"} {
				args := append([]string{"-a", "list", "table"}, strings.Fields(table)...)
				text += nft(t, gateway, "", args...) // -a: handles reveal even a rewrite with the same rules
			}
			return text
		}
		want := foreign()
		same := func(when string) {
			t.Helper()
			if diff := cmp.Diff(want, foreign()); diff != "" {
				t.Errorf("other programs' tables %s (-before +after):\n%s", when, diff)
			}
		}
		d := start(t, gateway, force+webAndLine)
		same("after the start")
		mustAsk(t, dial(), "with foreign tables")
		mustAnswer(t, webLoad(l, "192.0.2.10:80", 50))
		if _, err := d.Apply(t.Context(), "less.yaml", []byte(force+strings.Replace(webAndLine, "scheduler: maglev", "scheduler: rr", 1))); err != nil {
			t.Fatal(err)
		}
		same("after a change of the configuration")
		if err := d.SetBackend(t.Context(), "web", "a", api.BackendState{State: "down"}); err != nil {
			t.Fatal(err)
		}
		same("after the loss of a backend")
		if _, err := d.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		same("after a reload")
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		same("after kill -9 and a restart")
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		same("after the stop")
	})
}
