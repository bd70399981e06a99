// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// Condition is something wrong with the router that checks of the doctor find, and its
// remedy.
type Condition struct {
	Name  string
	Wants []Want
	// Lasts is the check that no remedy clears at once; empty: none.
	Lasts string
	// Host are settings of the host that it needs, changed through the lab. Those without a
	// value are left as they are, for the remedy to change.
	Host map[string]string
	// Fault is injected in the router, and Traffic runs during the examination. Their connections
	// are closed when their ctx ends. nil: nothing.
	Fault, Traffic func(ctx context.Context, l *lab.Lab) error
	// Do is a regular expression that selects commands of the first finding's remedy. The selected
	// commands run unchanged in the router's namespace, or with OnHost in the host's. Empty: the
	// fault has no remedy.
	Do     string
	OnHost bool
	// Cure is the rest of the remedy, where the doctor's words are no commands.
	Cure func(ctx context.Context, l *lab.Lab) error
	// After is the traffic after the remedy where it is part of that; nil: Traffic.
	After func(ctx context.Context, l *lab.Lab) error
}

// Want is the expected result of a check.
type Want struct {
	Check, Verdict string
	Words          string // a part of its summary or evidence
}

func sending(traffic func(context.Context, *lab.Lab) (int, error)) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		_, err := traffic(ctx, l)
		return err
	}
}

func all(steps ...setup) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		for _, step := range steps {
			if err := step(ctx, l); err != nil {
				return err
			}
		}
		return nil
	}
}

// gateway runs lines of a shell on the router.
func gateway(lines string) setup { return command("gateway", "sh", "-ec", lines) }

// Settings of the host that conditions change.
const (
	tableMax     = "net.netfilter.nf_conntrack_max"
	tableBuckets = "net.netfilter.nf_conntrack_buckets"
)

// larger is the command that remedies of a full table name.
const larger = `sysctl -w net.netfilter.nf_conntrack_buckets=\d+ net.netfilter.nf_conntrack_max=\d+`

// smallTable has room for so many entries.
func smallTable(entries int) map[string]string {
	return map[string]string{tableMax: fmt.Sprint(entries), tableBuckets: ""}
}

// Conditions lists those that the router's own settings make.
func Conditions() []Condition {
	web := sending(dialTCP(5, 5))
	hearing := listener()
	dns := sending(sendUDP(30, Client, Server, 53, 100, false))
	return []Condition{
		// Entries.
		{Name: "many-plain-entries", Wants: []Want{{"RL05", "info", "not translated"}, {"ST04", "info", "udp " + Server + ":9"}},
			Fault: nft(tracked), Traffic: spray("client", flow.UDP, 0, 10_500, Client, 0, Server, 9),
			Cure: all(nft("table ip raw { chain pre {\n type filter hook prerouting priority raw\n ip daddr "+Server+" udp dport 9 notrack\n}\n}"), gateway("conntrack -F"))},
		{Name: "sip", Wants: []Want{{"ST06", "warn", "SIP"}}, Fault: all(nft(natRules), sysctl("net.netfilter.nf_conntrack_udp_timeout_stream", "60")),
			Traffic: spray("client", flow.UDP, 0, 5, Client, 0, Server, 5060),
			Do:      `sysctl -w net.netfilter.nf_conntrack_udp_timeout=\d+ net.netfilter.nf_conntrack_udp_timeout_stream=\d+`},
		{Name: "half-closed", Wants: []Want{{"ST07", "warn", "connections are half-closed"}}, Fault: all(nft(natRules), hold("client", 120, halfClosed)),
			Do: `sysctl -w net.netfilter.nf_conntrack_tcp_timeout_close_wait=\d+`},
		{Name: "invalid", Wants: []Want{{"ST08", "critical", "30 invalid packets"}}, Fault: nft(natRules), Traffic: sending(sendInvalid(30)),
			Do: `sysctl -w net.netfilter.nf_conntrack_log_invalid=255`, After: web},
		{Name: "asymmetric", Wants: []Want{{"ST11", "warn", "100 % of the entries"}}, Fault: all(nft(strict), otherWayBack),
			Traffic: spray("client", flow.TCP, tcpACK, 150, Client, 0, Server, 9), Cure: all(command("server", "ip", "route", "del", "192.0.2.0/24"), gateway("conntrack -F"))},
		{Name: "window-checks", Wants: []Want{{"ST09", "warn", "asymmetric"}}, Fault: all(nft(strict), otherWayBack),
			Traffic: spray("client", flow.TCP, tcpACK, 150, Client, 0, Server, 9), Do: `sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1`},
		{Name: "backend-without-a-rule", Wants: []Want{{"ST10", "warn", Server}},
			Fault: all(nft(forwardTo(Server)), spray("client", flow.UDP, 0, 20, Client, 0, Gateway, 53), gateway("nft flush ruleset"), nft(forwardTo("198.51.100.77"))),
			Do:    `conntrack -D --reply-src [0-9.]+`},
		{Name: "dead-backend", Wants: []Want{{"ST10", "warn", "198.51.100.77"}},
			Fault: all(impatient, nft(forwardTo("198.51.100.77")), spray("client", flow.UDP, 0, 20, Client, 0, Gateway, 53), sending(untilGivenUp)),
			Cure:  all(gateway("nft flush ruleset"), nft(forwardTo(Server))), Do: `conntrack -D --reply-src [0-9.]+`},

		// Ports.
		{Name: "snat-ports", Wants: []Want{{"PT01", "critical", "towards udp " + Server + ":9"}, {"PT02", "critical", GatewayLAN + " uses 100 %"},
			{"PT03", "warn", "taken ports"}, {"CT11", "critical", "tuple was taken"}},
			Fault: nft(snatTo("2000-2099")), Traffic: spray("client", flow.UDP, 0, 150, Client, 0, Server, 9),
			Cure: all(gateway("nft flush ruleset; conntrack -F"), nft(snatTo("2000-9999")))},
		{Name: "snat-port-occupancy", Wants: []Want{{"PT02", "warn", "85 of 100"}},
			Fault: nft(snatTo("2000-2099")), Traffic: spray("client", flow.UDP, 0, 85, Client, 0, Server, 9),
			Cure: all(gateway("nft flush ruleset; conntrack -F"), nft(snatTo("2000-9999")))},
		{Name: "privileged-ports", Wants: []Want{{"PT05", "info", "400 translated connections"}}, Fault: nft(natRules),
			Traffic: spray("client", flow.UDP, 0, 400, Client, 600, Server, 9), Cure: gateway("conntrack -F"),
			After: spray("client", flow.UDP, 0, 400, Client, 0, Server, 9)},
		{Name: "local-ports", Wants: []Want{{"PT06", "warn", "85 connections of 100 ports"}}, Fault: sysctl("net.ipv4.ip_local_port_range", "40000 40099"),
			Traffic: hold("gateway", 85, nil), Do: `sysctl -w net.ipv4.ip_local_port_range="\d+ \d+"`},
		{Name: "unreserved-port", Wants: []Want{{"PT07", "warn", "40000/tcp"}},
			Fault: all(sysctl("net.ipv4.ip_local_reserved_ports", "50000-50010"), listening(40000, 10)), Do: `sysctl -w net.ipv4.ip_local_reserved_ports=50000-50010,40000\b`},
		{Name: "time-wait-sockets", Wants: []Want{{"PT08", "info", "tcp_tw_reuse is 2"}}, Fault: timeWait(10_100), Do: `sysctl -w net.ipv4.tcp_tw_reuse=1`},
		{Name: "time-wait-buckets", Wants: []Want{{"PT09", "warn", "tcp_max_tw_buckets 5"}}, Fault: sysctl("net.ipv4.tcp_max_tw_buckets", "5"),
			Traffic: timeWait(30), Do: `sysctl -w net.ipv4.tcp_max_tw_buckets=\d+`},

		// Rules.
		{Name: "linear-rules", Wants: []Want{{"RL01", "critical", "1200 rules, inet filter forward"}}, Fault: nft(linearRules(1200)), Traffic: web,
			Cure: all(gateway("nft flush ruleset"), nft("table inet filter {\n set bans {\n type ipv4_addr\n elements = { 10.0.0.7, 10.0.1.7 }\n }\n chain forward {\n"+
				" type filter hook forward priority filter\n ip saddr @bans counter drop\n}\n}"))},
		{Name: "kube-services", Wants: []Want{{"RL02", "warn", "1001 rules"}}, Fault: nft("table ip nat { chain KUBE-SERVICES {\n" + strings.Repeat(" ip daddr 10.96.0.1 counter\n", 1001) + "}\n}"),
			Cure: gateway("nft delete table ip nat")},
		{Name: "mixed-iptables", Wants: []Want{{"RL03", "warn", "filter"}}, Fault: gateway("iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -j ACCEPT; iptables-nft -A FORWARD -p tcp --dport 81 -j DROP"),
			Traffic: web, Do: `iptables-legacy-save .* \| iptables-legacy-restore`},
		{Name: "late-established", Wants: []Want{{"RL04", "warn", "inet filter forward"}}, Fault: nft(strings.Replace(linearRules(12), "}\n}", " ct state established accept\n}\n}", 1)),
			Traffic: web, Do: `nft insert rule inet filter forward ct state established,related accept`},
		{Name: "late-established-legacy", Wants: []Want{{"RL04", "warn", "iptables filter FORWARD"}},
			Fault:   gateway("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do iptables-legacy -A FORWARD -s 10.0.0.$i -j DROP; done; iptables-legacy -A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT"),
			Traffic: web, Do: `iptables-legacy -t filter -I FORWARD .* -j ACCEPT`},
		{Name: "needless-tracking", Wants: []Want{{"RL06", "warn", "30 connections"}}, Fault: gateway("iptables-legacy -t raw -A PREROUTING -j CT --zone 5"),
			Traffic: spray("client", flow.UDP, 0, 30, Client, 0, Server, 9), Cure: gateway("iptables-legacy -t raw -F")},
		{Name: "wide-helper", Wants: []Want{{"RL07", "warn", "any port"}}, Fault: nft(ftpHelper("ct helper set \"ftp\"")),
			Cure: all(gateway("nft flush ruleset"), nft(ftpHelper("iifname wan0 tcp dport 21 ct helper set \"ftp\"")))},
		{Name: "trace", Wants: []Want{{"RL08", "critical", "inet filter forward"}}, Fault: nft("table inet filter { chain forward {\n type filter hook forward priority filter\n udp dport 9 meta nftrace set 1\n}\n}"),
			Do: `nft -a list chain inet filter forward`, Cure: gateway("nft delete rule inet filter forward handle 2")},
		{Name: "log", Wants: []Want{{"RL08", "warn", "inet filter forward"}}, Fault: nft("table inet filter { chain forward {\n type filter hook forward priority filter\n udp dport 9 log\n}\n}"),
			Do: `nft -a list chain inet filter forward`, Cure: gateway("nft replace rule inet filter forward handle 2 udp dport 9 limit rate 1/second log")},
		{Name: "log-invalid", Wants: []Want{{"RL08", "warn", "every invalid packet"}}, Fault: sysctl("net.netfilter.nf_conntrack_log_invalid", "255"),
			Do: `sysctl -w net.netfilter.nf_conntrack_log_invalid=0`},
		{Name: "bridge", Wants: []Want{{"RL09", "warn", "1 bridge"}}, Fault: all(nft(natRules), gateway("ip link add br0 type bridge; sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1")),
			Do: `sysctl -w net.bridge.bridge-nf-call-iptables=0.*`},
		{Name: "event-listener", Wants: []Want{{"RL10", "info", "1 program receives"}}, Fault: all(nft(natRules), hearing.start), Traffic: web,
			Cure: all(func(ctx context.Context, l *lab.Lab) error { return hearing.stop(ctx, l) }, listener("-e", "DESTROY").start)},
		{Name: "no-byte-counters", Wants: []Want{{"RL11", "info", "no byte counters"}}, Fault: nft(natRules), Do: `sysctl -w net.netfilter.nf_conntrack_acct=1`},
		{Name: "churn", Wants: []Want{{"RL14", "info", "20 changes"}}, Traffic: gateway("for i in 1 2 3 4 5 6 7 8 9 10; do nft add table inet churn; nft delete table inet churn; done"),
			After: nft(strings.Repeat("add table inet churn\ndelete table inet churn\n", 10))},
		{Name: "deny-rule", Wants: []Want{{"RL15", "warn", "ip daddr 198.51.100.2 udp dport 53 drop # handle 3"}}, Fault: nft(denyRule), Traffic: sending(sendUDP(200, Client, Server, 53, 100, false)), Cure: gateway("nft delete rule inet filter forward handle 3")},
		{Name: "notrack", Wants: []Want{{"RL16", "warn", "were forwarded and none was translated"}}, Fault: all(nft(natRules), nft(notrackRule)),
			Traffic: sending(sendUDP(100, Client, Server, 9, 100, false)), Cure: gateway("nft delete table inet raw")},

		// Forwarding.
		{Name: "forwarding-off", Wants: []Want{{"FW01", "critical", "30 packets"}}, Fault: all(nft(natRules), sysctl("net.ipv4.ip_forward", "0")), Traffic: dns,
			Do: `sysctl -w net.ipv4.ip_forward=1`},
		{Name: "forwarding-off-here", Wants: []Want{{"FW01", "critical", "off on wan0"}}, Fault: all(nft(natRules), sysctl("net.ipv4.conf.wan0.forwarding", "0")), Traffic: dns,
			Do: `sysctl -w net.ipv4.conf.wan0.forwarding=1`},
		{Name: "forwarding-off-ipv6", Wants: []Want{{"FW01", "critical", "IPv6"}}, Fault: all(ipv6, nft("table ip6 nat { chain post {\n type nat hook postrouting priority srcnat\n masquerade\n}\n}"),
			sysctl("net.ipv6.conf.all.forwarding", "0")), Traffic: sending(sendUDP(30, Client6, Server6, 53, 100, false)), Do: `sysctl -w net.ipv6.conf.all.forwarding=1`},
		{Name: "rp-filter", Wants: []Want{{"FW02", "critical", Unrouted + " on wan0"}}, Fault: all(sysctl("net.ipv4.conf.wan0.rp_filter", "1"), gateway("ip route add 203.0.113.0/24 via "+Server)),
			Traffic: sending(sendUDP(50, Unrouted, Server, 9, 100, false)), Do: `sysctl -w net.ipv4.conf.wan0.rp_filter=2`},
		{Name: "no-route-back", Wants: []Want{{"FW02", "critical", Unrouted + " on wan0"}}, Fault: sysctl("net.ipv4.conf.wan0.rp_filter", "2"),
			Traffic: sending(sendUDP(50, Unrouted, Server, 9, 100, false)), Cure: gateway("ip route add 203.0.113.0/24 via " + Client)},
		{Name: "mtu", Wants: []Want{{"FW03", "critical", "towards " + Server}}, Fault: mtu(1280), Traffic: sending(sendUDP(50, Client, Server, 9, 1400, true)), Do: `^nft '.*set rt mtu'$`, Cure: mtu(1500)},
		{Name: "icmp-limit", Wants: []Want{{"FW04", "warn", "held back"}}, Traffic: paced(40, Gateway, 9), Do: `sysctl -w net.ipv4.icmp_ratelimit=\d+`},
		{Name: "no-clamp", Wants: []Want{{"FW05", "warn", "lan0 takes 1280 bytes"}}, Fault: mtu(1280), Traffic: web, Do: `nft '.*set rt mtu'`},
		{Name: "next-hop-dead", Wants: []Want{{"FW07", "warn", "198.51.100.77"}}, Fault: impatient, Traffic: toAbsentHost,
			Cure: command("server", "ip", "addr", "add", "198.51.100.77/24", "dev", "eth0"), After: sending(sendUDP(30, Client, "198.51.100.77", 9, 100, false))},
		{Name: "no-route", Wants: []Want{{"FW08", "warn", "203.0.113.200"}}, Traffic: sending(sendUDP(30, Client, "203.0.113.200", 9, 100, false)),
			Cure: gateway("ip route add 203.0.113.0/24 via " + Server)},
		{Name: "blackhole", Wants: []Want{{"FW08", "warn", "203.0.113.200"}}, Fault: gateway("ip route add blackhole 203.0.113.128/25"),
			Traffic: sending(sendUDP(30, Client, "203.0.113.200", 9, 100, false)), Do: `ip route del blackhole 203.0.113.128/25 table 254`,
			Cure: gateway("ip route add 203.0.113.0/24 via " + Server)},
		{Name: "ttl", Wants: []Want{{"FW09", "warn", "towards " + Server}}, Fault: command("client", "sysctl", "-qw", "net.ipv4.ip_default_ttl=1"), Traffic: dns,
			Cure: command("client", "sysctl", "-qw", "net.ipv4.ip_default_ttl=64")},
		{Name: "localnet", Wants: []Want{{"FW12", "warn", "127.0.0.1"}}, Fault: nft(forwardTo("127.0.0.1")), Traffic: sending(sendUDP(30, Client, Gateway, 53, 100, false)),
			Do: `sysctl -w net.ipv4.conf.wan0.route_localnet=1`},
		{Name: "forged-source", Wants: []Want{{"FW12", "warn", "from 127.0.0.9 on wan0"}}, Traffic: spray("client", flow.UDP, 0, 30, "127.0.0.9", 0, Server, 9), Do: `^sluice drops --seconds 10 --pcap`,
			After: dns},
		{Name: "ipsec-policy", Wants: []Want{{"FW13", "warn", "IPsec policy"}}, Fault: gateway("ip xfrm policy add dir fwd src 192.0.2.0/24 dst 198.51.100.0/24 action block"), Traffic: dns,
			Do: `ip xfrm policy`, Cure: gateway("ip xfrm policy flush")},

		// Interfaces and sockets.
		{Name: "link-errors", Wants: []Want{{"RX06", "warn", "vx0"}}, Fault: gateway("ip link add vx0 type vxlan id 7 remote 203.0.113.99 dstport 4789; ip addr add 10.7.0.1/24 dev vx0; ip link set vx0 up; ip neigh add 10.7.0.2 lladdr 02:00:00:00:00:07 dev vx0"),
			Traffic: spray("gateway", flow.UDP, 0, 30, "10.7.0.1", 0, "10.7.0.2", 9), Do: `ip -s -s -d link show vx0`,
			Cure: gateway("ip route add 203.0.113.99 via " + Server)},
		{Name: "queue", Wants: []Want{{"RX07", "warn", "lan0"}}, Fault: gateway("tc qdisc add dev lan0 root tbf rate 8kbit burst 1600 limit 1600"),
			Traffic: sending(sendUDP(60, Client, Server, 53, 1000, false)), Do: `tc -s qdisc show dev lan0`, Cure: gateway("tc qdisc replace dev lan0 root pfifo limit 1000")},
		{Name: "accept-queue", Wants: []Want{{"LS01", "critical", "accept queue"}}, Traffic: all(listening(8081, 1), connecting(40)), After: all(listening(8081, 100), connecting(40))},
		{Name: "syn-queue", Wants: []Want{{"LS02", "warn", "SYNs met a full queue"}}, Traffic: all(listening(8082, 8), spray("client", flow.TCP, tcpSYN, 100, "192.0.2.77", 0, Gateway, 8082)),
			After: all(listening(8082, 1000), spray("client", flow.TCP, tcpSYN, 100, "192.0.2.77", 0, Gateway, 8082))},
		{Name: "open-files", Wants: []Want{{"LS03", "warn", "of its 64 files open"}}, Fault: (&program{node: "gateway", name: "sleep", words: []string{"bash", "-c",
			"ulimit -Sn 64; for i in {3..61}; do eval \"exec $i</dev/null\"; done; exec sleep 1000"}}).start,
			Do: `prlimit --pid \d+ --nofile=\d+:?`},
		{Name: "udp-buffer", Wants: []Want{{"LS05", "warn", "receive queue of UDP port 54 is full"}}, Traffic: all(unreadSocket(54, 4096), sending(sendUDP(150, Client, Gateway, 54, 1000, false))), Do: `ss -lunpm 'sport = :54'`,
			After: all(unreadSocket(54, 4<<20), sending(sendUDP(150, Client, Gateway, 54, 1000, false)))},
		{Name: "unseen-namespace", Wants: []Want{{"CT14", "warn", "node_exporter on the host"}}, Fault: all(nft(natRules), exporter(false)), Traffic: web, Do: `^sluice top --once --json$`, Cure: exporter(true)},
	}
}

// HostConditions lists those that settings of the host make.
func HostConditions() []Condition {
	return []Condition{
		{Name: "table-of-held-connections", Host: smallTable(400), Wants: []Want{{"CT01", "critical", "of 400 entries"}, {"CT02", "critical", "does not evict"}, {"CT15", "warn", "nf_conntrack_max is 400"}},
			Fault: all(nft(natRules), hold("client", 380, nil)), Do: larger, OnHost: true},
		{Name: "filling", Host: smallTable(400), Wants: []Want{{"CT03", "critical", "full in"}}, Fault: nft(natRules), Traffic: hold("client", 380, nil), Do: larger, OnHost: true},
		{Name: "table-full", Host: smallTable(400), Wants: []Want{{"CT05", "critical", "the connection table is full"}, {"CT04", "critical", "table full"}}, Fault: all(nft(natRules), hold("client", 380, nil)),
			Traffic: spray("client", flow.UDP, 0, 60, Client, 0, Server, 9), Do: larger, OnHost: true, Lasts: "CT04"},
		{Name: "early-drop", Host: map[string]string{tableMax: "400", tableBuckets: "512"}, Wants: []Want{{"CT06", "warn", "removed to make room"}}, Fault: nft(natRules),
			Traffic: spray("client", flow.UDP, 0, 600, Client, 0, Server, 9), Do: larger, OnHost: true},
		{Name: "few-buckets", Host: map[string]string{tableMax: "20000", tableBuckets: "1024"}, Wants: []Want{{"CT07", "warn", "20000 / 1024"}}, Fault: nft(natRules),
			Do: `sysctl -w net.netfilter.nf_conntrack_buckets=\d+`, OnHost: true},
		{Name: "too-much-memory", Host: map[string]string{tableMax: "1000000000"}, Wants: []Want{{"CT08", "critical", "of RAM"}}, Fault: nft(natRules),
			Do: `sysctl -w net.netfilter.nf_conntrack_max=\d+`, OnHost: true},
		{Name: "long-chains", Host: map[string]string{tableMax: "262144", tableBuckets: "512"}, Wants: []Want{{"CT09", "critical", "chain was too long"}}, Fault: nft(natRules),
			Traffic: spray("client", flow.UDP, 0, 20_000, Client, 0, Server, 9), Do: `sysctl -w net.netfilter.nf_conntrack_buckets=\d+`, OnHost: true},
		{Name: "expectations", Host: map[string]string{"net.netfilter.nf_conntrack_expect_max": "4"}, Wants: []Want{{"CT13", "critical", "4 of 4"}},
			Fault: all(nft(ftpHelper("tcp dport 21 ct helper set \"ftp\"")), announce(4)), Do: `sysctl -w net.netfilter.nf_conntrack_expect_max=\d+`, OnHost: true},
		{Name: "closed-connections", Host: smallTable(400), Wants: []Want{{"ST01", "warn", "TIME_WAIT"}}, Fault: all(nft(natRules), sending(dialTCP(300, 10))), Do: larger, OnHost: true},
		{Name: "unanswered", Host: map[string]string{tableMax: "2000"}, Wants: []Want{{"ST02", "critical", "100 % of the entries"}}, Fault: nft(tracked),
			Traffic: spray("client", flow.UDP, 0, 1100, Client, 0, Server, 9), Do: `nft 'add table inet shares.*drop'`, Cure: gateway("conntrack -F")},
		{Name: "greedy-source", Host: map[string]string{tableMax: "2000"}, Wants: []Want{{"ST03", "critical", Client}}, Fault: nft(tracked),
			Traffic: all(spray("client", flow.UDP, 0, 600, Client, 0, Server, 9), spray("client", flow.UDP, 0, 10, Unrouted, 0, Server, 9)), Do: `nft 'add table inet shares.*drop'`, Cure: gateway("conntrack -F")},
		{Name: "five-days", Host: map[string]string{tableMax: "400"}, Wants: []Want{{"ST05", "warn", "432000"}}, Fault: all(nft(natRules), hold("client", 220, nil)),
			Do: `sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=\d+`},
		{Name: "neighbour-table", Host: map[string]string{"net.ipv4.neigh.default.gc_thresh1": "8", "net.ipv4.neigh.default.gc_thresh2": "32", "net.ipv4.neigh.default.gc_thresh3": "64",
			"net.ipv6.neigh.default.gc_thresh1": "", "net.ipv6.neigh.default.gc_thresh2": "", "net.ipv6.neigh.default.gc_thresh3": ""}, Wants: []Want{{"FW06", "critical", "neighbour table is full"}},
			Traffic: sending(sendRange), Do: `sysctl -w net.ipv4.neigh.default.gc_thresh1=.* net.ipv6.neigh.default.gc_thresh3=\d+`, OnHost: true},
		{Name: "backlog", Host: map[string]string{"net.core.netdev_max_backlog": "5"}, Wants: []Want{{"RX01", "critical", "netdev_max_backlog 5"}}, Fault: segmentInSoftware, Traffic: sending(burst),
			Do: `sysctl -w net.core.netdev_max_backlog=\d+`, OnHost: true},
		{Name: "squeezed", Host: map[string]string{"net.core.netdev_budget": "2", "net.core.netdev_budget_usecs": ""}, Wants: []Want{{"RX02", "warn", "netdev_budget 2"}}, Fault: segmentInSoftware, Traffic: sending(burst),
			Do: `sysctl -w net.core.netdev_budget=\d+ net.core.netdev_budget_usecs=\d+`, OnHost: true},
	}
}

// tracked has rules that look at connections and translate none.
const tracked = "table inet filter { chain forward {\n type filter hook forward priority filter\n ct state new counter\n}\n}"

// strict has a rule that drops what tracking does not know.
const strict = "table inet filter { chain forward {\n type filter hook forward priority filter\n ct state invalid drop\n}\n}"

const denyRule = `table inet filter { chain forward {
	type filter hook forward priority filter; policy accept
	tcp dport 80 counter accept
	ip daddr 198.51.100.2 udp dport 53 counter drop
}
}`

const notrackRule = `table inet raw { chain pre {
	type filter hook prerouting priority raw
	iifname "wan0" ip saddr 192.0.2.0/24 notrack
}
}`

// forwardTo sends DNS queries for the router to another address.
func forwardTo(address string) string {
	return "table ip nat { chain pre {\n type nat hook prerouting priority dstnat\n ip daddr " + Gateway + " udp dport 53 dnat to " + address + "\n}\n}"
}

// snatTo translates to a range of ports.
func snatTo(ports string) string {
	return "table ip nat { chain post {\n type nat hook postrouting priority srcnat\n oifname lan0 ip protocol { tcp, udp } snat to " + GatewayLAN + ":" + ports + "\n}\n}"
}

func ftpHelper(rule string) string {
	return "table ip helpers {\n ct helper ftp {\n type \"ftp\" protocol tcp\n }\n chain pre {\n type filter hook prerouting priority filter\n " + rule + "\n}\n}"
}

// otherWayBack gives client and server a link of their own, over which the server answers.
func otherWayBack(ctx context.Context, l *lab.Lab) error {
	return all(command("client", "ip", "link", "add", "back0", "type", "veth", "peer", "name", "back0", "netns", l.Node("server").Name()),
		command("client", "sh", "-ec", "ip addr add 10.9.0.1/24 dev back0; ip link set back0 up"),
		command("server", "sh", "-ec", "ip addr add 10.9.0.2/24 dev back0; ip link set back0 up; ip route add 192.0.2.0/24 via 10.9.0.1"))(ctx, l)
}

// impatient makes the router give next hops up soon.
func impatient(ctx context.Context, l *lab.Lab) error {
	return sysctl("net.ipv4.neigh.lan0.retrans_time_ms", "50")(ctx, l)
}

// toAbsentHost sends to a host that is not there until the router has given it up, more than
// once: kernels of some virtual machines run no probe for the drops of a moment.
func toAbsentHost(ctx context.Context, l *lab.Lab) error {
	for range 4 {
		if err := all(sending(sendUDP(10, Client, "198.51.100.77", 9, 100, false)), sending(untilGivenUp))(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// connecting connects n times to a program on the router; some are refused.
func connecting(n int) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		return l.Node("client").Do(func() error {
			for range n {
				if err := startConnect(ctx, Gateway, 8081); err != nil {
					return err
				}
			}
			time.Sleep(100 * time.Millisecond)
			return nil
		})
	}
}

// announce has n FTP clients announce ports.
func announce(n int) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		listener, err := l.Node("server").Listen(Server + ":21")
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { listener.Close() })
		go acceptAndHold(ctx, listener)
		for i := range n {
			c, err := l.Node("client").Dial(ctx, nil, "tcp", Server+":21")
			if err != nil {
				return err
			}
			context.AfterFunc(ctx, func() { c.Close() })
			if _, err := fmt.Fprint(c, "NOOP\r\n"); err != nil { // the helper looks at lines that begin after another one's end
				return err
			}
			time.Sleep(10 * time.Millisecond)
			if _, err := fmt.Fprintf(c, "PORT %s,80,%d\r\n", strings.ReplaceAll(Client, ".", ","), i); err != nil {
				return err
			}
		}
		return nil
	}
}

// exporter has a program of the name of node_exporter run until ctx ends, on the host or,
// as the doctor asks for it, in the router's namespace.
func exporter(inside bool) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		sleep, err := exec.LookPath("sleep")
		if err != nil {
			return err
		}
		dir, err := os.MkdirTemp("", "collapse")
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { os.RemoveAll(dir) })
		program := filepath.Join(dir, "node_exporter")
		if err := os.Symlink(sleep, program); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, program, "1000")
		if inside {
			cmd = exec.CommandContext(ctx, "ip", "netns", "exec", l.Node("gateway").Name(), program, "1000")
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		go func() { _ = cmd.Wait() }()
		return runs(ctx, cmd.Process.Pid, "node_exporter", nil)
	}
}
