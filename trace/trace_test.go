// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/flow"
)

func TestSymbols(t *testing.T) {
	s, err := ReadSymbols(strings.NewReader("ffffffff81000200 T nf_hook_slow\n" +
		"ffffffff81000100 t init_conntrack.isra.0\nffffffff81000300 D some_data\nffffffffc0000000 t veth_xmit\t[veth]\n"))
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[uint64]string{
		0xffffffff81000200: "nf_hook_slow+0x0",
		0xffffffff8100027d: "nf_hook_slow+0x7d",
		0xffffffff81000110: "init_conntrack+0x10",
		0xffffffffc0000010: "veth_xmit+0x10",
		0x1000:             "0x1000+0x0",
	} {
		if got := s.Find(address).String(); got != want {
			t.Errorf("%#x is %s, want %s", address, got, want)
		}
	}
	if _, err := ReadSymbols(strings.NewReader("0000000000000000 T nf_hook_slow\n")); !errors.Is(err, ErrHiddenSymbols) {
		t.Errorf("hidden addresses: error %v", err)
	}
	var none *Symbols
	if got := none.Find(0x10).Name; got != "0x10" {
		t.Errorf("without symbols: %s", got)
	}
}

func TestBaseName(t *testing.T) {
	for in, want := range map[string]string{
		"nf_ct_gc_expired.part.0": "nf_ct_gc_expired", "__netif_receive_skb_core.constprop.0": "__netif_receive_skb_core",
		"tcp_v4_rcv": "tcp_v4_rcv", "foo.cold": "foo", "bar.isra.0.cold": "bar", "baz.llvm.123": "baz",
	} {
		if got := BaseName(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestCauses(t *testing.T) {
	for _, c := range []struct {
		place dropSite
		want  *Cause
	}{
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookPrerouting}, &CauseTableFull},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookOutput}, &CauseTableFull},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookPostrouting, ct: TrackedNew}, &CausePortsExhausted},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookHairpin, ct: TrackedNew, caller: "ip_output"}, &CausePortsExhausted},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookHairpin, ct: TrackedNew, caller: "ip_forward", nftSeparate: true}, &CauseLegacyRule},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookForward, ct: TrackedConfirmed, nftSeparate: true}, &CauseLegacyRule},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookForward, ct: TrackedConfirmed}, &CauseHookRule},
		{dropSite{function: "nf_hook_slow", reason: "NETFILTER_DROP", hook: HookInput, ct: TrackedNew}, &CauseConfirmRace},
		{dropSite{function: "nft_do_chain", reason: "NETFILTER_DROP", hook: HookForward}, &CauseNftRule},
		{dropSite{function: "ip_error", reason: "IP_INADDRERRORS"}, &CauseForwardOff},
		{dropSite{function: "ip_error", reason: "IP_INNOROUTES"}, &CauseNoRoute},
		{dropSite{function: "ip_error", reason: "NOT_SPECIFIED"}, &CauseBlackhole},
		{dropSite{function: "ip6_pkt_prohibit", reason: "IP_INNOROUTES"}, &CauseBlackhole},
		{dropSite{function: "dst_discard_out", reason: "NOT_SPECIFIED"}, &CauseBlackhole},
		{dropSite{function: "ip6_pkt_discard", reason: "IP_INNOROUTES"}, &CauseNoRoute},
		{dropSite{function: "ip6_forward", reason: "IP_INADDRERRORS", unicast: true}, &CauseForwardOff},
		{dropSite{function: "ip6_forward", reason: "IP_INADDRERRORS", unicast: true, linkLocal: true}, &CauseMartian},
		{dropSite{function: "ip_forward", reason: "XFRM_POLICY"}, &CauseIPsec},
		{dropSite{function: "ip6_rcv_core", reason: "IPV6DISABLED"}, &CauseUnwantedProtocol},
		{dropSite{function: "ip_rcv_finish_core", reason: "IP_RPFILTER"}, &CauseRPFilter},
		{dropSite{function: "ip_defrag", reason: "NOT_SPECIFIED"}, &CauseFragment},
		{dropSite{function: "ip_expire", reason: "FRAG_REASM_TIMEOUT"}, &CauseFragment},
		{dropSite{function: "ip_defrag", reason: "DUP_FRAG"}, &CauseDuplicate},
		{dropSite{function: "__dev_forward_skb2", reason: "NOT_SPECIFIED"}, &CauseFarEnd},
		{dropSite{function: "br_handle_frame", reason: "BRIDGE_INGRESS_STP_STATE"}, &CauseBridgePort},
		{dropSite{function: "br_handle_frame", reason: "NOT_SPECIFIED"}, &CauseBridgePort},
		{dropSite{function: "ip_forward", reason: "PKT_TOO_BIG"}, &CauseMTU},
		{dropSite{function: "ip_forward", reason: "IP_INHDR"}, &CauseTTL},
		{dropSite{function: "ip_rcv_core", reason: "IP_INHDR"}, &CauseHeader},
		{dropSite{function: "neigh_invalidate", reason: "NEIGH_FAILED"}, &CauseNeighbour},
		{dropSite{function: "enqueue_to_backlog", reason: "CPU_BACKLOG"}, &CauseBacklog},
		{dropSite{function: "__dev_queue_xmit", reason: "QDISC_DROP"}, &CauseQdisc},
		{dropSite{function: "__udp4_lib_rcv", reason: "NO_SOCKET"}, &CauseClosedPort},
		{dropSite{function: "tcp_v4_rcv", reason: "NO_SOCKET"}, &CauseClosedTCP},
		{dropSite{function: "tcp_v4_rcv", reason: "NOT_SPECIFIED"}, &CauseTCPHousekeeping},
		{dropSite{function: "veth_xdp_rcv_skb", reason: "NOT_SPECIFIED"}, &CauseXDP},
		{dropSite{function: "ip6_mc_input", reason: "NOT_SPECIFIED"}, &CauseMulticast},
		{dropSite{function: "ip6_pkt_discard", reason: "NOT_SPECIFIED"}, &CauseMulticast},
		{dropSite{function: "ip6_pkt_discard", reason: "NOT_SPECIFIED", unicast: true}, &CauseNoRoute},
		{dropSite{function: "whatever", reason: "NOT_SPECIFIED"}, &CauseOther},
	} {
		if got := causeOf(c.place); got.ID != c.want.ID {
			t.Errorf("%+v: %s, want %s", c.place, got.ID, c.want.ID)
		}
	}
}

func TestRefine(t *testing.T) {
	for _, c := range []struct {
		name  string
		cause Cause
		delta Counters
		want  *Cause
	}{
		{"full", CauseTableFull, Counters{"conntrack.drop": 5}, &CauseTableFull},
		{"raw rule", CauseTableFull, Counters{"conntrack.drop": 0}, &CauseLegacyRule},
		{"counters unknown", CauseTableFull, Counters{}, &CauseTableFull},
		{"mangle rule", CausePortsExhausted, Counters{"conntrack.drop": 5, "conntrack.insert_failed": 0}, &CauseLegacyRule},
		{"exhausted", CausePortsExhausted, Counters{"conntrack.drop": 5, "conntrack.insert_failed": 5}, &CausePortsExhausted},
		{"long chains", CausePortsExhausted, Counters{"conntrack.drop": 0, "conntrack.insert_failed": 5, "conntrack.chain_too_long": 5}, &CauseLongChain},
	} {
		if got := refineCause(c.cause, c.delta, true); got.ID != c.want.ID {
			t.Errorf("%s: %s, want %s", c.name, got.ID, c.want.ID)
		}
	}
}

func TestParseFilter(t *testing.T) {
	for in, want := range map[string]Filter{
		"":                                   {},
		"tcp port 443":                       {Protocol: flow.TCP, Port: 443},
		"udp and host 192.0.2.7 and port 53": {Protocol: flow.UDP, Port: 53, Prefix: netip.MustParsePrefix("192.0.2.7/32")},
		"net 2001:db8::1/32":                 {Prefix: netip.MustParsePrefix("2001:db8::/32")},
		"host 2001:db8::7":                   {Prefix: netip.MustParsePrefix("2001:db8::7/128")},
	} {
		got, err := ParseFilter([]string{in})
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"port":                         "filter: port: value missing",
		"port 0":                       "not a number from 1 to 65535",
		"port 70000":                   "not a number from 1 to 65535",
		"host 10.0.0":                  "filter: host 10.0.0:",
		"somewhere":                    "not understood",
		"tcp udp":                      "one protocol",
		"port 1 and port 2":            "one port",
		"host 10.0.0.1 net 10.0.0.0/8": "one address",
	} {
		if _, err := ParseFilter([]string{in}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", in, err, want)
		}
	}
}

func TestFilterWords(t *testing.T) {
	family, address, mask := filterWords(netip.MustParsePrefix("192.0.2.128/25"))
	if family != 2 || networkOrder(uint16(address[0])) != 0xc000 || address[1] != 0 {
		t.Errorf("family %d address %x", family, address)
	}
	if (^mask[0]) == 0 || mask[1] != 0 {
		t.Errorf("mask %x of /25", mask)
	}
	family, _, mask = filterWords(netip.MustParsePrefix("2001:db8::/33"))
	if family != 10 || mask[0] != 0xffffffff || mask[1] == 0 || mask[2] != 0 {
		t.Errorf("family %d mask %x of /33", family, mask)
	}
}

// TestEventID expects a search in the older path of tracefs. If it is not mounted, the number is read from the
// kernel, or the message names the mount.
func TestEventID(t *testing.T) {
	none, there := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(there+"/events/skb/kfree_skb", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(there+"/events/skb/kfree_skb/id", []byte("7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if id, err := eventID([]string{none, there}); string(id) != "7\n" || err != nil {
		t.Errorf("%q, %v", id, err)
	}
	id, err := eventID([]string{none})
	if !errors.Is(err, os.ErrPermission) {
		if _, bad := strconv.Atoi(strings.TrimSpace(string(id))); bad != nil || err != nil {
			t.Errorf("not mounted: %q, %v", id, err)
		}
	} else if !strings.Contains(err.Error(), "mount -t tracefs") {
		t.Errorf("without rights: %q, %v", id, err)
	}
}

func TestParseCounters(t *testing.T) {
	root := fstest.MapFS{
		"proc/thread-self/net/snmp":           {Data: []byte("Ip: Forwarding InAddrErrors\nIp: 1 42\nUdp: NoPorts\nUdp: 7\n")},
		"proc/thread-self/net/netstat":        {Data: []byte("TcpExt: ListenOverflows IPReversePathFilter\nTcpExt: 3 9\n")},
		"proc/thread-self/net/snmp6":          {Data: []byte("Ip6InNoRoutes     \t5\n")},
		"proc/thread-self/net/softnet_stat":   {Data: []byte("0000000a 00000001 00000002\n00000010 00000002 00000000 0 0 0 0 0 0 00000003\n")},
		"proc/thread-self/net/stat/arp_cache": {Data: []byte("entries allocs table_fulls\n00000002 00000001 0000000f\n00000002 00000000 00000001\n")},
	}
	got, err := ParseCounters(root)
	if err != nil {
		t.Fatal(err)
	}
	want := Counters{"Ip.Forwarding": 1, "Ip.InAddrErrors": 42, "Udp.NoPorts": 7, "TcpExt.ListenOverflows": 3,
		"TcpExt.IPReversePathFilter": 9, "Ip6InNoRoutes": 5, "softnet.processed": 26, "softnet.dropped": 3, "softnet.squeezed": 2,
		"softnet.received_rps": 3, "neigh.allocs": 1, "neigh.table_fulls": 16}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	wrapped := Counters{"conntrack.drop": 5}.Sub(Counters{"conntrack.drop": 0xfffffffe})
	if wrapped["conntrack.drop"] != 7 {
		t.Errorf("across the wrap of 32 bits: %d, want 7", wrapped["conntrack.drop"])
	}
}

func TestHeaderTuple(t *testing.T) {
	v4 := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, 0x04, 0x00, 0, 53, 0, 8, 0, 0}
	want := "udp 192.0.2.1:1024 -> 198.51.100.2:53"
	if got := headerTuple(v4).String(); got != want {
		t.Errorf("IPv4: %s, want %s", got, want)
	}
	later := slices.Clone(v4)
	later[7] = 3 // a later fragment has no ports
	if got := headerTuple(later).Dest.Port(); got != 0 {
		t.Errorf("later fragment: port %d", got)
	}
	v6 := append(append([]byte{0x60, 0, 0, 0, 0, 8, 58, 64}, netip.MustParseAddr("2001:db8::1").AsSlice()...), netip.MustParseAddr("2001:db8::2").AsSlice()...)
	v6 = append(v6, 128, 0, 0, 0, 0x12, 0x34, 0, 1)
	if got := headerTuple(v6).Source.Port(); got != 0x1234 {
		t.Errorf("ICMPv6 echo: identifier %#x", got)
	}
	if headerTuple(v4[:10]).IsValid() {
		t.Error("a cut header gave a tuple")
	}
}
