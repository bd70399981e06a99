// SPDX-License-Identifier: Apache-2.0

// Package observe reads the state of a host and its network namespaces at both ends of a window.
// Files are read from a tree that tests can replace. Other data is read from netlink, ioctl and the
// kernel's log.
package observe

import (
	"context"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Sample is what one examination has read: the host and its namespaces at the
// start and the end of a window, and what happened in between.
type Sample struct {
	Window     time.Duration
	Before     HostCounters
	After      HostReading
	Namespaces []*Namespace
	Limits     []string // what could not be read, in words
	// Partial is set if some namespaces of the host were left out on purpose.
	Partial bool

	dropsErr error // why drop events could not be watched
}

// HostCounters are what all namespaces share and what grows in a window.
type HostCounters struct {
	CPUs       []trace.CPUTime
	Softnet    []trace.SoftnetCPU
	Neighbours trace.Counters // "neigh.table_fulls" and others, all namespaces
	// Interrupts counts by line of /proc/interrupts and CPU, for network devices.
	Interrupts map[string][]uint64
}

// HostReading is one look at what all namespaces share.
type HostReading struct {
	HostCounters
	Release     string
	Memory      map[string]uint64 // /proc/meminfo, bytes.
	Slab        SlabInfo          // of nf_conntrack
	Entries     [2]uint64         // Neighbour table entries: IPv4, IPv6.
	Sysctl      map[string]string
	Log         []LogLine // Kernel messages about connection tracking.
	LogErr      error     // Why the log could not be read.
	Mitigations map[string]string
	BTF         bool
	// Symbols reports whether the kernel has functions such as SymbolKprobes; nil: unknown.
	Symbols map[string]bool
	// Flowtables is set if this kernel has flowtables. FlowtablesErr is set if that is unknown.
	Flowtables    bool
	FlowtablesErr error
	// Files is the process that is nearest to its limit of open files.
	Files ProcessFiles
	// Monitors are programs that export counters of the namespace in which they run.
	Monitors []Monitor
}

// Monitor is a program that exports counters.
type Monitor struct {
	Name  string
	Netns uint64 // Inode of the network namespace that it sees.
	Host  bool   // the namespace of process 1
}

// SlabInfo is a line of /proc/slabinfo. ObjectBytes is 0 when it is not readable.
type SlabInfo struct{ Active, ObjectBytes uint64 }

// ProcessFiles are the open files of a process; Limit, the soft one, is 0 when none was read.
type ProcessFiles struct {
	Name        string
	PID         int
	Open, Limit uint64
	Hard        uint64 // up to which the process may raise Limit
}

// LogLine is a kernel message.
type LogLine struct {
	At    time.Time
	Age   time.Duration
	Text  string
	Netns uint64 // inode that the message names; 0: none
}

// Namespace is the data of one network namespace.
type Namespace struct {
	netdev.Namespace
	IsHost bool // the namespace of process 1

	Before, After NamespaceReading
	// Delta is what the counters did between the two readings.
	Delta trace.Counters
	// Growth of the table in entries a second over the time of GrowthOver, which is zero
	// outside sessions.
	Growth     float64
	GrowthOver time.Duration
	// Table sums up the connection table; nil when it was empty or unreadable.
	Table    *conntrack.Summary
	TableErr error
	// TableAge is how long ago the table was read; zero: in this window.
	TableAge time.Duration
	// TableSkipped is set if the table was not read because it was nearly empty.
	TableSkipped bool
	// NewPerSecond is the rate of new connections, from a sample of the kernel's events. NewErr is
	// set if there is no sample.
	NewPerSecond float64
	NewErr       error
	// Entries is what single entries of the table show; never nil.
	Entries  *Entries
	Rules    *firewall.Ruleset
	RulesErr error
	// Silent are addresses that rules name, in networks of the host's links, which neither the
	// host has nor anybody answers for.
	Silent []hold.Silent
	// Drops are the causes of drops in the window. DropsErr is set if they could not be observed.
	Drops    []trace.DropGroup
	DropsErr error
	// Ways are the routes of sampled packets that were dropped on their way out.
	Ways map[*trace.DropSample]Way
	// Lossy are the sockets that lost datagrams, the largest loss first.
	Lossy []LossySocket
	// Readers are the programs that serve tun interfaces, by interface.
	Readers map[string]Program
	// Traffic is what became of the exchanges of the window; nil when packets were not observed.
	Traffic *outcome.Report
}

// NamespaceReading is one look at a namespace.
type NamespaceReading struct {
	At       time.Time
	Counters trace.Counters
	// ConntrackErr is set if there are no counters of connection tracking.
	ConntrackErr error
	Limits       conntrack.Limits // zero without connection tracking
	Sysctl       map[string]string
	Links        []Link
	Sockstat     map[string]uint64 // "TCP.inuse", "TCP.tw"
	Sockets
	// EventListeners are sockets that receive every conntrack event.
	EventListeners int
	Expectations   int    // Entries of /proc/net/nf_conntrack_expect; -1 unreadable.
	Generation     uint32 // of the nftables ruleset
	LegacyTables   []string
	Failed         []netip.Addr // Neighbours in state FAILED.
	ByHand         []Neighbour  // Those whose hardware address was set by a program or person.
	Uplinks        int          // Interfaces with a default route of IPv4.
	Routing        Routing
}

// Sockets is what the lists of a namespace's sockets show.
type Sockets struct {
	Listeners []Listener
	// Asked are the ports of listeners that programs chose explicitly. The kernel chose the others.
	// AskedErr is set if that is unknown.
	Asked    map[trace.LocalPort]bool
	AskedErr error
	// Remotes counts the ports of the local range that TCP connections have.
	Remotes map[Remote]int
	// Losses are the datagram and raw sockets that ever lost a datagram, by inode.
	Losses map[uint64]socketLoss
	// Cut is set if a list was too long to be read to its end.
	Cut bool
}

// Link is a network interface.
type Link struct {
	Name     string
	Index    int    // index of the interface: a recreated interface has another one
	Kind     string // "veth", "bridge", "wireguard"...; "device" for hardware.
	Loopback bool
	Up       bool
	Carrier  bool // The link is connected.
	NoARP    bool // It has no hardware addresses to ask for.
	MTU      int
	Queue    int // Packets that its transmit queue holds (txqueuelen).
	PeerMTU  int // of the other end of a veth; 0: not known
	Queues   int // Receive queues.
	XDP      bool
	Master   int // index of the bridge or bond that it belongs to; 0: none
	STP      STPState
	// ForwardDelay is how long a bridge keeps a port listening, and then learning.
	ForwardDelay time.Duration
	// Addresses are the interface's own, with their networks.
	Addresses []netip.Prefix
	MAC       [6]byte // its hardware address; zero: none
	// Duplicates are addresses that another host has, too; Tentative are those that the kernel has not
	// yet found to be unique. It uses neither.
	Duplicates, Tentative []netip.Addr

	RxPackets, TxPackets, RxErrors, TxErrors, RxDropped, TxDropped, RxMissed, RxFifo uint64
	QdiscDrops, QdiscPackets                                                         uint64

	// RingLost are packets that found no room in a ring, by the driver's own counters.
	RingLost uint64
	// XDPFeatures are the bits of NETDEV_XDP_ACT_*, when XDPKnown.
	XDPFeatures uint64
	XDPKnown    bool
	// Offloads: 1 on, 0 off, -1 not known. UDPForwarding is rx-udp-gro-forwarding.
	LRO, GRO, RxChecksum, UDPForwarding int
}

// Reader looks at a host. The real one is Live; tests use trees of files.
type Reader interface {
	// Namespaces lists what to examine; hidden counts processes that cannot be
	// looked into.
	Namespaces() (list []netdev.Namespace, hidden int)
	// Partial reports whether the list leaves out namespaces on purpose.
	Partial() bool
	Host(ctx context.Context) HostReading
	// Counters is the part of Host that is needed at both ends of a window.
	Counters(ctx context.Context) HostCounters
	// Namespace takes one reading of a namespace. It does not read the long lists of sockets again
	// if known has them.
	Namespace(ctx context.Context, ns netdev.Namespace, known *Sockets) (NamespaceReading, error)
	// Table sums up the connection table of a namespace, nil when it is empty. r is a reading of the
	// namespace.
	Table(ctx context.Context, ns netdev.Namespace, r *NamespaceReading) (*conntrack.Summary, *Entries, error)
	Rules(ctx context.Context, ns netdev.Namespace) (*firewall.Ruleset, error)
	// Silent asks for addresses that rules name.
	Silent(ctx context.Context, ns netdev.Namespace, addresses []netip.Addr) []hold.Silent
	// FollowUp looks up what the drops and counters of the window leave open.
	FollowUp(n *Namespace)
	// NewRate samples the new connections a second.
	NewRate(ctx context.Context, ns netdev.Namespace) (float64, error)
}

// netSysctl are the settings that checks read, as patterns below /proc/sys.
var netSysctl = []string{
	"net/netfilter/nf_conntrack_*", "net/netfilter/nf_log/*",
	"net/ipv4/ip_forward", "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports", "net/ipv4/tcp_tw_reuse",
	"net/ipv4/tcp_max_tw_buckets", "net/ipv4/tcp_max_syn_backlog", "net/ipv4/icmp_ratelimit", "net/ipv4/tcp_mem", "net/ipv4/tcp_max_orphans",
	"net/ipv4/conf/*/rp_filter", "net/ipv4/conf/*/forwarding", "net/ipv4/conf/*/route_localnet", "net/ipv4/conf/*/proxy_arp", "net/ipv4/conf/*/arp_ignore", "net/ipv4/conf/*/arp_filter", "net/ipv4/conf/*/src_valid_mark", "net/ipv4/conf/*/ignore_routes_with_linkdown", "net/ipv4/fib_multipath_use_neigh",
	"net/ipv6/conf/all/forwarding", "net/ipv6/conf/*/accept_ra", "net/ipv4/ipfrag_*", "net/ipv6/ip6frag_*", "net/core/somaxconn", "net/core/netdev_max_backlog", "net/core/netdev_budget", "net/core/netdev_budget_usecs",
	"net/core/rmem_max", "net/bridge/bridge-nf-call-ip*tables", "net/ipv4/neigh/default/gc_thresh3", "net/ipv6/neigh/default/gc_thresh3",
	"net/ipv4/icmp_msgs_per_sec", "net/ipv4/tcp_syncookies",
}

// readSysctl reads what exists of the patterns; names are with dots.
func readSysctl(root fs.FS, patterns []string) map[string]string {
	out := map[string]string{}
	for _, pattern := range patterns {
		paths, err := fs.Glob(root, "proc/sys/"+pattern)
		if err != nil {
			continue
		}
		for _, path := range paths {
			if text, err := fs.ReadFile(root, path); err == nil {
				out[strings.ReplaceAll(strings.TrimPrefix(path, "proc/sys/"), "/", ".")] = strings.TrimSpace(string(text))
			}
		}
	}
	return out
}

// Number reads a setting as an integer.
func Number(settings map[string]string, name string) (int, bool) {
	fields := strings.Fields(settings[name])
	if len(fields) == 0 {
		return 0, false
	}
	n, err := strconv.Atoi(fields[0])
	return n, err == nil
}
