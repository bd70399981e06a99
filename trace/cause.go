// SPDX-License-Identifier: Apache-2.0

package trace

import "strings"

// Cause says in plain words why packets were dropped. The same causes are used
// by the doctor and by the drops view.
type Cause struct {
	ID      string `json:"id"`      // Stable name, such as "table-full".
	Title   string `json:"title"`   // what happened, a few words
	Meaning string `json:"meaning"` // One sentence for users who do not know the kernel.
	Remedy  string `json:"remedy,omitempty"`
	// Benign drops are part of normal operation: no application waits for the packets.
	Benign bool `json:"benign,omitempty"`
	// Counter is the kernel counter that counts the same packets, empty where
	// there is none; see Counters.
	Counter string `json:"counter,omitempty"`
}

// The causes. A drop belongs to exactly one.
var (
	CauseTableFull = Cause{ID: "table-full", Title: "connection table full", Counter: "conntrack.drop",
		Meaning: "the connection tracking table had no free entry, so new connections were refused",
		Remedy:  "raise net.netfilter.nf_conntrack_max (384 bytes an entry) or free entries: sluice tune"}
	CausePortsExhausted = Cause{ID: "snat-ports", Title: "no free source port for SNAT", Counter: "conntrack.insert_failed",
		Meaning: "every port of the SNAT address to this destination is in use; nothing is logged when this happens",
		Remedy:  "add public addresses, widen the port range, or reuse connections (keep-alive)"}
	CauseConfirmRace = Cause{ID: "confirm-race", Title: "two packets made the same flow", Counter: "conntrack.insert_failed",
		Meaning: "another packet entered the same connection into the table first",
		Remedy:  "let SNAT take ports at random (masquerade random,fully-random); for DNS use a local cache or single-request-reopen"}
	CauseLongChain = Cause{ID: "long-chain", Title: "hash chain of the connection table too long", Counter: "conntrack.chain_too_long",
		Meaning: "too many connections share a bucket of the table, which is not full, so new ones were refused",
		Remedy:  "raise net.netfilter.nf_conntrack_buckets to nf_conntrack_max; if it is, suspect a collision attack"}
	CauseNftRule = Cause{ID: "nft-rule", Title: "nftables rule",
		Meaning: "a rule or a chain policy of nftables (or iptables-nft) drops the packet"}
	CauseLegacyRule = Cause{ID: "legacy-rule", Title: "firewall rule (iptables-legacy)",
		Meaning: "a rule of a netfilter hook drops the packet; the kernel does not tell which"}
	CauseHookRule = Cause{ID: "hook-rule", Title: "firewall rule (nftables or iptables)",
		Meaning: "a rule of a netfilter hook drops the packet; this kernel does not tell nftables and iptables apart"}
	CauseForwardOff = Cause{ID: "forwarding-off", Title: "forwarding is off", Counter: "Ip.InAddrErrors",
		Meaning: "packets for other hosts arrive, but this host is not set to forward",
		Remedy:  "sysctl -w net.ipv4.ip_forward=1"}
	CauseRPFilter = Cause{ID: "rp-filter", Title: "reverse path filter", Counter: "TcpExt.IPReversePathFilter",
		Meaning: "the answer to the packet's source would leave by another interface, so it was taken for spoofed",
		Remedy:  "set rp_filter to 2 (loose) on the interface, or correct the route back"}
	CauseMTU = Cause{ID: "mtu", Title: "packet larger than the next link's MTU", Counter: "Ip.FragFails",
		Meaning: "the packet may not be fragmented and does not fit; the sender was told by ICMP, if that gets through",
		Remedy:  "clamp the TCP segment size (tcp option maxseg size set rt mtu) or align the MTUs"}
	CauseTTL = Cause{ID: "ttl", Title: "TTL expired", Counter: "Ip.InHdrErrors",
		Meaning: "the packet passed too many routers, usually a routing loop",
		Remedy:  "look for two routers that point at each other for this destination"}
	CauseHeader = Cause{ID: "bad-header", Title: "broken IP header", Counter: "Ip.InHdrErrors",
		Meaning: "version, length or checksum of the IP header is wrong",
		Remedy:  "look for a device that truncates or rewrites packets"}
	CauseNoRoute = Cause{ID: "no-route", Title: "no route", Counter: "IpExt.InNoRoutes",
		Meaning: "the routing table has no route to the destination",
		Remedy:  "add the missing route"}
	CauseBlackhole = Cause{ID: "blackhole-route", Title: "route says drop",
		Meaning: "a blackhole, unreachable or prohibit route covers the destination",
		Remedy:  "ip route show table all match DESTINATION shows the route, ip rule the rule"}
	CauseNeighbour = Cause{ID: "neighbour-failed", Title: "next hop does not answer",
		Meaning: "nobody answered ARP or neighbour discovery for the next hop",
		Remedy:  "check that the next hop is up and on this link"}
	CauseNeighbourQueue = Cause{ID: "neighbour-queue", Title: "queue for an unresolved next hop full",
		Meaning: "packets waited for ARP or neighbour discovery and there were too many",
		Remedy:  "check the next hop; net.ipv4.neigh.*.unres_qlen_bytes"}
	CauseNeighbourFull = Cause{ID: "neighbour-table", Title: "neighbour table full", Counter: "neigh.table_fulls",
		Meaning: "there is no room for another next hop in the ARP or neighbour table",
		Remedy:  "raise net.ipv4.neigh.default.gc_thresh1/2/3"}
	CauseQdisc = Cause{ID: "qdisc", Title: "queueing discipline",
		Meaning: "the transmit queue was full, or the shaper refused the packet",
		Remedy:  "tc -s qdisc shows which; raise the limit or use fq_codel"}
	CauseBacklog = Cause{ID: "backlog", Title: "receive backlog full", Counter: "softnet.dropped",
		Meaning: "packets arrived faster than one CPU took them from its backlog",
		Remedy:  "raise net.core.netdev_max_backlog, spread the load over CPUs (RPS)"}
	CauseClosedPort = Cause{ID: "closed-port", Title: "nobody listens on the port", Counter: "Udp.NoPorts",
		Meaning: "a packet for this host reached a port without a socket"}
	CauseClosedTCP = Cause{ID: "closed-port-tcp", Title: "nobody listens on the TCP port",
		Meaning: "a segment for this host belongs to no socket; it was answered by RST"}
	CauseAcceptQueue = Cause{ID: "accept-queue", Title: "accept queue full", Counter: "TcpExt.ListenOverflows",
		Meaning: "the program does not accept connections fast enough; the kernel reports no event for these drops",
		Remedy:  "raise the program's listen backlog and net.core.somaxconn"}
	CauseReceiveBuffer = Cause{ID: "receive-buffer", Title: "socket's receive buffer full", Counter: "Udp.RcvbufErrors",
		Meaning: "a program reads its socket too slowly",
		Remedy:  "raise net.core.rmem_max and the program's buffer"}
	CauseChecksum = Cause{ID: "checksum", Title: "wrong checksum",
		Meaning: "the packet was damaged, or its sender left the checksum to hardware that did not write it",
		Remedy:  "turn transmit checksum offload off at the sender: ethtool -K DEV tx-checksum-ip-generic off"}
	CauseFragment = Cause{ID: "fragments", Title: "fragments that were not put together",
		Meaning: "the fragments of a packet did not all come in time, or the memory for fragments was full",
		Remedy:  "raise net.ipv4.ipfrag_high_thresh (net.ipv6.ip6frag_high_thresh), or send packets that fit the path"}
	CauseDuplicate = Cause{ID: "duplicate-fragment", Title: "duplicate fragment", Benign: true,
		Meaning: "the same part of a packet was there already"}
	CauseFarEnd = Cause{ID: "far-end", Title: "frame that the far end of a virtual link does not take",
		Meaning: "the frame is larger than the MTU of the link's other end, or that end is down; no ICMP error is sent",
		Remedy:  "give both ends of the link the same MTU"}
	CauseBridgePort = Cause{ID: "bridge-port", Title: "bridge port that does not forward",
		Meaning: "spanning tree (STP) holds the port in a state in which its frames are dropped",
		Remedy:  "wait for twice the forward delay, or turn STP off on the bridge (ip link set BRIDGE type bridge stp_state 0)"}
	CauseMartian = Cause{ID: "martian", Title: "impossible (martian) address",
		Meaning: "the source or destination cannot occur on this link (loopback, own or broadcast source), or may not leave it",
		Remedy:  "for DNAT to 127.0.0.1 see net.ipv4.conf.*.route_localnet"}
	CauseOtherHost = Cause{ID: "other-host", Title: "frame for another host", Benign: true,
		Meaning: "the frame's destination MAC is not this interface's"}
	CauseUnwantedProtocol = Cause{ID: "unhandled", Title: "protocol nobody handles", Benign: true,
		Meaning: "no protocol handler is registered for the frame"}
	CauseXDP = Cause{ID: "xdp", Title: "dropped by an XDP program",
		Meaning: "an XDP program on a virtual link returned XDP_DROP"}
	CauseXDPRedirect = Cause{ID: "xdp-redirect", Title: "lost when an XDP program redirected them",
		Meaning: "an XDP program redirected frames to an interface that does not take them; no other drop event or counter tells of it",
		Remedy:  "of a veth, turn GRO on at its other end or attach an XDP program there; else redirect by TC"}
	CauseXDPAborted = Cause{ID: "xdp-aborted", Title: "aborted by an XDP program",
		Meaning: "an XDP program failed (XDP_ABORTED, or a verdict that the driver does not know), or XDP_TX found no room"}
	CauseTC = Cause{ID: "tc", Title: "dropped by a TC program or filter",
		Meaning: "a TC filter or BPF program dropped the packet"}
	CauseIPsec = Cause{ID: "ipsec-policy", Title: "IPsec policy",
		Meaning: "an IPsec policy forbids the packet, or wants it encrypted",
		Remedy:  "ip xfrm policy shows the policies, /proc/net/xfrm_stat counts"}
	CauseDetach = Cause{ID: "teardown", Title: "device or socket goes away", Benign: true,
		Meaning: "packets that waited in a queue of something that was removed"}
	CauseTestRun = Cause{ID: "test-run", Title: "test run of a BPF program", Benign: true,
		Meaning: "a packet that a program made for BPF_PROG_TEST_RUN and no link ever carried"}
	CauseTCPHousekeeping = Cause{ID: "tcp-housekeeping", Title: "end of TCP connections", Benign: true,
		Meaning: "last segments of connections that are already over"}
	CauseMulticast = Cause{ID: "multicast", Title: "multicast nobody joined", Benign: true,
		Meaning: "neighbour discovery and group membership of addresses that are not used here"}
	CauseOther = Cause{ID: "other", Title: "other",
		Meaning: "dropped by the function named; no common cause is known for it"}
)

// dropSite has the properties that identify a kind of drop to the rules below.
type dropSite struct {
	function string // Where the packet was freed.
	reason   string // Name without prefix.
	caller   string // Calling function, "" without a sampled stack.
	hook     Hook
	ct       Tracked
	// unicast: the sampled packet had one receiver
	unicast bool
	// linkLocal: the sampled packet's sender has an address of its link alone
	linkLocal bool
	// nftSeparate: this kernel frees packets of nft rules in nft_do_chain (6.7)
	nftSeparate bool
}

// rule maps a site to its cause. An empty field matches all.
type rule struct {
	function string // prefix match with a trailing *
	reason   string
	cause    *Cause
}

// rules, first match wins. Every line was produced in a lab and read back.
var rules = []rule{
	{"nft_do_chain*", "", &CauseNftRule},
	{"ip_error", "IP_INADDRERRORS", &CauseForwardOff},
	{"ip_error", "IP_INNOROUTES", &CauseNoRoute},
	{"ip_error", "", &CauseBlackhole},
	{"ip6_pkt_prohibit*", "", &CauseBlackhole},
	{"dst_discard*", "", &CauseBlackhole}, // blackhole routes of IPv6
	{"", "BRIDGE_INGRESS_STP_STATE", &CauseBridgePort},
	{"br_handle_frame", "NOT_SPECIFIED", &CauseBridgePort}, // kernels before 6.14
	{"", "FRAG_*", &CauseFragment},
	{"", "DUP_FRAG", &CauseDuplicate},
	{"ip_defrag", "", &CauseFragment},
	{"ip_expire", "", &CauseFragment},
	{"ip_frag_*", "", &CauseFragment},
	{"inet_frag*", "", &CauseFragment},
	{"ipv6_frag_rcv", "", &CauseFragment},
	{"ip6frag_*", "", &CauseFragment},
	{"nf_ct_frag6_*", "", &CauseFragment},
	{"__dev_forward_skb*", "", &CauseFarEnd},
	{"dev_forward_skb*", "", &CauseFarEnd},
	{"veth_forward_skb", "", &CauseFarEnd},
	{"veth_xmit", "", &CauseFarEnd},
	{"", "IP_RPFILTER", &CauseRPFilter},
	{"", "PKT_TOO_BIG", &CauseMTU},
	{"ip_forward", "IP_INHDR", &CauseTTL},
	{"ip6_forward", "IP_INHDR", &CauseTTL},
	{"", "IP_INHDR", &CauseHeader},
	{"", "IP_CSUM", &CauseChecksum},
	{"", "IP_INNOROUTES", &CauseNoRoute},
	{"", "IP_OUTNOROUTES", &CauseNoRoute},
	{"ip6_pkt_drop", "IP_INADDRERRORS", &CauseForwardOff},
	{"ip6_forward", "IP_INADDRERRORS", &CauseForwardOff},
	{"neigh_invalidate", "", &CauseNeighbour},
	{"", "NEIGH_FAILED", &CauseNeighbour},
	{"", "NEIGH_QUEUEFULL", &CauseNeighbourQueue},
	{"", "NEIGH_CREATEFAIL", &CauseNeighbourFull},
	{"", "NEIGH_DEAD", &CauseDetach},
	{"", "CPU_BACKLOG", &CauseBacklog},
	{"", "QDISC_*", &CauseQdisc},
	{"", "FQ_*", &CauseQdisc},
	{"", "TC_*", &CauseTC},
	{"", "XDP", &CauseXDP},
	{"veth_xdp_rcv*", "", &CauseXDP},
	{"__udp4_lib_rcv", "NO_SOCKET", &CauseClosedPort},
	{"__udp6_lib_rcv", "NO_SOCKET", &CauseClosedPort},
	{"udp_unicast_rcv_skb", "NO_SOCKET", &CauseClosedPort},
	{"", "NO_SOCKET", &CauseClosedTCP},
	{"", "SOCKET_RCVBUFF", &CauseReceiveBuffer},
	{"", "PROTO_MEM", &CauseReceiveBuffer},
	{"", "TCP_CSUM", &CauseChecksum},
	{"", "UDP_CSUM", &CauseChecksum},
	{"", "ICMP_CSUM", &CauseChecksum},
	{"", "SKB_CSUM", &CauseChecksum},
	{"", "IP_LOCAL_SOURCE", &CauseMartian},
	{"", "IP_INVALID_SOURCE", &CauseMartian},
	{"", "IP_LOCALNET", &CauseMartian},
	{"", "IP_INVALID_DEST", &CauseMartian},
	{"", "XFRM_POLICY", &CauseIPsec},
	{"", "OTHERHOST", &CauseOtherHost},
	{"", "UNHANDLED_PROTO", &CauseUnwantedProtocol},
	{"", "IP_NOPROTO", &CauseUnwantedProtocol},
	{"", "IPV6DISABLED", &CauseUnwantedProtocol},
	{"ip6_mc_input", "", &CauseMulticast},
	{"", "UNICAST_IN_L2_MULTICAST", &CauseMulticast},
	{"", "IP_MULTICAST", &CauseMulticast},
	{"", "QUEUE_PURGE", &CauseDetach},
	{"", "SKB_UCOPY_FAULT", &CauseDetach},
	{"", "DEV_READY", &CauseDetach},
	{"skb_queue_purge*", "", &CauseDetach},
	{"skb_release_data", "", &CauseDetach},
	{"", "TCP_*", &CauseTCPHousekeeping},
	{"tcp_v4_rcv", "", &CauseTCPHousekeeping},
	{"tcp_v6_rcv", "", &CauseTCPHousekeeping},
	{"tcp_v4_do_rcv", "", &CauseTCPHousekeeping},
	{"tcp_v6_do_rcv", "", &CauseTCPHousekeeping},
	{"tcp_*", "", &CauseTCPHousekeeping},
	{"__neigh_event_send", "", &CauseNeighbour},
	{"arp_*", "", &CauseUnwantedProtocol},
	{"unix_*", "", &CauseDetach},
	{"bpf_prog_test_run*", "", &CauseTestRun},
	{"bpf_test_run*", "", &CauseTestRun},
	{"netlink_*", "", &CauseDetach},
}

// causeOf returns the cause of a kind of drop from the event alone. The counters may change the
// cause of netfilter drops later; see refineCause.
func causeOf(p dropSite) Cause {
	if p.function == "nf_hook_slow" || p.function == "nf_hook_slow_list" {
		return hookCause(p)
	}
	if p.function == "ip6_forward" && p.reason == "IP_INADDRERRORS" && p.linkLocal {
		return CauseMartian
	}
	if strings.HasPrefix(p.function, "ip6_pkt_") && p.reason == "NOT_SPECIFIED" { // before 6.4 also without a route
		if p.unicast {
			return CauseNoRoute
		}
		return CauseMulticast
	}
	for _, r := range rules {
		if matches(r.function, p.function) && matches(r.reason, p.reason) {
			return *r.cause
		}
	}
	return CauseOther
}

// hookCause separates verdicts with the same place and reason, by the hook and by the packet's
// conntrack state.
func hookCause(p dropSite) Cause {
	switch p.caller {
	case "ip_rcv", "ipv6_rcv", "ip_list_rcv", "ip_sublist_rcv", "ipv6_list_rcv", "ip6_sublist_rcv":
		p.hook = HookPrerouting
	case "ip_output", "ip6_output", "ip_mc_output":
		p.hook = HookPostrouting
	case "ip_forward", "ip6_forward":
		p.hook = HookForward
	case "ip_local_deliver", "ip6_input":
		p.hook = HookInput
	case "__ip_local_out", "__ip6_local_out", "ip6_xmit", "raw_sendmsg":
		p.hook = HookOutput
	}
	switch {
	case p.ct == TrackedNone && (p.hook == HookPrerouting || p.hook == HookOutput):
		return CauseTableFull
	case p.ct == TrackedNew && (p.hook == HookPostrouting || p.hook == HookHairpin):
		return CausePortsExhausted
	case p.ct == TrackedNew && p.hook == HookInput:
		return CauseConfirmRace
	}
	return ruleCause(p.nftSeparate)
}

func ruleCause(nftSeparate bool) Cause {
	if nftSeparate {
		return CauseLegacyRule
	}
	return CauseHookRule
}

func matches(pattern, s string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(s, prefix)
	}
	return pattern == "" || pattern == s
}
