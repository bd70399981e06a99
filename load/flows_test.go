// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestServerSpeaksHTTP has Go's HTTP client and the kernel's TCP talk to the
// server end: handshake, sequence numbers, checksums and message are right.
func TestServerSpeaksHTTP(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	// An answer uses the frame of its request. A buffer of the kernel's own has no room to grow, unlike live frames
	// (TestLongResponses).
	padding := http.Header{"X-Padding": {strings.Repeat("-", 400)}}
	for _, size := range []int{96, 0, 400} {
		s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{ResponseSize: size})
		if err != nil {
			t.Fatal(err)
		}
		for _, address := range []string{"192.0.2.2:80", "[2001:db8::2]:80"} {
			client := &http.Client{Timeout: slowest, Transport: &http.Transport{
				DisableKeepAlives: true,
				DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
					return l.Node("source").Dial(ctx, nil, network, address)
				},
			}}
			ask, err := http.NewRequest(http.MethodGet, "http://"+address+"/", nil)
			if err != nil {
				t.Fatal(err)
			}
			ask.Header = padding
			answer, err := client.Do(ask)
			if err != nil {
				t.Fatalf("%s, %d bytes: %v", address, size, err)
			}
			body, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			if err != nil || answer.StatusCode != 200 {
				t.Errorf("%s, %d bytes: status %d, error %v", address, size, answer.StatusCode, err)
			}
			want := size
			if size == 0 {
				want = DefaultResponse
			}
			head, _ := responseHead(size)
			if len(head)+len(body) != want {
				t.Errorf("%s: response of %d bytes, want %d", address, len(head)+len(body), want)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestResponseSizes(t *testing.T) {
	for _, size := range []int{0, 96, 210, maxResponse} {
		head, err := responseHead(size)
		if err != nil || len(head)%8 != 0 {
			t.Errorf("response of %d bytes: head %q, %v", size, head, err)
		}
	}
	for _, size := range []int{1, 60, maxResponse + 1} {
		if head, err := responseHead(size); err == nil {
			t.Errorf("response of %d bytes: head %q, want an error", size, head)
		}
	}
	for _, size := range []int{96, 210, maxResponse} {
		request := requestFor(size)
		if len(request)%8 != 0 || len(request) > maxRequest || len(request) < min(size, maxRequest) || request[28] != 'c' {
			t.Errorf("request of %d bytes with %q at byte 28 for a response of %d", len(request), request[28], size)
		}
	}
}

func TestFlows(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cases := []struct {
		name, source, dest string
		spec               FlowSpec
		want               FlowCounts
	}{
		{"ipv4", "192.0.2.1:1024-2023", "192.0.2.2:80", FlowSpec{Limit: 5000},
			FlowCounts{Started: 5000, Established: 5000, Requests: 5000, Responses: 5000, Completed: 5000}},
		{"ipv6", "[2001:db8::1]:1024-2023", "[2001:db8::2]:80", FlowSpec{Limit: 5000},
			FlowCounts{Started: 5000, Established: 5000, Requests: 5000, Responses: 5000, Completed: 5000}},
		{"three requests", "192.0.2.1+10:1024-1123", "192.0.2.2:80", FlowSpec{Limit: 2000, Requests: 3},
			FlowCounts{Started: 2000, Established: 2000, Requests: 6000, Responses: 6000, Completed: 2000}},
		{"paced", "192.0.2.1:1024-2023", "192.0.2.2:80", FlowSpec{Limit: 2000, Rate: 20_000},
			FlowCounts{Started: 2000, Established: 2000, Requests: 2000, Responses: 2000, Completed: 2000}},
		{"slowly", "192.0.2.1:1024-2023", "192.0.2.2:80", FlowSpec{Limit: 4, Rate: 20},
			FlowCounts{Started: 4, Established: 4, Requests: 4, Responses: 4, Completed: 4}},
		{"held", "192.0.2.1+10:1024-1123", "192.0.2.2:80", FlowSpec{Limit: 3000, Hold: true, Requests: 5, Rate: 20_000},
			FlowCounts{Started: 1000, Established: 1000, Requests: 2000, Responses: 2000}},
		{"fewer than the window", "192.0.2.1:1024-1073", "192.0.2.2:80", FlowSpec{Limit: 5000},
			FlowCounts{Started: 5000, Established: 5000, Requests: 5000, Responses: 5000, Completed: 5000}},
		{"held, unpaced", "192.0.2.1:1024-1073", "192.0.2.2:80", FlowSpec{Limit: 3000, Hold: true, Requests: 100},
			FlowCounts{Started: 50, Established: 50, Requests: 2950, Responses: 2950}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.spec.Source, c.spec.Dest, c.spec.Interface = mustRange(t, c.source), netip.MustParseAddrPort(c.dest), "eth0"
			got := runFlows(t, l.Node("source"), c.spec)
			if c.spec.Rate == 0 && got.Overdue != 0 {
				t.Errorf("%d turns were overdue without a schedule", got.Overdue)
			}
			// A turn that finds its connection busy ends. The first turn of a connection never does, so that every
			// held connection is opened.
			if !c.spec.Hold {
				c.want.Started -= got.Overdue
				c.want.Established -= got.Overdue
				c.want.Completed -= got.Overdue
			}
			c.want.Requests -= got.Overdue
			c.want.Responses -= got.Overdue
			// A late duplicate is no error, and a busy machine may need a repetition.
			got.Stray, got.RepeatedSYN, got.RepeatedReq, got.RepeatedFIN, got.Overdue = 0, 0, 0, 0, 0
			if got != c.want {
				t.Errorf("counted %+v, want %+v", got, c.want)
			}
		})
	}
}

// TestLongResponses makes answers of the largest size.
func TestLongResponses(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{ResponseSize: maxResponse})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "[2001:db8::1]:1024-1123"), Dest: netip.MustParseAddrPort("[2001:db8::2]:80"),
		Interface: "eth0", Limit: 500, ResponseSize: maxResponse,
	})
	if got.Completed != 500 || got.Errors() != 0 || got.WrongLength != 0 {
		t.Errorf("counted %+v", got)
	}
}

func runFlows(t *testing.T, netns Namespace, spec FlowSpec, cpus ...int) FlowCounts {
	t.Helper()
	client, err := NewClient(netns, spec, cpus)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := client.Run(ctx, nil); err != nil {
		t.Fatal(err)
	}
	// At a rate of 20 per second, 20 have begun after a second.
	if took := client.Took(); int64(took) < schedule(spec.Limit, spec.Rate, 1) {
		t.Errorf("%d turns at %g a second took %v", spec.Limit, spec.Rate, took)
	}
	got, err := client.Read()
	if err != nil {
		t.Fatal(err)
	}
	h, err := client.ResponseLatency()
	if err != nil || h.Count() != got.Responses {
		t.Errorf("latency of %d responses, %d responses, error %v", h.Count(), got.Responses, err)
	}
	return got
}

// TestFlowsRepeatWhatIsLost has a link that loses packets: every connection must
// still complete.
func TestFlowsRepeatWhatIsLost(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// Seven of eight answers are new, and a connection has three, so each kind is lost in turn. With nine of ten the
	// losses were always the SYN ACK, because connections ran in step.
	loseEvery = 8
	defer func() { loseEvery = 0 }()
	got := runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.1:1024-2023"), Dest: netip.MustParseAddrPort("192.0.2.2:80"),
		Interface: "eth0", Limit: 2000, Rate: 20_000, Timeout: 5 * time.Millisecond, Tries: 50,
	})
	if got.Completed != got.Started || got.RepeatedSYN == 0 || got.RepeatedReq == 0 || got.RepeatedFIN == 0 {
		t.Errorf("with losses: %+v", got)
	}
}

// TestFlowsOfTwoCPUs has two CPUs share the connections, the rate and the limit.
func TestFlowsOfTwoCPUs(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs")
	}
	l := labtest.New(t, wire())
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.1:1024-2023"), Dest: netip.MustParseAddrPort("192.0.2.2:80"), Interface: "eth0", Limit: 3001, Rate: 20_000,
	}, 0, 1)
	if got.Completed+got.Overdue != 3001 || got.Errors() != 0 {
		t.Errorf("counted %+v", got)
	}
	// One connection is one CPU's; the other has nothing to do.
	got = runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: netip.MustParseAddrPort("192.0.2.2:80"), Interface: "eth0", Limit: 20,
	}, 0, 1)
	if got.Completed != 20 || got.Errors() != 0 {
		t.Errorf("one connection: counted %+v", got)
	}
}

// TestMillionConnections holds a million connections open at once and counts the
// memory of both ends: every map and this process, less than 1 GiB.
func TestMillionConnections(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const million = 1_000_000
	l := labtest.New(t, wire())
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := NewClient(l.Node("source"), FlowSpec{
		Source: mustRange(t, "198.51.100.0+20:1024-51023"), Dest: netip.MustParseAddrPort("192.0.2.2:80"), Interface: "eth0",
		Hold: true, Requests: 100, Limit: 2 * million,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*slowest)
	defer cancel()
	if err := c.Run(ctx, nil); err != nil {
		t.Fatal(err)
	}
	n, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	// The second turn of each is a request, so all connections must work.
	if n.Open() != million || n.Established != million || n.Responses != million || n.Overdue != 0 || n.Errors() != 0 {
		t.Errorf("counted %+v", n)
	}
	var maps uint64
	for _, o := range append(c.injectors, c.objects, s.objects) {
		for _, m := range []*ebpf.Map{o.LoadSlots, o.LoadCounts, o.LoadConnect, o.LoadResponse, o.LoadBalance} {
			info, err := m.Info()
			if err != nil {
				t.Fatal(err)
			}
			bytes, ok := info.Memlock()
			if !ok {
				t.Skip("the kernel does not tell what maps take")
			}
			maps += bytes
		}
	}
	var own runtime.MemStats
	runtime.ReadMemStats(&own)
	if all := maps + own.Sys; all > 1<<30 {
		t.Errorf("%d MiB: maps %d MiB, this process %d MiB", all>>20, maps>>20, own.Sys>>20)
	}
}

// TestFlowsThroughASlowGateway uses a gateway that passes a third of the scheduled rate. Every connection gets its
// turns, and the latency since the due time contains the wait.
func TestFlowsThroughASlowGateway(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Tool("tc"))
	l := labtest.New(t, lab.Topology{
		Name: "slow",
		Nodes: []lab.NodeSpec{
			{Name: "source", Routes: []lab.Route{{To: "default", Via: "192.0.2.1"}}}, {Name: "gateway", Forward: true},
			{Name: "sink", Routes: []lab.Route{{To: "default", Via: "198.51.100.1"}}},
		},
		Links: []lab.LinkSpec{{
			A: lab.End{Node: "source", Iface: "eth0", GRO: true, Addresses: []string{"192.0.2.2/24"}},
			B: lab.End{Node: "gateway", Iface: "wan0", GRO: true, Addresses: []string{"192.0.2.1/24"}},
		}, {
			A: lab.End{Node: "gateway", Iface: "lan0", GRO: true, Addresses: []string{"198.51.100.1/24"}},
			B: lab.End{Node: "sink", Iface: "eth0", GRO: true, Addresses: []string{"198.51.100.2/24"}},
		}},
	})
	if out, err := l.Node("gateway").Command(t.Context(), "tc", "qdisc", "add", "dev", "lan0", "root", "tbf", "rate", "1mbit", "burst", "2kb", "latency", "5s").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := NewServer(l.Node("sink"), "eth0", ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := NewClient(l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.2:1024-1123"), Dest: netip.MustParseAddrPort("198.51.100.2:80"), Interface: "eth0",
		Limit: 100, Rate: 1000, Timeout: slowest,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), slowest)
	defer cancel()
	if err := c.Run(ctx, nil); err != nil {
		t.Fatal(err)
	}
	n, err := c.Read()
	if err != nil || n.Started != 100 || n.Completed != 100 || n.Overdue != 0 {
		t.Errorf("%+v, %v", n, err)
	}
	// SYN and request of 100 connections are 32,400 bytes, 259 ms on this line; the last
	// was due after 99 ms. A burst of 2 kB is 16 ms less.
	if h, err := c.ResponseLatency(); err != nil || h.Max() < 140*time.Millisecond {
		t.Errorf("the longest response took %v since it was due: %v", h.Max(), err)
	}
}

// TestFlowsGiveUp has no server.
func TestFlowsGiveUp(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	sink, err := NewSink(SinkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	// Without the far end the kernel there resets connections to ports without a listener.
	if err := l.Node("sink").SetGRO("eth0", true); err != nil {
		t.Fatal(err)
	}
	got := runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.1:1024-1123"), Dest: netip.MustParseAddrPort("192.0.2.2:80"), Interface: "eth0", Limit: 100, Hold: true,
	})
	if got.ResetSYN != 100 || got.Resets != 100 || got.Open() != 0 {
		t.Errorf("with nobody listening: %+v", got)
	}
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		t.Fatal(err)
	}
	got = runFlows(t, l.Node("source"), FlowSpec{
		Source: mustRange(t, "192.0.2.1:1024-1123"), Dest: netip.MustParseAddrPort("192.0.2.2:80"),
		Interface: "eth0", Limit: 100, Rate: 100_000, Timeout: 2 * time.Millisecond, Tries: 3,
	})
	if fmt.Sprint(got.GaveUpSYN, got.RepeatedSYN, got.Completed) != "100 200 0" || got.Errors() != 100 {
		t.Errorf("with nobody there: %+v", got)
	}
}
