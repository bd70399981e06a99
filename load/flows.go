// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/flow"
)

// FlowSpec configures the connections. The zero value of a field is its default.
type FlowSpec struct {
	// Source endpoints: each connection has its own endpoint and reuses it.
	Source Range `json:"source"`
	// Dest is the service, one endpoint.
	Dest netip.AddrPort `json:"dest"`
	// Connections is the number of concurrent connections; 0 means all source endpoints.
	Connections int `json:"connections"`
	// Requests per connection; 0 means 1.
	Requests int `json:"requests"`
	// Hold keeps connections open between their turns: a turn opens a connection or sends one request on it. Without
	// Hold a turn is a whole connection.
	Hold bool `json:"hold,omitempty"`
	// Rate of turns per second over all CPUs, open-loop; 0 means that the end of a turn starts the next one.
	Rate float64 `json:"rate,omitempty"`
	// Window bounds the concurrent turns over all CPUs if Rate is 0; 0 means 128.
	Window int `json:"window,omitempty"`
	// Limit is the number of turns; 0 means until stopped.
	Limit uint64 `json:"limit,omitempty"`
	// ResponseSize is the whole HTTP response in bytes, headers included, as configured at the server end; 0 means
	// 210.
	ResponseSize int `json:"response_size"`
	// Timeout of a packet before its retransmission; 0 means 200 ms (RFC 6298 begins with 1 s, but this network is
	// one machine).
	Timeout time.Duration `json:"timeout_ns"`
	// Tries is the number of transmissions of a packet before the connection fails; 0 means 6.
	Tries int `json:"tries"`
	// Interface of the client's netns, and further interfaces that receive replies.
	Interface string   `json:"interface"`
	Returns   []string `json:"returns,omitempty"`
	// DestMAC is the gateway's hardware address; nil looks it up.
	DestMAC net.HardwareAddr `json:"-"`
}

// FlowCounts are the results of the connections.
type FlowCounts struct {
	Started     uint64 `json:"started"`
	Established uint64 `json:"established"`
	Requests    uint64 `json:"requests"`
	Responses   uint64 `json:"responses"`
	Completed   uint64 `json:"completed"`
	Overdue     uint64 `json:"overdue"` // turns that were due while their connection was still busy
	RepeatedSYN uint64 `json:"repeated_syn"`
	RepeatedReq uint64 `json:"repeated_request"`
	RepeatedFIN uint64 `json:"repeated_fin"`
	GaveUpSYN   uint64 `json:"gave_up_connect"`
	GaveUpReq   uint64 `json:"gave_up_response"`
	GaveUpFIN   uint64 `json:"gave_up_close"`
	Resets      uint64 `json:"resets"`
	ResetSYN    uint64 `json:"reset_connect"`  // Resets in reply to a SYN.
	ResetReq    uint64 `json:"reset_response"` // Resets in reply to a request.
	Unreachable uint64 `json:"unreachable"`
	WrongLength uint64 `json:"wrong_length"`
	Stray       uint64 `json:"stray"` // late duplicates and packets without a connection
}

// Errors returns the connections that failed.
func (c FlowCounts) Errors() uint64 {
	return c.GaveUpSYN + c.GaveUpReq + c.GaveUpFIN + c.Resets
}

// Repeated returns the retransmissions.
func (c FlowCounts) Repeated() uint64 { return c.RepeatedSYN + c.RepeatedReq + c.RepeatedFIN }

// Open returns the number of connections that are open or opening. The counters of several CPUs are not read
// atomically, so a negative difference returns 0.
func (c FlowCounts) Open() uint64 {
	ended := c.Completed + c.Errors()
	return c.Started - min(c.Started, ended)
}

// isIdle reports whether the client waits for nothing: no end of a connection and, if connections are held, no
// response.
func (c FlowCounts) isIdle(hold bool) bool {
	if !hold {
		return c.Open() == 0
	}
	return c.Requests <= c.Responses+c.GaveUpReq+c.ResetReq && c.Started <= c.Established+c.GaveUpSYN+c.ResetSYN
}

// maxConnections bounds the memory of the slots: 32 bytes each, 1 GiB.
const maxConnections = 1 << 25

// Validate returns an error if the spec is impossible on any interface.
func (s FlowSpec) Validate() error { return s.normalize() }

func (s *FlowSpec) normalize() error {
	if !s.Source.First.IsValid() || !s.Dest.IsValid() {
		return errors.New("flows: a source range and a destination are needed")
	}
	if s.Source.First.Is4() != s.Dest.Addr().Is4() {
		return fmt.Errorf("flows: source %s and destination %s are of different families", s.Source.First, s.Dest)
	}
	if s.Source.Ports == (flow.Ports{}) {
		s.Source.Ports = flow.Ports{First: 1024, Last: 65535}
	}
	all := uint64(s.Source.addresses()) * uint64(s.Source.ports())
	if s.Connections == 0 && all <= maxConnections {
		s.Connections = int(all)
	}
	switch {
	case s.Connections == 0:
		return fmt.Errorf("flows: the source range holds %d endpoints: say how many connections, at most %d", all, maxConnections)
	case s.Connections < 0 || s.Connections > maxConnections:
		return fmt.Errorf("flows: %d connections: from 1 to %d", s.Connections, maxConnections)
	case uint64(s.Connections) > all:
		return fmt.Errorf("flows: %d connections asked for, the source range holds %d endpoints", s.Connections, all)
	case s.Requests < 0 || s.Requests > math.MaxUint16:
		return fmt.Errorf("flows: %d requests a connection: from 1 to %d", s.Requests, math.MaxUint16)
	case s.Tries < 0 || s.Tries > math.MaxUint8:
		return fmt.Errorf("flows: %d tries of a packet: from 1 to %d", s.Tries, math.MaxUint8)
	case s.Timeout < 0:
		return fmt.Errorf("flows: timeout %v is negative", s.Timeout)
	case s.Window < 0:
		return fmt.Errorf("flows: window %d is negative", s.Window)
	}
	if err := errors.Join(s.Source.check(), checkRate(s.Rate)); err != nil {
		return fmt.Errorf("flows: %w", err)
	}
	if _, err := responseHead(s.ResponseSize); err != nil {
		return err
	}
	s.Requests = max(s.Requests, 1)
	if s.Window == 0 {
		s.Window = 128
	}
	if s.ResponseSize == 0 {
		s.ResponseSize = DefaultResponse
	}
	if s.Timeout == 0 {
		s.Timeout = 200 * time.Millisecond
	}
	if s.Tries == 0 {
		s.Tries = 6
	}
	return nil
}

// Client is the client end of connections: an XDP program on its interfaces and an injector on each CPU.
type Client struct {
	netns     Namespace
	spec      FlowSpec
	cpus      []int
	objects   *flowsObjects
	injectors []*flowsObjects
	links     []link.Link
	clock     *cpuClock
	ended     []atomic.Int64 // stop time of each CPU's latest run
}

// NewClient loads the client end and attaches it. cpus are the injecting CPUs; nil means CPU 0.
func NewClient(netns Namespace, spec FlowSpec, cpus []int) (*Client, error) {
	if err := spec.normalize(); err != nil {
		return nil, err
	}
	if len(cpus) == 0 {
		cpus = []int{0}
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("flows: memory limit: %w", err)
	}
	cpus = cpus[:min(len(cpus), spec.Connections)] // each CPU needs a connection
	plan, err := spec.plan(netns)
	if err != nil {
		return nil, err
	}
	c := &Client{netns: netns, spec: spec, cpus: cpus, clock: newCPUClock(cpus), ended: make([]atomic.Int64, len(cpus))}
	if c.objects, err = loadFlowEnd(plan, nil, 0, nil, spec.Connections); err != nil {
		return nil, err
	}
	shared := map[string]*ebpf.Map{
		"load_slots": c.objects.LoadSlots, "load_counts": c.objects.LoadCounts,
		"load_connect": c.objects.LoadConnect, "load_response": c.objects.LoadResponse, "load_balance": c.objects.LoadBalance,
	}
	for nth := range cpus {
		o, err := loadFlowEnd(spec.share(plan, nth, len(cpus)), nil, 0, shared, spec.Connections)
		if err != nil {
			c.Close()
			return nil, err
		}
		c.injectors = append(c.injectors, o)
	}
	for _, iface := range append([]string{spec.Interface}, spec.Returns...) {
		l, err := attachXDP(netns, iface, c.objects.LoadClient)
		if err != nil {
			c.Close()
			return nil, err
		}
		c.links = append(c.links, l)
	}
	return c, nil
}

func (s *FlowSpec) plan(netns Namespace) (flowsFlowPlan, error) {
	request := requestFor(s.ResponseSize)
	p := flowsFlowPlan{
		Slots: uint32(s.Connections), Ports: s.Source.ports(), SourcePort: uint32(s.Source.Ports.First),
		SourceLow: lastWord(s.Source.First), DestPort: uint32(s.Dest.Port()), RequestLen: uint32(len(request)),
		ResponseLen: uint32(s.ResponseSize), RequestSum: sumWords([]byte(request)), Window: uint32(s.Window),
		Requests: uint32(s.Requests), MaxTries: uint32(s.Tries), TimeoutNs: uint64(s.Timeout),
	}
	if s.Hold {
		p.Hold = 1
	}
	if s.Source.First.Is6() {
		p.V6 = 1
	}
	from, to := s.Source.First.AsSlice(), s.Dest.Addr().AsSlice()
	copy(p.Source[16-len(from):], from)
	copy(p.Dest[16-len(to):], to)
	copy(p.Request[:], request)
	err := netns.Do(func() error {
		i, err := net.InterfaceByName(s.Interface)
		if err != nil {
			return fmt.Errorf("interface %s: %w", s.Interface, err)
		}
		p.Ifindex = uint32(i.Index)
		copy(p.SourceMac[:], i.HardwareAddr)
		mac := s.DestMAC
		if mac == nil {
			if mac, err = nextHopMAC(s.Dest.Addr(), i.Index); err != nil {
				return err
			}
		}
		copy(p.DestMac[:], mac)
		return nil
	})
	return p, err
}

// share returns the part of the plan for injector nth of n.
func (s *FlowSpec) share(p flowsFlowPlan, nth, n int) flowsFlowPlan {
	first, next := s.Connections*nth/n, s.Connections*(nth+1)/n
	p.FirstSlot, p.OwnSlots = uint32(first), uint32(next-first)
	p.Limit = shareOf(s.Limit, nth, n)
	if s.Rate > 0 {
		p.Interval = uint64(65536e9 * float64(n) / s.Rate)
	}
	return p
}

// loseEvery makes the client end drop one of so many received packets in a test.
var loseEvery uint32

// loadFlowEnd loads the programs of one end.
func loadFlowEnd(plan flowsFlowPlan, response []byte, replyIfindex int, shared map[string]*ebpf.Map, slots int) (*flowsObjects, error) {
	collection, err := loadFlows()
	if err != nil {
		return nil, err
	}
	collection.Maps["load_slots"].MaxEntries = uint32(max(slots, 1))
	var head [128]byte
	n := copy(head[:], response)
	for name, value := range map[string]any{
		"plan": plan, "response_head": head, "response_head_len": uint32(n),
		"response_sum": sumWords(response), "reply_ifindex": uint32(replyIfindex), "lose_every": loseEvery,
	} {
		if err := collection.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("flows: %s: %w", name, err)
		}
	}
	o := new(flowsObjects)
	if err := collection.LoadAndAssign(o, &ebpf.CollectionOptions{MapReplacements: shared}); err != nil {
		return nil, fmt.Errorf("flows: load programs: %w", err)
	}
	return o, nil
}

// Spec returns the spec with defaults filled in.
func (c *Client) Spec() FlowSpec { return c.spec }

// Run makes connections until the context ends, or until the limit of turns is reached and every connection has
// ended.
func (c *Client) Run(ctx context.Context, started chan<- struct{}) error {
	begun := make(chan struct{}, len(c.cpus))
	g, ctx := errgroup.WithContext(ctx)
	for nth, cpu := range c.cpus {
		r := liveRun{
			netns: c.netns, prog: c.injectors[nth].LoadInject, frame: make([]byte, 192), cpu: cpu, started: begun, thread: &c.clock.threads[nth],
			ended: &c.ended[nth],
		}
		if c.spec.Rate > 0 {
			r.batch = 8
		}
		if c.spec.Limit > 0 {
			r.done = c.allTurnsEnded
		}
		g.Go(func() error { return r.run(ctx) })
	}
	if started != nil {
		for range c.cpus {
			select {
			case <-begun:
			case <-ctx.Done():
			}
		}
		close(started)
	}
	return g.Wait()
}

// CPUTime returns the CPU time used by the connections; see Sender.CPUTime.
func (c *Client) CPUTime() time.Duration { return c.clock.cpuTime() }

// Took returns the duration of the last Run from the first turn to the end, without the kernel's setup and teardown;
// see schedule.
func (c *Client) Took() time.Duration {
	var t span
	for nth := range c.injectors {
		t.add(c.times(nth))
	}
	return t.length()
}

func (c *Client) times(nth int) (begin, end int64) {
	i := c.injector(nth)
	begin, end = int64(i.StartNs), c.ended[nth].Load()
	if i.Turns >= shareOf(c.spec.Limit, nth, len(c.cpus)) {
		end = max(end, begin+schedule(i.Turns, c.spec.Rate, len(c.cpus)))
	}
	return begin, end
}

// Unbegun returns the number of turns of the last Run that were due and not begun; see Sender.Unsent.
func (c *Client) Unbegun() (sum uint64) {
	for nth := range c.injectors {
		begin, end := c.times(nth)
		sum += unsentTurns(time.Duration(end-begin), c.spec.Rate/float64(len(c.cpus)), shareOf(c.spec.Limit, nth, len(c.cpus)), c.injector(nth).Turns)
	}
	return sum
}

func (c *Client) turnCount() (sum uint64) {
	for nth := range c.injectors {
		sum += c.injector(nth).Turns
	}
	return sum
}

func (c *Client) injector(nth int) flowsInjector {
	var i flowsInjector
	if err := c.injectors[nth].Injector.Get(&i); err != nil {
		return flowsInjector{}
	}
	return i
}

// allTurnsEnded reports whether all turns have ended.
func (c *Client) allTurnsEnded() bool {
	if c.turnCount() < c.spec.Limit {
		return false
	}
	n, err := c.Read()
	return err != nil || n.isIdle(c.spec.Hold)
}

// ByCPU returns the number of connections completed on each CPU. The kernel may have moved the receive side of a link
// away from the injector's CPU.
func (c *Client) ByCPU() ([]uint64, error) {
	var perCPU []flowsFlowCounts
	if err := c.objects.LoadCounts.Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("flows: counters: %w", err)
	}
	done := make([]uint64, len(perCPU))
	for cpu, p := range perCPU {
		done[cpu] = p.Completed
	}
	return done, nil
}

// Read returns the counters.
func (c *Client) Read() (FlowCounts, error) {
	var perCPU []flowsFlowCounts
	var n FlowCounts
	if err := c.objects.LoadCounts.Lookup(uint32(0), &perCPU); err != nil {
		return n, fmt.Errorf("flows: counters: %w", err)
	}
	for _, p := range perCPU {
		n.Started += p.Started
		n.Established += p.Established
		n.Requests += p.Requests
		n.Responses += p.Responses
		n.Completed += p.Completed
		n.Overdue += p.Overdue
		n.RepeatedSYN += p.AgainSyn
		n.RepeatedReq += p.AgainRequest
		n.RepeatedFIN += p.AgainFin
		n.GaveUpSYN += p.GaveUpSyn
		n.GaveUpReq += p.GaveUpRequest
		n.GaveUpFIN += p.GaveUpFin
		n.Resets += p.Resets
		n.ResetSYN += p.ResetsSyn
		n.ResetReq += p.ResetsRequest
		n.Unreachable += p.Unreachable
		n.WrongLength += p.WrongLength
		n.Stray += p.Stray
	}
	return n, nil
}

// ConnectLatency returns the distribution of the time from the due time of a turn to the SYN ACK.
func (c *Client) ConnectLatency() (*Histogram, error) { return readHistogram(c.objects.LoadConnect) }

// ResponseLatency returns the distribution of the time from the due time of a turn to the response.
func (c *Client) ResponseLatency() (*Histogram, error) { return readHistogram(c.objects.LoadResponse) }

// Close detaches and unloads.
func (c *Client) Close() error {
	var errs []error
	for _, l := range c.links {
		errs = append(errs, l.Close())
	}
	for _, o := range append(c.injectors, c.objects) {
		errs = append(errs, o.Close())
	}
	c.links, c.injectors = nil, nil
	return errors.Join(errs...)
}
