// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/capacity"
)

// Setting is one desired value with its cost and risk.
type Setting struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	Why   string `json:"why"`
	// Cost is the maximum additional memory in bytes.
	Cost uint64 `json:"cost_bytes,omitempty"`
	Risk string `json:"risk,omitempty"`
	// AtLeast keeps a value that is already higher: sizes are never lowered.
	AtLeast bool `json:"at_least,omitempty"`
}

// Profile is a role that a host can have.
type Profile struct {
	Name  string
	About string
	// groups add the settings of the role.
	groups []func(*System, capacity.Host) []Setting
}

// Profiles are the roles, in the order in which they are shown.
var Profiles = []Profile{
	{"router", "masquerades or forwards for many clients", []func(*System, capacity.Host) []Setting{table, natTimeouts, receive, neighbours}},
	{"balancer", "spreads connections over backends by NAT", []func(*System, capacity.Host) []Setting{table, idleTimeout, receive, neighbours}},
	{"containers", "runs containers or pods behind NAT rules", []func(*System, capacity.Host) []Setting{table, idleTimeout, containers, receive, neighbours}},
	{"proxy", "accepts and opens connections itself: HAProxy, nginx, squid", []func(*System, capacity.Host) []Setting{receive, sockets}},
}

// ProfileNamed returns the profile of that name.
func ProfileNamed(name string) (Profile, error) {
	var names []string
	for _, p := range Profiles {
		if p.Name == name {
			return p, nil
		}
		names = append(names, p.Name)
	}
	last := len(names) - 1
	return Profile{}, fmt.Errorf("profile %q: unknown; there are %s and %s", name, strings.Join(names[:last], ", "), names[last])
}

// Detect picks the profile by what the host does: forwarding makes a router,
// without it a proxy.
func Detect(s *System) (p Profile, why string) {
	if s.number("net.ipv4.ip_forward") == 1 || s.number("net.ipv6.conf.all.forwarding") == 1 {
		return Profiles[0], "forwarding is on"
	}
	return Profiles[3], "forwarding is off"
}

const (
	conntrackMax     = "net.netfilter.nf_conntrack_max"
	conntrackBuckets = "net.netfilter.nf_conntrack_buckets"
	conntrackCount   = "net.netfilter.nf_conntrack_count"
	timeoutPrefix    = "net.netfilter.nf_conntrack_"
)

// table sizes the connection table: a tenth of the memory, at most 2^20 entries,
// which is more than a host can usually fill and still cheap to dump.
func table(s *System, h capacity.Host) []Setting {
	entries := min(capacity.Capacity(h, capacity.Habits{}).Entries, 1<<20)
	return tableOf(s, max(entries, s.number(conntrackMax)))
}

// tableOf sizes the table for a number of entries. Buckets are set first, so that hash chains do
// not grow in between.
func tableOf(s *System, entries uint64) []Setting {
	now := s.number(conntrackMax)
	grown := uint64(0)
	if entries > now {
		grown = (entries - now) * capacity.EntryBytes(capacity.Extensions{NAT: true})
	}
	buckets := uint64(1) << bits.Len64(entries-1)
	bucketCost := uint64(0)
	if have := s.number(conntrackBuckets); buckets > have {
		bucketCost = (buckets - have) * capacity.BucketBytes
	}
	return []Setting{
		{Key: conntrackBuckets, Value: fmt.Sprint(buckets), AtLeast: true, Cost: bucketCost,
			Why: "one bucket for each entry: chains of two", Risk: "packets wait some milliseconds while the table is hashed anew"},
		{Key: conntrackMax, Value: fmt.Sprint(entries), AtLeast: true, Cost: grown,
			Why: "new connections are dropped at the limit", Risk: "memory, when a flood fills the table"},
	}
}

// idleTimeout keeps dead connections for a day instead of five.
func idleTimeout(*System, capacity.Host) []Setting {
	return []Setting{{Key: timeoutPrefix + "tcp_timeout_established", Value: "86400",
		Why: "half-dead connections hold entries for five days by default", Risk: "connections silent for a day are forgotten"}}
}

// natTimeouts returns the timeouts of a NAT towards the Internet. RFC 4787 REQ-5 requires two
// minutes for UDP and recommends five; RFC 5508 REQ-2 requires sixty seconds for queries.
func natTimeouts(s *System, h capacity.Host) []Setting {
	return append(idleTimeout(s, h),
		Setting{Key: timeoutPrefix + "udp_timeout", Value: "120", AtLeast: true,
			Why: "RFC 4787 REQ-5: no UDP mapping expires before 2 minutes", Risk: "four times the entries of unanswered UDP"},
		Setting{Key: timeoutPrefix + "udp_timeout_stream", Value: "300", AtLeast: true,
			Why: "RFC 4787 REQ-5 recommends 5 minutes; calls and tunnels stay up", Risk: "more entries of UDP"},
		Setting{Key: timeoutPrefix + "icmp_timeout", Value: "60", AtLeast: true,
			Why: "RFC 5508 REQ-2: no query mapping expires before 60 s"},
		Setting{Key: timeoutPrefix + "acct", Value: "1",
			Why: "byte counters of each connection; no cost was measurable"},
	)
}

// containers follows what Kubernetes sets for half-closed connections.
func containers(*System, capacity.Host) []Setting {
	return []Setting{{Key: timeoutPrefix + "tcp_timeout_close_wait", Value: "3600", AtLeast: true,
		Why: "peers that close late get untranslated FINs after 60 s", Risk: "more entries of half-closed connections"}}
}

// receive gives bursts room between NIC and stack.
func receive(*System, capacity.Host) []Setting {
	return []Setting{
		{Key: "net.core.netdev_max_backlog", Value: "4096", AtLeast: true,
			Why: "packets that one CPU hands to another wait here", Risk: "up to 4 ms more latency under overload"},
		{Key: "net.core.netdev_budget", Value: "600", AtLeast: true,
			Why: "packets of one softirq round", Risk: "programs on the same CPU wait longer"},
	}
}

// neighbours makes room for 8,192 neighbours instead of 1,024.
func neighbours(*System, capacity.Host) []Setting {
	var list []Setting
	for _, family := range []string{"ipv4", "ipv6"} {
		for i, v := range []string{"1024", "4096", "8192"} {
			list = append(list, Setting{Key: fmt.Sprintf("net.%s.neigh.default.gc_thresh%d", family, i+1), Value: v, AtLeast: true,
				Why: "a full neighbour table makes hosts of a large segment unreachable", Cost: neighbourCost(i)})
		}
	}
	return list
}

// neighbourCost is what the third threshold may cost: some 400 bytes each.
func neighbourCost(i int) uint64 {
	if i < 2 {
		return 0
	}
	return 8192 * 400
}

// sockets are for hosts that accept and open many connections.
func sockets(s *System, _ capacity.Host) []Setting {
	list := []Setting{
		{Key: "net.core.somaxconn", Value: "65535", AtLeast: true,
			Why: "accept queues are cut at this length", Risk: "programs ask for their own length in listen()"},
		{Key: "net.ipv4.tcp_max_syn_backlog", Value: "65535", AtLeast: true, Why: "half-open connections of a listener"},
		{Key: "net.ipv4.tcp_max_tw_buckets", Value: strconv.Itoa(1 << 18), AtLeast: true,
			Why: "sockets in TIME_WAIT beyond it are killed", Cost: 1 << 18 * 256},
	}
	return append(list, portRange(s)...)
}
