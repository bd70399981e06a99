// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"encoding/binary"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// Flow is one direction of a translated connection.
type Flow struct {
	Protocol string         `json:"protocol"`
	Source   netip.AddrPort `json:"source"`
	Dest     netip.AddrPort `json:"destination"`
	// NewSource and NewDest are the addresses after the translation; invalid for a slow flow.
	NewSource netip.AddrPort `json:"new_source"`
	NewDest   netip.AddrPort `json:"new_destination"`
	In        string         `json:"in,omitempty"`
	Out       string         `json:"out,omitempty"`
	// Hook is "xdp" or "tc"; empty for a slow flow.
	Hook string `json:"hook,omitempty"`
	// Why is the reason of a slow flow.
	Why string `json:"why,omitempty"`
	// Packets and Bytes took the fast path. The counters of the kernel do not contain them.
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
	// Idle is the time since the last packet in seconds, with a resolution of one second.
	Idle float64 `json:"idle_seconds"`
}

// Status is the state of the acceleration.
type Status struct {
	PID     int      `json:"pid"`
	Uptime  float64  `json:"uptime_seconds"`
	Refused []string `json:"refused"` // reasons that exclude every flow now
	// RefusedIPv6 are reasons that exclude the flows of IPv6 alone.
	RefusedIPv6 []string `json:"refused_ipv6"`
	// Excluding are rules that exclude the flows that may traverse them.
	Excluding  []string    `json:"excluding"`
	Interfaces []Interface `json:"interfaces"`
	XDP        uint64      `json:"packets_xdp"`
	TC         uint64      `json:"packets_tc"`
	Bytes      uint64      `json:"bytes"`
	Learned    uint64      `json:"flows_learned"`
	Ended      uint64      `json:"flows_ended"`
	Fast       int         `json:"flows_fast"`
	Slow       int         `json:"flows_slow"`
	// Invalidations counts the changes of the host after which flows were learned again, by cause.
	Invalidations map[string]uint64 `json:"invalidations"`
	Flows         []Flow            `json:"flows"`
}

// slowReasons are the words for enum slow.
var slowReasons = map[programsSlow]string{
	programsSlowSLOW_YOUNG:     "fewer than 16 packets, or window checks not liberal yet",
	programsSlowSLOW_HELPER:    "a helper, sequence adjustment or SYN proxy",
	programsSlowSLOW_ZONE:      "in a conntrack zone",
	programsSlowSLOW_OFFLOADED: "a flowtable forwards it",
	programsSlowSLOW_FIXED:     "its conntrack timeout is fixed",
	programsSlowSLOW_INTERFACE: "an interface of its path is not accelerated",
	programsSlowSLOW_FRAME:     "VLAN tag, IP options, or another form than its conntrack entry",
	programsSlowSLOW_HAIRPIN:   "it leaves by the interface of its arrival",
	programsSlowSLOW_ROUTE:     "its route is not known at the output",
	programsSlowSLOW_FULL:      "the table of learned flows is full",
	programsSlowSLOW_POLICY:    "a conntrack timeout policy applies",
	programsSlowSLOW_RULE:      "a rule depends on single packets",
}

// Status returns the state, and at most limit flows with the most packets first.
func (a *Accelerator) Status(limit int) (*Status, error) {
	counters, err := a.counters()
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	s := &Status{PID: os.Getpid(), Uptime: time.Since(a.started).Seconds(), Refused: append([]string{}, a.judgement.all...),
		RefusedIPv6: append([]string{}, a.judgement.ipv6...), Excluding: append([]string{}, a.judgement.rules()...),
		Interfaces: slices.Clone(a.interfaces), Invalidations: maps.Clone(a.changes), Flows: []Flow{},
		XDP: counters[programsCounterCOUNT_XDP], TC: counters[programsCounterCOUNT_TC], Bytes: counters[programsCounterCOUNT_BYTES],
		Learned: counters[programsCounterCOUNT_LEARNED], Ended: counters[programsCounterCOUNT_ENDED]}
	epoch := a.epoch
	rules := map[uint32]string{}
	for _, x := range a.judgement.some {
		rules[x.conditions.Id] = x.rule
	}
	a.mu.Unlock()
	names := map[uint32]string{}
	xdp := map[uint32]bool{}
	for _, i := range s.Interfaces {
		if i.index == 0 {
			continue // it does not exist
		}
		names[uint32(i.index)] = i.Name
		xdp[uint32(i.index)] = slices.Contains(i.Hooks, hookXDP)
	}
	var key programsFlowKey
	var entry programsFlowEntry
	at := now()
	all := a.objects.Flows.Iterate()
	for all.Next(&key, &entry) {
		f := flowOf(&key)
		f.NewSource, f.NewDest = endpoint(key.Family, entry.Saddr, entry.Sport), endpoint(key.Family, entry.Daddr, entry.Dport)
		f.In, f.Out, f.Packets, f.Bytes = names[entry.In], names[entry.Out], entry.Packets, entry.Bytes
		if at > entry.Renewed {
			f.Idle = time.Duration(at - entry.Renewed).Truncate(time.Second).Seconds()
		}
		switch {
		case entry.Epoch != epoch || len(s.Refused) > 0:
			f.Why = "to be learned again after a change"
		case entry.Xdp != 0 && xdp[entry.In]:
			f.Hook = hookXDP
		default:
			f.Hook = hookTC
		}
		s.Flows = append(s.Flows, f)
	}
	if err := all.Err(); err != nil && err != ebpf.ErrIterationAborted { // the table changes meanwhile
		return nil, err
	}
	var c programsCandidate
	for all := a.objects.Candidates.Iterate(); all.Next(&key, &c); {
		f := flowOf(&key)
		f.Out, f.Why = names[c.Out], slowReasons[programsSlow(c.Reason)]
		if rule := rules[c.Rule]; rule != "" && programsSlow(c.Reason) == programsSlowSLOW_RULE {
			f.Why = rule
		}
		s.Flows = append(s.Flows, f)
	}
	for _, f := range s.Flows {
		if f.Hook != "" {
			s.Fast++
		} else {
			s.Slow++
		}
	}
	slices.SortStableFunc(s.Flows, func(x, y Flow) int {
		switch {
		case x.Packets > y.Packets:
			return -1
		case x.Packets < y.Packets:
			return 1
		}
		return x.Source.Compare(y.Source)
	})
	s.Flows = s.Flows[:min(limit, len(s.Flows))]
	return s, nil
}

func flowOf(k *programsFlowKey) Flow {
	return Flow{Protocol: flow.Protocol(k.L4Proto).String(), Source: endpoint(k.Family, k.Saddr, k.Sport), Dest: endpoint(k.Family, k.Daddr, k.Dport)}
}

// endpoint converts from network byte order.
func endpoint(family uint16, addr [4]uint32, port uint16) netip.AddrPort {
	var a [16]byte
	var p [2]byte
	for i, word := range addr {
		binary.NativeEndian.PutUint32(a[4*i:], word)
	}
	binary.NativeEndian.PutUint16(p[:], port)
	to := netip.AddrFrom16(a)
	if family == unix.AF_INET {
		to = netip.AddrFrom4([4]byte(a[:4]))
	}
	return netip.AddrPortFrom(to, binary.BigEndian.Uint16(p[:]))
}

// entryOf returns the conntrack entry of a request of the programs.
func entryOf(sample []byte) (e conntrack.Entry, ok bool) {
	var key programsFlowKey
	if _, err := binary.Decode(sample, binary.NativeEndian, &key); err != nil {
		return e, false
	}
	f := flowOf(&key)
	source, dest := f.Source, f.Dest
	e.SetFlow(&flow.Flow{Original: flow.Tuple{Protocol: flow.TCP, Source: source, Dest: dest}, Reply: flow.Tuple{Protocol: flow.TCP, Source: dest, Dest: source}})
	return e, true
}

// Plan is what Open would do.
type Plan struct {
	Refused     []string    `json:"refused"`
	RefusedIPv6 []string    `json:"refused_ipv6"`
	Excluding   []string    `json:"excluding"`
	Interfaces  []Interface `json:"interfaces"`
}

// Inspect returns the plan for the calling thread's namespace, and an error if the kernel lacks a function. It changes
// nothing: the programs are loaded, and removed again.
func Inspect(ctx context.Context, o Options) (*Plan, error) {
	var objects programsObjects
	if err := load(&objects, o.Flows); err != nil {
		return nil, err
	}
	if err := objects.Close(); err != nil {
		return nil, err
	}
	j, err := examine(ctx)
	if err != nil {
		return nil, err
	}
	list, err := choose(o.Interfaces, func(ebpf.ProgramID) bool { return false })
	if err != nil {
		return nil, err
	}
	if !anyAttached(list) {
		j.all = append(j.all, "no interface can be accelerated")
	}
	return &Plan{Refused: append([]string{}, j.all...), RefusedIPv6: append([]string{}, j.ipv6...), Excluding: append([]string{}, j.rules()...), Interfaces: list}, nil
}
