// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-lb/sluice/flow"
)

// office is the software router of the paper: 170 clients with 20 connections, 30
// with 400, behind 11.25 MB/s. The paper adds 170 and 20 where it means the
// product, and so arrives at 12,190.
func office() Load {
	return Load{
		Classes:   []Class{{"browsing", 170, 20}, {"file sharing", 30, 400}},
		Bandwidth: BitRate(11.25 * 8 * float64(MiB)),
		Host:      Host{Memory: 512 * MiB, Cores: 1},
	}
}

func TestOfficeRouter(t *testing.T) {
	p, err := For(office())
	if err != nil {
		t.Fatal(err)
	}
	if p.Peak != 15400 || p.Entries != 32768 || p.Buckets != 32768 {
		t.Errorf("peak %d, entries %d, buckets %d; want 15400, 32768, 32768", p.Peak, p.Entries, p.Buckets)
	}
	if p.ClientBandwidth.String() != "57.6 KiB" {
		t.Errorf("each client gets %s/s, want 57.6 KiB", p.ClientBandwidth)
	}
	if p.Memory != 32768*(384+8) {
		t.Errorf("memory %d", p.Memory)
	}
	if p.PublicAddresses != 1 || p.Refused > 1e-100 {
		t.Errorf("%d public addresses, refused %g", p.PublicAddresses, p.Refused)
	}
	if got := OldRule(512 * MiB); got != 32768 {
		t.Errorf("old rule gives %d for 512 MiB, want 32768", got)
	}
	if got := OldRule(256 * MiB); got != 16384 {
		t.Errorf("old rule gives %d for 256 MiB, want 16384", got)
	}
}

// TestCaseStudyTable checks the memory of the table that the case study counts
// with 376 bytes an entry and 16 a bucket: 384 and 8 are right.
func TestCaseStudyTable(t *testing.T) {
	got := TableBytes(131072, 65536, Extensions{NAT: true})
	if entries, buckets := 131072*384, 65536*8; got != uint64(entries+buckets) {
		t.Errorf("table of 131,072 entries takes %d bytes", got)
	}
	if mb := float64(131072*384) / 1e6; math.Abs(mb-50.3) > 0.05 {
		t.Errorf("entries take %.1f MB, want 50.3", mb)
	}
}

func TestFormulas(t *testing.T) {
	for _, tc := range []struct {
		name      string
		got, want float64
	}{
		{"new connections of 65,536 entries", RateCeiling(65536, 0, LingerTimeWait), 546},
		{"new connections of 262,144 entries", RateCeiling(262144, 0, LingerTimeWait), 2184},
		{"new connections of 2^20 entries", RateCeiling(1<<20, 0, LingerTimeWait), 8738},
		{"new connections of 1,000 entries at 5 s", RateCeiling(1000, 0, 5*time.Second), 200},
		{"Little's law", Population(100, 2*time.Second, 118*time.Second), 12000},
		{"10 GbE of smallest frames", PacketRate(10e9, 64), 14880952},
		{"subscribers of blocks of 64", float64(SubscribersPerAddress(64)), 1008},
		{"subscribers of blocks of 256", float64(SubscribersPerAddress(256)), 252},
		{"subscribers of blocks of 512", float64(SubscribersPerAddress(512)), 126},
		{"subscribers of blocks of 1,024", float64(SubscribersPerAddress(1024)), 63},
		{"subscribers of blocks of 2,048", float64(SubscribersPerAddress(2048)), 31},
		{"subscribers of blocks of 4,096", float64(SubscribersPerAddress(4096)), 15},
		{"block for 400 mappings", float64(PortBlock(400)), 1024},
		{"addresses for a full pool", float64(PublicAddresses(MasqueradePorts)), 2},
		{"addresses for 80 % of a pool", float64(PublicAddresses(51609)), 1},
		{"refused at 98 %, per mille", 1000 * RefusalProbability(0.98), 6.7},
		{"refused at 99 %, percent", 100 * RefusalProbability(0.99), 8.3},
		{"buckets of 512 MiB", float64(DefaultBuckets(512 * MiB)), 4096},
		{"buckets of 64 MiB", float64(DefaultBuckets(64 * MiB)), 1024},
		{"buckets of 2 GiB", float64(DefaultBuckets(2 * GiB)), 65536},
		{"buckets of 64 GiB", float64(DefaultBuckets(64 * GiB)), 262144},
	} {
		if math.Abs(tc.got-tc.want) > 0.005*tc.want {
			t.Errorf("%s: %g, want %g", tc.name, tc.got, tc.want)
		}
	}
}

func TestPlanSubscribersAndLine(t *testing.T) {
	p, err := For(Load{
		Classes:     []Class{{"homes", 5000, 150}},
		Requests:    []Requests{{Name: "web", Rate: 1000, Lifetime: time.Second}, {Name: "dns", Protocol: flow.UDP, Rate: 2000}},
		Subscribers: 5000, PublicAddresses: 4, EndpointIndependent: true,
		Bandwidth: 10e9, Frame: 64, Rules: 1000, Headroom: 1.5,
		Host: Host{Memory: 4 * GiB, Cores: 4},
	})
	if err != nil {
		t.Fatal(err)
	}
	// 750,000 held, 1,000 x 121 s, 2,000 x 30 s.
	if p.Peak != 931000 || p.Entries != 2097152 {
		t.Errorf("peak %d, entries %d", p.Peak, p.Entries)
	}
	if p.PortBlock != 256 || p.PerAddress != 252 || p.BlockAddresses != 20 {
		t.Errorf("blocks of %d, %d on an address, %d addresses", p.PortBlock, p.PerAddress, p.BlockAddresses)
	}
	// The datapath keeps them 240 s and 300 s longer, and a port of its protocol with each.
	if p.Ports != 750000+600000 || p.Flows != 4194304 {
		t.Errorf("%d ports, %d flows", p.Ports, p.Flows)
	}
	if p.PublicAddresses != 27 || p.Refused != 1 {
		t.Errorf("%d addresses, refused %g", p.PublicAddresses, p.Refused)
	}
	if p.CoresNftables != 67 || p.CoresEBPF != 5 {
		t.Errorf("%d cores by nftables, %d by eBPF", p.CoresNftables, p.CoresEBPF)
	}
	notes := strings.Join(p.Notes, "\n")
	for _, want := range []string{"10 %", "4 public addresses are too few", "port blocks for 5000", "nftables needs about 67 cores", "RFC 5382"} {
		if !strings.Contains(notes, want) {
			t.Errorf("notes lack %q:\n%s", want, notes)
		}
	}
	if file := p.SysctlFile(); strings.Index(file, "nf_conntrack_buckets =") > strings.Index(file, "nf_conntrack_max =") ||
		!strings.Contains(file, "nf_conntrack_max = 2097152") || !strings.Contains(file, "net.ipv4.neigh.default.gc_thresh3 = 16384") {
		t.Errorf("sysctl file:\n%s", file)
	}
	if f := p.Fragment(); !strings.Contains(f, "\n  flows: 4194304\n") || !strings.Contains(f, "# flows6: 4194304 ") || !strings.Contains(f, "port-block: 256") {
		t.Errorf("fragment:\n%s", f)
	}
}

// TestFlowsOfRequests: a resolver's requests occupy the datapath's table for the configured timeout, and requests
// with a longer linger occupy it longer.
func TestFlowsOfRequests(t *testing.T) {
	p, err := For(Load{Requests: []Requests{{Protocol: flow.UDP, Rate: 20000}}, Headroom: 1})
	if err != nil || p.Peak != 600000 || p.Flows != 8388608 { // 20,000 x 300 s
		t.Errorf("peak %d, %d flows, %v", p.Peak, p.Flows, err)
	}
	p, err = For(Load{Requests: []Requests{{Rate: 100, Linger: time.Hour}}, Headroom: 1})
	if err != nil || p.Flows != p.Entries {
		t.Errorf("%d entries, %d flows, %v", p.Entries, p.Flows, err)
	}
}

func TestCapacity(t *testing.T) {
	c := Capacity(Host{Memory: 4 * GiB, Cores: 2}, Habits{Connections: 100})
	if c.Entries != 1<<20 || c.Clients != 5242 || c.OneService != 51609 || c.Default != 65536 {
		t.Errorf("%+v", c)
	}
	if math.Abs(c.Connects-4369) > 1 || c.PPSNft != 1342281 || c.PPSEBPF != 6666666 {
		t.Errorf("%+v", c)
	}
	line := Capacity(Host{Memory: GiB, Cores: 8}, Habits{Bandwidth: 1e9, Frame: 1500})
	if line.PPSEBPF != line.PPSNft || line.PPSNft != 82236 {
		t.Errorf("a line of 1 Gbit/s carries %d and %d packets/s", line.PPSNft, line.PPSEBPF)
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		name string
		l    Load
		want string
	}{
		{"nothing", Load{}, "nothing to plan for"},
		{"empty class", Load{Classes: []Class{{"a", 0, 1}}}, "class a: clients and connections"},
		{"no rate", Load{Requests: []Requests{{}}}, "requests 1: rate 0"},
		{"headroom", Load{Headroom: 0.5, Classes: []Class{{"", 1, 1}}}, "headroom 0.5"},
		{"more than a kernel has", Load{Classes: []Class{{"", 1e6, 1e6}}}, "a kernel tracks 1073741824 at most"},
		{"frame", Load{Frame: 20, Classes: []Class{{"", 1, 1}}}, "frame 20"},
		{"more than a host tracks", Load{Classes: []Class{{"", 1 << 33, 1 << 33}}}, "a kernel tracks 1073741824 at most"},
		{"more with headroom", Load{Headroom: 2.5, Classes: []Class{{"", 1 << 20, 500}}}, "a kernel tracks"},
		{"no number of requests", Load{Requests: []Requests{{Rate: math.NaN()}}}, "rate NaN"},
		{"requests without end", Load{Requests: []Requests{{Rate: math.Inf(1)}}}, "a kernel tracks"},
		{"no headroom at all", Load{Headroom: math.NaN(), Classes: []Class{{"", 1, 1}}}, "headroom NaN"},
		{"public addresses", Load{PublicAddresses: 1 << 60, Classes: []Class{{"", 1, 1}}}, "public addresses"},
	} {
		if _, err := For(tc.l); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", tc.name, err, tc.want)
		}
	}
}

// TestLargest: the largest plan is one that its settings and its configuration can hold.
func TestLargest(t *testing.T) {
	p, err := For(Load{Classes: []Class{{"", 1 << 29, 1}}, Subscribers: math.MaxUint64, Mappings: 1})
	if err != nil || p.Entries != 1<<30 || p.Memory < 1<<38 || p.BlockAddresses < 1<<47 {
		t.Errorf("%+v, %v", p, err)
	}
	for _, f := range strings.Fields(p.Fragment()) {
		if n, err := strconv.Atoi(f); err == nil && n > 1<<28 {
			t.Errorf("a table of %d: the configuration takes 268435456", n)
		}
	}
	if c := Capacity(Host{Memory: 1 << 60, Cores: 4}, Habits{}); c.Entries != 1<<30 {
		t.Errorf("a host of an exbibyte: %+v", c)
	}
	for name, h := range map[string]Habits{
		"frame": {Frame: -20}, "rules": {Rules: -1000}, "lifetime": {Lifetime: -2 * time.Minute}, "linger": {Linger: -1}, "addresses": {PublicAddresses: 1 << 60},
	} {
		if err := h.Validate(Host{Memory: GiB, Cores: 1}); err == nil {
			t.Errorf("%s: %+v", name, Capacity(Host{Memory: GiB, Cores: 1}, h))
		}
	}
	if err := (Habits{}).Validate(Host{Memory: GiB, Cores: -1}); err == nil {
		t.Error("a host has less than no core")
	}
}

func TestUnits(t *testing.T) {
	for text, want := range map[string]Bytes{"512MiB": 512 * MiB, "512m": 512 * MiB, "2GB": 2e9, "1.5 GiB": 3 * GiB / 2, "77": 77} {
		if got, err := ParseBytes(text); err != nil || got != want {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]BitRate{"100Mbit": 1e8, "10Gbps": 1e10, "10G": 1e10, "90Mbit/s": 9e7, "64000": 64000} {
		if got, err := ParseBitRate(text); err != nil || got != want {
			t.Errorf("ParseBitRate(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "x", "-1", "1e30G", "NaN", "5 parsecs"} {
		if v, err := ParseBytes(text); err == nil {
			t.Errorf("ParseBytes(%q) = %d", text, v)
		}
	}
}

// TestPortsOfProtocols: an address has all ports for TCP, and all for UDP once more.
func TestPortsOfProtocols(t *testing.T) {
	tcp, udp := Requests{Rate: 250, Lifetime: 80 * time.Second}, Requests{Protocol: flow.UDP, Rate: 1000} // 50,000 and 30,000 entries
	for name, c := range map[string]struct {
		load      Load
		ports     uint64
		addresses uint64
	}{
		"TCP and UDP":           {Load{Requests: []Requests{tcp, udp}}, 50000, 1},
		"TCP by name, and UDP":  {Load{Requests: []Requests{{Protocol: flow.TCP, Rate: tcp.Rate, Lifetime: tcp.Lifetime}, udp}}, 50000, 1},
		"TCP twice":             {Load{Requests: []Requests{tcp, tcp}}, 100000, 2},
		"classes are of either": {Load{Requests: []Requests{tcp, udp}, Classes: []Class{{"homes", 100, 100}}}, 60000, 2},
		"one destination":       {Load{Requests: []Requests{tcp, udp}, BusiestDestination: 70000}, 50000, 1},
		"a smaller one":         {Load{Requests: []Requests{tcp, udp}, BusiestDestination: 20000}, 20000, 1},
		"kept mappings":         {Load{Requests: []Requests{tcp, udp}, EndpointIndependent: true}, 300000, 6}, // UDP for 300 s, TCP 80,000
	} {
		p, err := For(c.load)
		if err != nil || p.Ports != c.ports || p.PublicAddresses != c.addresses {
			t.Errorf("%s: %d ports, %d addresses, %v, want %d, %d", name, p.Ports, p.PublicAddresses, err, c.ports, c.addresses)
		}
	}
}

// TestPlanHolds checks for arbitrary loads that a plan carries its load.
func TestPlanHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Load{
			Classes:     []Class{{"c", rapid.Uint64Range(1, 1e5).Draw(t, "clients"), rapid.Uint64Range(1, 500).Draw(t, "connections")}},
			Requests:    []Requests{{Rate: rapid.Float64Range(1, 1e4).Draw(t, "rate"), Lifetime: time.Duration(rapid.Int64Range(0, 1e12).Draw(t, "lifetime"))}},
			Subscribers: rapid.Uint64Range(0, 1e6).Draw(t, "subscribers"),
			Headroom:    rapid.Float64Range(1, 10).Draw(t, "headroom"),
		}
		p, err := For(l)
		if err != nil {
			t.Fatal(err)
		}
		if float64(p.Entries) < float64(p.Peak-1)*l.Headroom || p.Entries&(p.Entries-1) != 0 || p.Buckets < p.Entries {
			t.Fatalf("entries %d, buckets %d for a peak of %d", p.Entries, p.Buckets, p.Peak)
		}
		if float64(p.Ports) > float64(p.PublicAddresses*MasqueradePorts)*PortFill*1.0001 {
			t.Fatalf("%d addresses for %d ports", p.PublicAddresses, p.Ports)
		}
		if p.PortBlock > 0 && p.PerAddress > 0 && p.BlockAddresses*p.PerAddress < l.Subscribers {
			t.Fatalf("%d addresses of %d blocks for %d subscribers", p.BlockAddresses, p.PerAddress, l.Subscribers)
		}
	})
}
