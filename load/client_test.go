// SPDX-License-Identifier: Apache-2.0

package load

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// idleClient is a client end of either family that makes no connections by itself.
func idleClient(t *testing.T, v6 bool, spec FlowSpec) *Client {
	t.Helper()
	l := labtest.New(t, wire())
	spec.Source, spec.Dest = mustRange(t, "192.0.2.1:1024-1123"), netip.MustParseAddrPort("192.0.2.2:80")
	if v6 {
		spec.Source, spec.Dest = mustRange(t, "[2001:db8::1]:1024-1123"), netip.MustParseAddrPort("[2001:db8::2]:80")
	}
	spec.Interface = "eth0"
	c, err := NewClient(l.Node("source"), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Stages of bpf/load/slots.h.
const (
	stageClosed = iota
	stageSYN
	stageRequest
	stageIdle
	stageClosing
)

// TestClientResets: a reset counts once, for a connection that it can be of.
func TestClientResets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	c := idleClient(t, false, FlowSpec{})
	for _, r := range []struct {
		name, reset string
		stage       uint8
		want        FlowCounts
	}{
		{"of the SYN", "flags=RA,seq=0,ack=1001", stageSYN, FlowCounts{Resets: 1, ResetSYN: 1}},
		{"of an older SYN", "flags=RA,seq=0,ack=901", stageSYN, FlowCounts{Stray: 1}},
		{"of the request", "flags=R,seq=5000", stageRequest, FlowCounts{Resets: 1, ResetReq: 1}},
		{"while idle", "flags=R,seq=5000", stageIdle, FlowCounts{Resets: 1}},
		{"while closing", "flags=R,seq=5000", stageClosing, FlowCounts{Resets: 1}},
		{"out of sequence", "flags=R,seq=5001", stageRequest, FlowCounts{Stray: 1}},
		{"after the end", "flags=R,seq=5000", stageClosed, FlowCounts{Stray: 1}},
	} {
		if err := c.objects.LoadCounts.Put(uint32(0), make([]flowsFlowCounts, ebpf.MustPossibleCPU())); err != nil {
			t.Fatal(err)
		}
		if err := c.objects.LoadSlots.Put(uint32(0), flowsSlot{Stage: r.stage, Seq: 1000, Ack: 5000}); err != nil {
			t.Fatal(err)
		}
		verdict := runFrame(t, c.objects.LoadClient, "ip4(src=192.0.2.2,dst=192.0.2.1)/tcp(sport=80,dport=1024,"+r.reset+")")
		if got, err := c.Read(); err != nil || got != r.want || verdict != xdpDrop {
			t.Errorf("%s: counted %+v, want %+v, verdict %d, %v", r.name, got, r.want, verdict, err)
		}
	}
}

// TestClientLeavesOthersAlone: packets without a test connection pass to the kernel, and ICMP errors are counted for
// test connections only.
func TestClientLeavesOthersAlone(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	const error4, error6 = "ip4(src=192.0.2.9,dst=192.0.2.1)/icmp(type=unreachable,code=1)/", "ip6(src=2001:db8::9,dst=2001:db8::1)/icmp6(type=unreachable,code=0)/"
	four, six := idleClient(t, false, FlowSpec{}), idleClient(t, true, FlowSpec{})
	for _, p := range []struct {
		c       *Client
		text    string
		verdict uint32
		want    FlowCounts
	}{
		{four, "ip4(src=192.0.2.2,dst=192.0.2.1)/tcp(sport=80,dport=1024,flags=SA)", xdpDrop, FlowCounts{Stray: 1}},
		{four, "ip4(src=192.0.2.2,dst=192.0.2.1)/tcp(sport=443,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{four, "ip4(src=192.0.2.3,dst=192.0.2.1)/tcp(sport=80,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{four, "ip4(src=192.0.2.2,dst=192.0.2.1)/tcp(sport=80,dport=1124,flags=SA)", xdpPass, FlowCounts{}},
		{four, "ip4(src=192.0.2.2,dst=192.0.2.1)/icmp(type=echo,id=7)/data(40)", xdpPass, FlowCounts{}},
		{four, error4 + "ip4(src=192.0.2.1,dst=192.0.2.2)/tcp(sport=1024,dport=80,flags=S)", xdpDrop, FlowCounts{Unreachable: 1}},
		{four, error4 + "ip4(src=192.0.2.1,dst=192.0.2.3)/tcp(sport=1024,dport=80,flags=S)", xdpPass, FlowCounts{}},
		{four, error4 + "ip4(src=192.0.2.1,dst=192.0.2.2)/udp(sport=1024,dport=80)/data(20)", xdpPass, FlowCounts{}},
		{four, "ip6(src=2001:db8::2,dst=2001:db8::1)/tcp(sport=80,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{six, "ip6(src=2001:db8::2,dst=2001:db8::1)/tcp(sport=80,dport=1024,flags=SA)", xdpDrop, FlowCounts{Stray: 1}},
		{six, "ip6(src=2001:db8::2,dst=2001:db8:7::1)/tcp(sport=80,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{six, "ip6(src=2001:db8:7::2,dst=2001:db8::1)/tcp(sport=80,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{six, "ip4(src=192.0.2.2,dst=192.0.2.1)/tcp(sport=80,dport=1024,flags=SA)", xdpPass, FlowCounts{}},
		{six, error6 + "ip6(src=2001:db8::1,dst=2001:db8::2)/tcp(sport=1024,dport=80,flags=S)", xdpDrop, FlowCounts{Unreachable: 1}},
		{six, error6 + "ip6(src=2001:db8::1,dst=2001:db8::2)/tcp(sport=1024,dport=81,flags=S)", xdpPass, FlowCounts{}},
	} {
		if err := p.c.objects.LoadCounts.Put(uint32(0), make([]flowsFlowCounts, ebpf.MustPossibleCPU())); err != nil {
			t.Fatal(err)
		}
		verdict := runFrame(t, p.c.objects.LoadClient, p.text)
		if got, err := p.c.Read(); err != nil || got != p.want || verdict != p.verdict {
			t.Errorf("%s: verdict %d, counted %+v; want %d, %+v; %v", p.text, verdict, got, p.verdict, p.want, err)
		}
	}
}

// TestInjectorTimer: a packet that another CPU sent after this one looked at the
// clock is not overdue.
func TestInjectorTimer(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	c := idleClient(t, false, FlowSpec{Connections: 1, Rate: 1000})
	for name, sent := range map[string]struct {
		at       int64
		repeated uint64
	}{
		"later":    {monotonic() + int64(time.Hour), 0},
		"long ago": {monotonic() - int64(time.Second), 1},
	} {
		if err := c.objects.LoadSlots.Put(uint32(0), flowsSlot{Stage: stageRequest, Tries: 1, SentNs: uint64(sent.at)}); err != nil {
			t.Fatal(err)
		}
		before, err := c.Read()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.injectors[0].LoadInject.Run(&ebpf.RunOptions{Data: make([]byte, 192), DataOut: make([]byte, 512)}); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Read(); err != nil || got.RepeatedReq-before.RepeatedReq != sent.repeated {
			t.Errorf("sent %s: %+v, %v", name, got, err)
		}
	}
}

// TestFlowCounts: an ended connection is neither open nor awaited.
func TestFlowCounts(t *testing.T) {
	c := FlowCounts{Started: 10, Established: 8, Requests: 7, Responses: 4, ResetSYN: 2, ResetReq: 2, Resets: 5, GaveUpReq: 1, WrongLength: 3}
	if c.Open() != 4 || c.Errors() != 6 || !c.isIdle(true) || c.isIdle(false) {
		t.Errorf("open %d, errors %d, settled %v, %v", c.Open(), c.Errors(), c.isIdle(true), c.isIdle(false))
	}
	c.Resets-- // one more while idle does not answer a SYN
	c.ResetSYN--
	if c.isIdle(true) {
		t.Error("settled with a SYN under way")
	}
	if c = (FlowCounts{Started: 3, Completed: 4}); c.Open() != 0 {
		t.Errorf("%d open: counters of two instants", c.Open())
	}
}
