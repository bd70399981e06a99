// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// kubeProxyRules are the rules of kube-proxy in the mode iptables: a service with two pods, a cluster address, a node
// port, and a second node port that keeps the address of the client.
const kubeProxyRules = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -d 10.96.0.99/32 -p tcp -m comment --comment "default/empty has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-EXT-WEB - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SEP-ONE - [0:0]
:KUBE-SEP-TWO - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-WEB - [0:0]
:KUBE-SVL-WEB - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-WEB -m comment --comment "masquerade traffic for default/web external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-WEB -j KUBE-SVC-WEB
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web" -m tcp --dport 30080 -j KUBE-EXT-WEB
-A KUBE-NODEPORTS -p udp -m comment --comment "default/web" -m udp --dport 30080 -j KUBE-EXT-WEB
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/local" -m tcp --dport 30081 -j KUBE-SVL-WEB
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-ONE -s 10.244.0.5/32 -m comment --comment "default/web" -j KUBE-MARK-MASQ
-A KUBE-SEP-ONE -p tcp -m comment --comment "default/web" -m tcp -j DNAT --to-destination 10.244.0.5:8080
-A KUBE-SEP-ONE -p udp -m comment --comment "default/web" -m udp -j DNAT --to-destination 10.244.0.5:8080
-A KUBE-SEP-TWO -s 10.244.0.6/32 -m comment --comment "default/web" -j KUBE-MARK-MASQ
-A KUBE-SEP-TWO -p tcp -m comment --comment "default/web" -m tcp -j DNAT --to-destination 10.244.0.6:8080
-A KUBE-SEP-TWO -p udp -m comment --comment "default/web" -m udp -j DNAT --to-destination 10.244.0.6:8080
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "default/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment "default/web cluster IP" -m udp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-WEB ! -s 10.244.0.0/16 -d 10.96.0.10/32 -p tcp -m comment --comment "default/web cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-WEB ! -s 10.244.0.0/16 -d 10.96.0.10/32 -p udp -m comment --comment "default/web cluster IP" -m udp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-WEB -m comment --comment "default/web -> 10.244.0.5:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-ONE
-A KUBE-SVC-WEB -m comment --comment "default/web -> 10.244.0.6:8080" -j KUBE-SEP-TWO
-A KUBE-SVL-WEB -m comment --comment "default/local -> 10.244.0.5:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-ONE
-A KUBE-SVL-WEB -m comment --comment "default/local -> 10.244.0.6:8080" -j KUBE-SEP-TWO
COMMIT
`

// firewalldRules have the shape of firewalld's: a masquerading zone of the server and a zone of the client with a
// forwarded port. Denied packets are logged.
const firewalldRules = `table inet firewalld {
	chain mangle_PREROUTING {
		type filter hook prerouting priority mangle + 10
		jump mangle_PREROUTING_ZONES
	}
	chain mangle_PREROUTING_ZONES {
		iifname "wan0" goto mangle_PRE_external
		iifname "lan0" goto mangle_PRE_internal
		goto mangle_PRE_external
	}
	chain mangle_PRE_external { }
	chain mangle_PRE_internal {
		jump mangle_PRE_internal_allow
	}
	chain mangle_PRE_internal_allow {
		tcp dport 8081 mark set 0x1 counter
	}
	chain nat_PREROUTING {
		type nat hook prerouting priority dstnat + 10
		jump nat_PREROUTING_ZONES
	}
	chain nat_PREROUTING_ZONES {
		iifname "lan0" goto nat_PRE_internal
	}
	chain nat_PRE_internal {
		jump nat_PRE_internal_allow
	}
	chain nat_PRE_internal_allow {
		meta nfproto ipv4 tcp dport 8080 dnat ip to 10.0.2.2:80
		meta nfproto ipv4 udp dport 8080 dnat ip to 10.0.2.2:80
	}
	chain nat_POSTROUTING {
		type nat hook postrouting priority srcnat + 10
		jump nat_POSTROUTING_ZONES
	}
	chain nat_POSTROUTING_ZONES {
		oifname "wan0" goto nat_POST_external
	}
	chain nat_POST_external {
		jump nat_POST_external_allow
	}
	chain nat_POST_external_allow {
		meta nfproto ipv4 oifname != "lo" masquerade
	}
	chain filter_PREROUTING {
		type filter hook prerouting priority filter + 10
		icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept
		meta nfproto ipv6 fib saddr . mark . iif oif missing log prefix "rpfilter_DROP: " drop
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid log prefix "STATE_INVALID_DROP: "
		ct state invalid drop
		ip6 daddr { ::/96, ::ffff:0.0.0.0/96, 2002::/24 } log prefix "RFC3964_IPv4_REJECT: " reject with icmpv6 type addr-unreachable
		jump filter_FORWARD_ZONES
		log prefix "FINAL_REJECT: "
		reject with icmpx type admin-prohibited
	}
	chain filter_FORWARD_ZONES {
		iifname "wan0" goto filter_FWD_external
		iifname "lan0" goto filter_FWD_internal
		goto filter_FWD_external
	}
	chain filter_FWD_external {
		log prefix "filter_FWD_external_REJECT: "
		reject with icmpx type admin-prohibited
	}
	chain filter_FWD_internal {
		jump filter_FWD_internal_deny
		oifname "wan0" accept
		reject with icmpx type admin-prohibited
	}
	chain filter_FWD_internal_deny {
		udp dport 9 drop
	}
}
`

// loadRules loads rules: in the language of nft, or as iptables-save prints them.
func loadRules(t *testing.T, n *lab.Node, by, text string) {
	t.Helper()
	switch by {
	case "nft":
		command(t, n, text, "nft", "-f", "-")
	default:
		command(t, n, text, by+"-restore")
	}
}

// TestRulesOfPrograms loads the rules of other programs. The packets of each translated connection are identical with
// and without acceleration, and its flows are learned.
func TestRulesOfPrograms(t *testing.T) {
	services := map[string]string{
		"kube-proxy": "10.96.0.10:80 10.0.1.1:30080 10.0.1.1:30081 10.244.0.5:8080 10.96.0.99:80",
		"firewalld":  "10.0.2.2:7 10.0.1.1:8080 10.0.2.2:8081 10.0.2.2:9",
	}
	for _, c := range []struct{ program, by, text string }{
		{"kube-proxy", "iptables-nft", kubeProxyRules},
		{"kube-proxy", "iptables-legacy", kubeProxyRules},
		{"firewalld", "nft", firewalldRules},
	} {
		t.Run(c.program+" "+c.by, func(t *testing.T) {
			labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"))
			p := passageOf(t, labtest.New(t, router()))
			command(t, p.router, "", "ip", "route", "add", "10.244.0.0/16", "via", "10.0.2.2")
			loadRules(t, p.router, c.by, c.text)
			for _, service := range strings.Fields(services[c.program]) {
				for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
					p.connect(proto, service)
				}
			}
			by := p.identical(2000, 1)
			if by[hookXDP] == 0 {
				t.Errorf("no packet took the fast path: %v", by)
			}
			if translated := slices.ContainsFunc(p.all, func(c conversation) bool { return c.translated() && c.passes == [2]bool{true, true} }); !translated {
				t.Errorf("no connection was translated: %+v", p.all)
			}
		})
	}
}
