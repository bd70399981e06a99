// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// state is everything that the commands of remedies may change.
const state = `nft -s list ruleset; for f in -4 -6; do ip $f rule; ip $f -o route show table all | sort; ip $f neigh show proxy; done; ip -o addr
ip -d -o link | grep -oE '^[0-9]+: [^:@]+|mtu [0-9]+|qlen [0-9]+|stp_state [0-9]'
grep -r . /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/*tcp* /proc/sys/net/netfilter/nf_conntrack*timeout* 2>/dev/null |
	grep -v -e stable_secret -e metrics | sort`

// TestRemediesAreTakenBack applies each command that the doctor prints, alone and after all others, and expects the
// former state after TakeBack. Commands without an inverse must be refused, and change nothing.
func TestRemediesAreTakenBack(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Tool("nft"), labtest.Tool("ip"), labtest.Tool("iptables-nft"))
	printed, err := os.ReadFile("../testdata/printed-commands")
	if err != nil {
		t.Fatal(err)
	}
	node := labtest.New(t, lab.Topology{Name: "trial", Nodes: []lab.NodeSpec{{Name: "g"}, {Name: "far"}}, Links: []lab.LinkSpec{
		{A: lab.End{Node: "g", Iface: "wan0", Addresses: []string{"203.0.113.1/24", "2001:db8:0:1::1/64"}}, B: lab.End{Node: "far", Iface: "eth0"}},
		{A: lab.End{Node: "g", Iface: "lan0", Addresses: []string{"10.0.0.1/24"}}, B: lab.End{Node: "far", Iface: "eth1"}},
		{A: lab.End{Node: "g", Iface: "port0"}, B: lab.End{Node: "far", Iface: "eth2"}}}}).Node("g")
	run := func(script string) string {
		t.Helper()
		out, err := node.Command(t.Context(), "sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		return string(out)
	}
	run(`sysctl -qw net.ipv4.ip_forward=0 net.ipv4.conf.lan0.forwarding=1 net.ipv6.conf.all.forwarding=0
nft 'add table inet filter; add chain inet filter forward { type filter hook forward priority 0; }; add chain inet filter input { type filter hook input priority 0; }; add table inet clamp'
iptables-nft -t nat -A POSTROUTING -j RETURN
ip link add br0 type bridge stp_state 1 forward_delay 200; ip link set port0 master br0; ip link set br0 up; ip link add lan0.7 type veth peer name peer7; ip link set lan0.7 up
ip route add unreachable 198.51.100.0/24; ip route add prohibit default table 77; ip rule add from 10.0.0.0/24 unreachable priority 90
ip -6 route add default nexthop via 2001:db8:0:1::2 dev wan0 nexthop via 2001:db8:0:1::99 dev wan0; sleep 5`)
	ns, err := netdev.NamespaceAt(node.Path())
	if err != nil {
		t.Fatal(err)
	}
	s := &System{Namespace: ns, Dir: t.TempDir(), Etc: t.TempDir()}
	more := []string{
		"ip rule del priority 90", "ip route del prohibit 0.0.0.0/0 table 77", "ip route del unreachable 198.51.100.0/24 table 254", "ip -6 route del default via 2001:db8:0:1::99 dev wan0",
		"ip -6 neigh add proxy 2001:db8::9 dev lan0", "ip link set br0 type bridge stp_state 0", "sysctl -w net.ipv4.conf.lan0/7.forwarding=1", "nft add rule inet filter forward tcp dport { 80, 443 } accept",
		"iptables-nft -t nat -A POSTROUTING -s 10.0.0.0/24 -o wan0 -j MASQUERADE"}
	commands := append(strings.Split(strings.TrimSpace(string(printed)), "\n"), more...)
	tried, before := 0, run(state)
	for _, command := range commands {
		if strings.HasPrefix(command, "sluice ") {
			continue
		}
		if Reversible(t.Context(), s, []string{command}) != nil {
			if strings.HasPrefix(command, "nft ") && !strings.Contains(command, " -a ") || strings.HasPrefix(command, "ip link set dev wan0") || strings.HasPrefix(command, "sysctl ") || slices.Contains(more, command) {
				t.Errorf("%s is not reversible", command)
			}
			continue
		}
		remedy, err := Try(t.Context(), s, "test", []string{command})
		switch missing := err != nil && (strings.Contains(err.Error(), "no such file") || strings.Contains(err.Error(), "No such file") || strings.Contains(err.Error(), "permission denied")); {
		case err == nil:
			tried++
			if run(state) == before && !strings.HasPrefix(command, "sysctl") {
				t.Errorf("%s changed nothing that this test sees", command)
			}
			if notes, err := remedy.TakeBack("test"); err != nil || len(notes) > 0 {
				t.Errorf("%s: taking it back: %q, %v", command, notes, err)
			}
		case !missing: // settings of the host, and objects that this host lacks
			t.Errorf("%s: %v", command, err)
		}
		after := run(state)
		if after != before {
			t.Errorf("%s was not taken back:\n%s", command, difference(before, after))
		}
		before = after
	}
	if tried < 25 {
		t.Errorf("only %d of %d commands ran", tried, len(commands))
	}
	// One that is kept is in the journal, and Rollback takes it back.
	kept, err := Try(t.Context(), s, "doctor FW01", []string{"sysctl -w net.ipv4.ip_forward=1", "nft insert rule inet filter forward accept"})
	if err != nil {
		t.Fatal(err)
	}
	if err := kept.Keep(); err != nil {
		t.Fatal(err)
	}
	if done, notes, err := Rollback(s, false); err != nil || len(done) != 1 || len(notes) > 0 {
		t.Errorf("rollback: %+v, %q, %v", done, notes, err)
	}
	if after := run(state); after != before {
		t.Errorf("rollback left:\n%s", difference(before, after))
	}
	// If the second command fails, the first one is taken back.
	if _, err := Try(t.Context(), s, "test", []string{"sysctl -w net.ipv4.ip_forward=1", "nft insert rule inet filter nothing accept"}); err == nil {
		t.Error("a command that fails was tried")
	}
	if after := run(state); after != before {
		t.Errorf("a remedy that failed left:\n%s", difference(before, after))
	}
}

// difference lists the lines that only one of two texts has.
func difference(before, after string) string {
	cmd := exec.Command("sh", "-c", `printf %s "$A" > a; printf %s "$B" > b; diff a b; rm a b`)
	dir, err := os.MkdirTemp("", "difference")
	if err != nil {
		return err.Error()
	}
	defer os.RemoveAll(dir)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "A="+before, "B="+after)
	out, _ := cmd.CombinedOutput()
	return string(out)
}
