// SPDX-License-Identifier: Apache-2.0

package sick

// fault is one fault of a host.
type fault struct {
	name  string
	group string
	kinds []kind // kinds of hosts that can have the fault; none: all
	// flow is the exchange that the fault interrupts; empty if no exchange of the hosts fails.
	flow string
	// scripts make it, in the order of the list: node and script, in turns.
	scripts []string
	want    string // matches the first line of a right conclusion, without regard to case
}

// forward is where a rule of the forward chain is inserted; Docker's host has one of iptables-nft.
const forward = `[ $IN = docker0 ] && chain="ip filter FORWARD" || chain="inet filter forward"; nft insert rule $chain `

// input is the same for packets to the host, in a table of its own on Docker's host.
const input = `[ $IN = docker0 ] && { nft add table inet filter; nft 'add chain inet filter input { type filter hook input priority filter; }'; }; nft insert rule inet filter input `

// source is the chain that translates sources.
const source = `[ $IN = docker0 ] && chain="ip nat POSTROUTING" || chain="ip nat post"; `

// fresh has g ask again for its neighbours.
const fresh = `ip neigh flush all; ip -6 neigh flush all`

var withNft = []kind{router, gateway, balancer}

// faults are all that is known. Order and names are part of the meaning of a seed.
var faults = []fault{
	// Rules.
	{"forward drops a port", "rules", nil, "out", []string{"g", forward + "iifname $IN tcp dport 443 drop"}, `rule drops.*443|dport 443`},
	{"forward drops DNS", "rules", nil, "dns", []string{"g", forward + "udp dport 53 drop"}, `rule drops.*dport 53|dport 53`},
	{"forward rejects a port", "rules", withNft, "out", []string{"g", forward + "iifname $IN tcp dport 443 reject"}, `dport 443`},
	{"forward drops the inside network", "rules", nil, "out", []string{"g", forward + "ip saddr $NET ip daddr 198.51.100.0/24 drop"}, `198\.51\.100\.0/24 .*drop`},
	{"forward drops IPv6", "rules", withNft, "six", []string{"g", forward + "ip6 daddr 2001:db8:9::/64 drop"}, `2001:db8:9::`},
	{"forward drops what is published", "rules", nil, "published", []string{"g", forward + "ct status dnat drop"}, `status.dnat|published|forwards a port`},
	{"forward accepts established connections no more", "rules", []kind{router, balancer, gateway}, "out", []string{"g", "nft insert rule inet filter forward iifname $OUT ct state established drop"}, `established`},
	{"input drops a service", "rules", nil, "service", []string{"g", input + "udp dport 1194 drop"}, `1194`},
	{"input drops a TCP service", "rules", nil, "web", []string{"g", input + "tcp dport 8443 drop"}, `8443`},
	{"output drops a port", "rules", nil, "own", []string{"g", "nft -f - <<R\ntable inet mine { chain out { type filter hook output priority filter; tcp dport 443 drop; }; }\nR"}, `dport 443`},
	{"input drops neighbour discovery", "rules", nil, "six", []string{"g", input + "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } drop", "g", fresh, "c", fresh, "s", fresh}, `neighbour|nd-neighbor`},
	{"prerouting drops a port", "rules", nil, "dns", []string{"g", "nft -f - <<R\ntable ip early { chain pre { type filter hook prerouting priority raw; udp dport 53 drop; }; }\nR"}, `dport 53`},
	{"ingress drops a port", "rules", nil, "dns", []string{"g", "nft -f - <<R\ntable netdev early { chain in { type filter hook ingress device \"$IN\" priority 0; udp dport 53 drop; }; }\nR"}, `dport 53`},
	{"prerouting keeps packets untracked", "rules", nil, "out", []string{"g", "nft -f - <<R\ntable ip early { chain pre { type filter hook prerouting priority raw; iifname \"$IN\" notrack; }; }\nR"}, `notrack|untracked|untranslated`},
	{"answers are kept untracked", "rules", nil, "out", []string{"g", "nft -f - <<R\ntable ip early { chain pre { type filter hook prerouting priority raw; iifname \"$OUT\" notrack; }; }\nR"}, `notrack|untracked|not recognised`},
	{"requests alone have a zone", "rules", withNft, "out", []string{"g", "nft -f - <<R\ntable ip early { chain pre { type filter hook prerouting priority raw; iifname \"$IN\" ct zone set 5; }; }\nR"}, `zone|not recognised`},
	{"a limit drops connections", "rules", nil, "out", []string{"g", forward + "tcp dport 443 tcp flags syn limit rate over 1/second burst 1 packets drop"}, `limit`},
	{"a set bans the client", "rules", withNft, "out", []string{"g", "nft 'add set inet filter banned { type ipv4_addr; elements = { '$C' }; }'; nft 'insert rule inet filter forward ip saddr @banned drop'"}, `@banned`},
	{"no masquerade rule", "nat", nil, "out", []string{"g", source + "nft flush chain $chain"}, `untranslated|no rule translates`},
	{"masquerade names another interface", "nat", nil, "out", []string{"g", source + "nft flush chain $chain; nft add rule $chain oifname eth7 masquerade"}, `untranslated|no rule translates`},
	{"masquerade names another network", "nat", nil, "out", []string{"g", source + "nft flush chain $chain; nft add rule $chain ip saddr 10.99.0.0/24 oifname $OUT masquerade"}, `untranslated|no rule translates`},
	{"all rules are flushed", "nat", nil, "out", []string{"g", "nft flush ruleset; nft -f - <<R\ntable inet filter { chain forward { type filter hook forward priority filter; ct state established,related accept; }; }\nR"}, `untranslated|no rule translates`},
	{"source translated to a foreign address", "nat", nil, "out", []string{"g", source + "nft flush chain $chain; nft add rule $chain oifname $OUT snat to 203.0.113.77"}, `203\.0\.113\.77`},
	{"source translated to an unrouted address", "nat", nil, "out", []string{"g", source + "nft flush chain $chain; nft add rule $chain oifname $OUT snat to 192.0.2.77"}, `192\.0\.2\.77`},
	{"port forward to a dead host", "nat", withNft, "published", []string{"g", "nft flush chain ip nat pre; nft add rule ip nat pre tcp dport 8080 dnat to ${C%.*}.99:80"}, `\.99\b`},
	{"port forward to a closed port", "nat", withNft, "published", []string{"g", "nft flush chain ip nat pre; nft add rule ip nat pre tcp dport 8080 dnat to $C:81"}, `:81\b|port 81|refus|reset`},
	{"port forward to a loopback address", "nat", withNft, "published", []string{"g", "nft flush chain ip nat pre; nft add rule ip nat pre tcp dport 8080 dnat to 127.0.0.1:80; nft insert rule inet filter input tcp dport 80 accept", "serve", "127.0.0.1:80"}, `martian|127\.0\.0|route_localnet`},
	{"a rule drops fragments of answers", "rules", nil, "", []string{"g", "nft -f - <<R\ntable ip early { chain pre { type filter hook prerouting priority -450; ip frag-off & 0x1fff != 0 drop; }; }\nR", "large", "198.51.100.8:53"}, `frag-off|fragment`},
	// Routes.
	{"no default route", "routes", nil, "out", []string{"g", "ip route del default"}, `no route`},
	{"no default route of IPv6", "routes", nil, "six", []string{"g", "ip -6 route del default"}, `no route`},
	{"a blackhole route", "routes", nil, "out", []string{"g", "ip route add blackhole 198.51.100.0/24"}, `blackhole`},
	{"an unreachable route", "routes", nil, "out", []string{"g", "ip route add unreachable 198.51.100.0/24"}, `unreachable`},
	{"a prohibit route", "routes", nil, "out", []string{"g", "ip route add prohibit 198.51.100.0/24"}, `prohibit`},
	{"a blackhole route of IPv6", "routes", nil, "six", []string{"g", "ip -6 route add blackhole 2001:db8:9::/64"}, `blackhole`},
	{"an unreachable route of IPv6", "routes", nil, "six", []string{"g", "ip -6 route add unreachable 2001:db8:9::/64"}, `unreachable`},
	{"the gateway's address is wrong", "routes", nil, "out", []string{"g", "ip route replace default via 203.0.113.99"}, `203\.0\.113\.99`},
	{"the gateway's address of IPv6 is wrong", "routes", nil, "six", []string{"g", "ip -6 route replace default via 2001:db8:0:1::99"}, `2001:db8:0:1::99`},
	{"one of two next hops is dead", "routes", nil, "out", []string{"g", "sysctl -qw net.ipv4.fib_multipath_hash_policy=1; ip route replace default nexthop via 203.0.113.2 dev $OUT nexthop via 203.0.113.99 dev $OUT"}, `203\.0\.113\.99`},
	{"one of two next hops of IPv6 is dead", "routes", nil, "six", []string{"g", "ip -6 route del default; ip -6 route add default nexthop via 2001:db8:0:1::2 dev $OUT nexthop via 2001:db8:0:1::99 dev $OUT; sysctl -qw net.ipv6.fib_multipath_hash_policy=1"}, `2001:db8:0:1::99`},
	{"a destination is routed to the inside", "routes", nil, "dns", []string{"g", "ip route add 198.51.100.7/32 dev $IN"}, `next hop.*not answer|not answer.*(arp|$IN)|$IN.*not answer|wrong way`},
	{"a rule routes the inside into nothing", "routes", nil, "out", []string{"g", "ip rule add from $NET unreachable"}, `unreachable|ip rule`},
	{"a rule uses a table without a route", "routes", nil, "out", []string{"g", "ip route add prohibit default table 77; ip rule add iif $IN table 77"}, `prohibit|table 77`},
	{"a loop with the inside", "routes", nil, "dns", []string{"c", "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.send_redirects=0 net.ipv4.conf.eth0.send_redirects=0", "g", "ip route add 198.51.100.7/32 via $C dev $IN", "g", "sysctl -qw net.ipv4.conf.all.send_redirects=0 net.ipv4.conf.$IN.send_redirects=0"}, `loop|TTL|interface of their arrival|wrong way|back`},
	{"the inside network has no route", "routes", []kind{router, gateway, balancer}, "published", []string{"g", "ip route del $NET dev $IN"}, `no route|$NET.*route to it is missing`},
	// Settings.
	{"forwarding is off", "settings", nil, "out", []string{"g", "sysctl -qw net.ipv4.ip_forward=0"}, `forwarding is off`},
	{"forwarding is off on the inside interface", "settings", nil, "out", []string{"g", "sysctl -qw net.ipv4.conf.$IN.forwarding=0"}, `forwarding is off`},
	{"forwarding of IPv6 is off", "settings", nil, "six", []string{"g", "sysctl -qw net.ipv6.conf.all.forwarding=0"}, `forwarding is off|forwarding`},
	{"the reverse path filter refuses a source", "settings", nil, "service", []string{"g", "ip route add 203.0.113.2/32 dev $IN; ip route replace default via 203.0.113.66; sysctl -qw net.ipv4.conf.$OUT.rp_filter=1"}, `reverse path`},
	{"IPv6 is switched off on the uplink", "settings", nil, "six", []string{"g", "sysctl -qw net.ipv6.conf.$OUT.disable_ipv6=1"}, `no route|disable_ipv6`},
	{"local ports run out", "settings", nil, "own", []string{"g", "sysctl -qw net.ipv4.tcp_tw_reuse=0 net.ipv4.ip_local_port_range='40000 40012'"}, `local port|ephemeral|ports of`},
	// Neighbours.
	{"the next hop's hardware address is wrong", "neighbours", nil, "out", []string{"g", "ip neigh replace 203.0.113.2 lladdr 02:00:00:00:00:99 nud permanent dev $OUT"}, `02:00:00:00:00:99`},
	{"the client's hardware address is wrong", "neighbours", nil, "published", []string{"g", "ip neigh replace $C lladdr 02:00:00:00:00:99 nud permanent dev $IN"}, `02:00:00:00:00:99`},
	{"the router does not answer ARP", "neighbours", nil, "out", []string{"s", "sysctl -qw net.ipv4.conf.all.arp_ignore=8 net.ipv4.conf.eth0.arp_ignore=8", "g", fresh}, `203\.0\.113\.2\b.*not answer|next hop.*not answer`},
	{"the router does not answer neighbour discovery", "neighbours", nil, "six", []string{"s", "nft -f - <<R\ntable ip6 mute { chain in { type filter hook input priority filter; icmpv6 type nd-neighbor-solicit drop; }; }\nR", "g", fresh}, `2001:db8:0:1::2\b.*not answer|next hop.*not answer`},
	{"the client does not answer ARP", "neighbours", nil, "published", []string{"c", "sysctl -qw net.ipv4.conf.all.arp_ignore=8 net.ipv4.conf.eth0.arp_ignore=8", "g", fresh}, `next hop.*not answer|not answer ARP`},
	{"the host does not answer ARP for an address of its loopback", "neighbours", nil, "", []string{"g", "ip addr add 203.0.113.50/32 dev lo; sysctl -qw net.ipv4.conf.all.arp_ignore=1", "serve", "203.0.113.50:8445", "g", input + "tcp dport 8445 accept", "attempt", "s 203.0.113.50:8445"}, `203\.0\.113\.50.*arp`},
	{"a rule drops ARP", "neighbours", nil, "out", []string{"g", "nft 'table arp guard { chain in { type filter hook input priority 0; iifname '$IN' drop; }; }'", "c", fresh, "g", fresh}, `not answer ARP|$IN.*ARP`},
	{"another host uses the uplink's address", "neighbours", nil, "out", []string{"s", "ip addr del 203.0.113.66/24 dev eth0; ip link add br0 type bridge; ip link set br0 up; ip link set eth0 master br0; ip addr flush dev eth0; ip addr add 203.0.113.2/24 dev br0; ip -6 addr add 2001:db8:0:1::2/64 dev br0 nodad; ip route replace 2001:db8:1::/64 via 2001:db8:0:1::1; ip neigh replace 203.0.113.1 lladdr 02:00:00:00:00:66 nud permanent dev br0", "claim", "203.0.113.1"}, `203\.0\.113\.1 .*duplicate`},
	{"the client has the gateway's old hardware address", "neighbours", nil, "out", []string{"g", "[ $IN = docker0 ] || ip link set $IN promisc on", "c", "ip neigh replace $GIN lladdr 02:00:00:00:00:77 nud permanent dev eth0"}, `02:00:00:00:00:77`},
	{"a network of this host hides a route", "routes", nil, "", []string{"d", "ip addr add 172.30.5.10/32 dev lo", "g", "ip route add 172.16.0.0/12 via 10.0.1.2 dev lan9; ip link add br9 type bridge; ip addr add 172.30.0.1/16 dev br9; ip link set br9 up", "attempt", "g 172.30.5.10:80"}, `172\.30\.5\.10.*(hides|no carrier)|br9.*carrier`},
	// Links.
	{"the uplink has no carrier", "links", nil, "out", []string{"s", "ip link set eth0 down"}, `carrier`},
	{"the uplink is down", "links", nil, "out", []string{"g", "ip link set $OUT down"}, `no route|is down`},
	{"the far end takes smaller frames", "links", nil, "out", []string{"s", "ip link set eth0 mtu 1300"}, `far end|too large|MTU`},
	{"the uplink is narrow and ICMP is blocked", "links", nil, "out", []string{"g", "ip link set $OUT mtu 1300; nft -f - <<R\ntable inet mute { chain out { type filter hook output priority filter; icmp type destination-unreachable drop; icmpv6 type packet-too-big drop; }; }\nR"}, `too large|too big|MTU`},
	{"the uplink's IPv6 address is a duplicate", "links", nil, "six", []string{"s", "ip -6 addr add 2001:db8:0:1::1/64 dev eth0 nodad", "g", "ip -6 addr del 2001:db8:0:1::1/64 dev $OUT; sysctl -qw net.ipv6.conf.$OUT.accept_dad=1 net.ipv6.conf.all.accept_dad=1; ip -6 addr add 2001:db8:0:1::1/64 dev $OUT; sleep 2; ip -6 route replace default via 2001:db8:0:1::2 dev $OUT"}, `dad|duplicate`},
	{"the uplink's address is gone", "links", nil, "out", []string{"g", "ip addr del 203.0.113.1/24 dev $OUT"}, `no route`},
	// Queues.
	{"a shaper is too slow", "queues", nil, "out", []string{"g", "tc qdisc add dev $OUT root tbf rate 30kbit burst 3000 limit 4000"}, `queue`},
	{"a class is too slow", "queues", nil, "out", []string{"g", "tc qdisc add dev $OUT root handle 1: htb default 1; tc class add dev $OUT parent 1: classid 1:1 htb rate 30kbit; tc qdisc add dev $OUT parent 1:1 pfifo limit 3"}, `queue`},
	{"a shaper of the inside is too slow", "queues", nil, "published", []string{"g", "tc qdisc add dev $IN root tbf rate 30kbit burst 3000 limit 4000"}, `queue`},
	// Sockets.
	{"nothing listens", "sockets", nil, "", []string{"probe", "1195"}, `(nothing listens|refus|closed|no program).*1195|1195.*(nothing listens|refus|closed|no program)`},
	{"a program does not read", "sockets", nil, "", []string{"hang", "1196"}, `1196.*(queue|read|full)|(queue|read|full).*1196`},
	{"a program does not accept", "sockets", nil, "", []string{"full", "8444"}, `accept queue`},
	{"a service listens on the loopback address alone", "sockets", nil, "", []string{"g", input + "tcp dport 8446 accept", "serve", "127.0.0.1:8446", "attempt", "s 203.0.113.1:8446"}, `8446.*another address`},
	// IPsec.
	{"an IPsec policy blocks", "ipsec", nil, "out", []string{"g", "ip xfrm policy add src $NET dst 198.51.100.0/24 dir fwd action block"}, `ipsec`},
	{"an IPsec policy wants a tunnel that is not there", "ipsec", nil, "out", []string{"g", "ip xfrm policy add src $G dst 198.51.100.0/24 dir out tmpl src $G dst $S proto esp mode tunnel"}, `ipsec`},
	{"an IPsec policy is bypassed by NAT", "ipsec", nil, "dns", []string{"s", "ip route add $NET via 203.0.113.1; nft -f - <<R\ntable ip peer { chain in { type filter hook prerouting priority raw; ip saddr $G ip daddr 198.51.100.7 drop; }; }\nR", "g", "ip xfrm policy add src $NET dst 198.51.100.7/32 dir out tmpl src $G dst $S proto esp mode transport level use"}, `ipsec`},
	// Bridges.
	{"a bridge port listens", "bridge", []kind{docker}, "out", []string{"g", "ip link set docker0 type bridge stp_state 1 forward_delay 1500; ip link set veth1 nomaster; ip link set veth1 master docker0"}, `spanning tree`},
	{"a bridge is down", "bridge", []kind{docker}, "published", []string{"g", "ip link set docker0 down"}, `no route|docker0|down`},
	{"a container is not on the bridge", "bridge", []kind{docker}, "published", []string{"g", "ip link set veth1 nomaster"}, `docker0|carrier|next hop|not answer`},
	{"a VLAN filter separates the container", "bridge", []kind{docker}, "published", []string{"g", "ip link set docker0 type bridge vlan_filtering 1; bridge vlan del dev veth1 vid 1"}, `vlan|docker0.*not answer|next hop.*not answer|not answer.*docker0`},
	// Answers, servers, sources.
	{"the server drops requests", "far side", nil, "dns", []string{"s", "nft -f - <<R\ntable ip mute { chain in { type filter hook input priority filter; udp dport 53 drop; }; }\nR"}, `198\.51\.100\.7.*(no answer|nothing came back)|(no answer|nothing came back).*198\.51\.100\.7`},
	{"the server refuses", "far side", nil, "out", []string{"s", "nft -f - <<R\ntable ip shut { chain in { type filter hook input priority filter; tcp dport 443 reject with tcp reset; }; }\nR"}, `reset|refus`},
	{"the server's firewall rejects", "far side", nil, "out", []string{"s", "nft -f - <<R\ntable ip shut { chain in { type filter hook input priority filter; tcp dport 443 reject with icmp admin-prohibited; }; }\nR"}, `reject|icmp|prohibited|refus`},
	{"answers take another way", "far side", nil, "out", []string{"s", "ip route add blackhole 203.0.113.1/32 table 88; ip rule add from 198.51.100.0/24 table 88"}, `no answer|nothing came back|does not return`},
	{"the server of a port forward is dead", "far side", []kind{router, gateway, docker}, "published", []string{"c", "nft -f - <<R\ntable ip mute { chain in { type filter hook input priority filter; tcp dport 80 drop; }; }\nR"}, `no answer|nothing came back`},
	{"one backend is dead", "far side", []kind{balancer}, "published", []string{"d", "nft -f - <<R\ntable ip mute { chain in { type filter hook input priority filter; tcp dport 80 drop; }; }\nR"}, `10\.0\.1\.2.*(no answer|nothing came back)|(no answer|nothing came back).*10\.0\.1\.2`},
	{"the backend has no way back", "far side", []kind{router, gateway}, "published", []string{"c", "ip route del default; ip route add 198.51.100.0/24 via $GIN"}, `no answer|nothing came back|does not return`},
	{"answers arrive with the last hop", "far side", nil, "out", []string{"s", "nft 'table ip carrier { chain o { type filter hook output priority 0; ip saddr 198.51.100.0/24 ip ttl set 1; }; }'"}, `hop limit`},
	{"a program answers from another address", "far side", nil, "", []string{"g", "ip addr add 203.0.113.60/24 dev $OUT; " + "[ $IN = docker0 ] || nft insert rule inet filter input udp dport 5353 accept", "wildcard", "5353", "ask", "203.0.113.60:5353"}, `instead of 203\.0\.113\.60`},
	{"a route has the wrong source", "far side", nil, "own", []string{"g", "ip route replace default via 203.0.113.2 src $GIN; [ $IN = docker0 ] && iptables-nft -t nat -I POSTROUTING -s $GIN -j ACCEPT || nft insert rule ip nat post ip saddr $GIN accept"}, `source|$GIN|untranslated`},
	{"an address of the inside network is routed elsewhere", "far side", []kind{gateway, router}, "", []string{"g", "ip route add ${C%.*}.200/32 via 10.0.1.2 dev lan9", "d", "ip addr add ${C%.*}.200/32 dev lo; ip route add $C/32 via 10.0.1.1 src ${C%.*}.200", "attempt", "d $C:80"}, `\.200\b.*(arp|proxy)|proxy`},
	{"VRRP advertisements are dropped", "far side", withNft, "", []string{"vrrp", ""}, `vrrp|112`},
	// Readers.
	{"a program accepts and does not read", "readers", nil, "", []string{"unread", "g 203.0.113.1:8445"}, `203\.0\.113\.1:8445.*not read|not read.*203\.0\.113\.1:8445`},
	{"the server of a port forward does not read", "readers", withNft, "published", []string{"unread", "c 0.0.0.0:81", "g", "nft flush chain ip nat pre; nft add rule ip nat pre tcp dport 8080 dnat to $C:81"}, `$C:81.*not read|not read.*$C:81`},
	{"servers do not read", "readers", nil, "out", []string{"unread", "s 0.0.0.0:444", "s", "nft -f - <<R\ntable ip slow { chain pre { type nat hook prerouting priority dstnat; tcp dport 443 redirect to :444; }; }\nR"}, `server does not read`},
	{"forward drops one of two queries of a socket", "rules", nil, "", []string{"pairs", remote[0] + ":53", "g", forward + "udp dport 53 @th,64,16 2 drop"}, `rule drops.*dport 53|dport 53`},
}
