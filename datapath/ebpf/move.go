// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

var _ datapath.Mover = (*Datapath)(nil)

// handshakeTime is the wait for handshakes without a flow before the flows of their service are
// exported. It is twice the round-trip time of a connection half around the world.
const handshakeTime = 500 * time.Millisecond

// listenerName returns the name of a service or port-forward in the form of datapath.Listener.
func listenerName(of *compile.Desired, id uint32) string {
	if of.Names.PortForward[id] {
		return "nat " + of.Names.Service[id]
	}
	return "service " + of.Names.Service[id]
}

// Give stops new flows to services and port-forwards, waits for handshakes in progress, and returns
// the flows.
func (d *Datapath) Give(ctx context.Context, names map[string]bool) (list []flow.Flow, err error) {
	d.mu.Lock()
	left := d.mark(names, wire.ServiceLeaves, 0)
	d.mu.Unlock()
	if left > 0 {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(handshakeTime):
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.inForce == nil {
		return nil, nil
	}
	now := d.ticks()
	for i := range d.t.Entries(0) {
		f, ok := d.t.Primary(i)
		if ok && f.Flags&wire.EntryNAT == 0 && f.Twin != wire.NoEntry && names[listenerName(d.inForce, uint32(f.Owner))] {
			list = append(list, d.describe(f, d.t.Twin(f), now))
		}
	}
	return list, nil
}

// mark sets and clears flags of the named services and port-forwards, also in the state in force. A
// nil map selects all. It returns the number of changed services.
func (d *Datapath) mark(names map[string]bool, set, unset uint16) (n int) {
	if d.t == nil || d.inForce == nil {
		return 0
	}
	for id, w := range d.inForce.Services {
		if flags := w.Flags&^unset | set; flags != w.Flags && (names == nil || names[listenerName(d.inForce, id)]) {
			w.Flags = flags
			d.inForce.Services[id] = w
			d.t.Services.Values[id].Flags = flags
			n++
		}
	}
	return n
}

// Take creates the flows imported from another datapath.
func (d *Datapath) Take(ctx context.Context, flows []flow.Flow) (made int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.inForce == nil {
		return 0, nil
	}
	defer d.mark(nil, 0, wire.ServiceArrives)
	if len(flows) == 0 {
		return 0, nil
	}
	taker, err := d.t.Program(d.switches, false, "flow_take")
	if err != nil {
		return 0, err
	}
	defer taker.Close()
	listeners := datapath.NewListeners(d.inForce.Resolved)
	owners := map[string]uint32{}
	for id := range d.inForce.Services {
		owners[listenerName(d.inForce, id)] = id
	}
	for i := range flows {
		if err := ctx.Err(); err != nil {
			return made, err
		}
		f := &flows[i]
		for _, l := range listeners.Find(f.Original.Protocol, f.Original.Dest) {
			id, ok := owners[l.Name()]
			if !ok || d.inForce.Services[id].Flags&wire.ServiceArrives == 0 {
				continue
			}
			r, ok := d.request(id, f)
			if !ok {
				break
			}
			frame := unsafe.Slice((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
			verdict, err := taker.Programs["flow_take"].Run(&ebpf.RunOptions{Data: slices.Clone(frame), DataOut: frame})
			if err == nil && verdict != xdpPass {
				err = fmt.Errorf("verdict %d", verdict)
			}
			if err != nil {
				return made, fmt.Errorf("flow %s: take: %w", f.Original, err)
			}
			if r.Reason == wire.ReasonNewFlow {
				made++
			}
			break
		}
	}
	return made, nil
}

// request returns the request to create a flow of a service. It returns false if the service has no
// such backend, or if the flow has ended.
func (d *Datapath) request(service uint32, f *flow.Flow) (wire.FlowRequest, bool) {
	s := d.inForce.Services[service]
	backend := slices.IndexFunc(d.inForce.Names.Backends[service], func(n uint32) bool {
		b := d.inForce.Backends[n]
		port := wire.PortOf(b.Port)
		if port == 0 {
			port = f.Original.Dest.Port() + uint16(s.Shift)
		}
		return b.State != wire.BackendDown && wire.AddrFrom(b.Addr, b.Family == wire.Family6) == f.Reply.Source.Addr() && port == f.Reply.Source.Port()
	})
	if backend < 0 {
		return wire.FlowRequest{}, false
	}
	to := f.Reply.Reverse()
	r := wire.FlowRequest{Key: wireTuple(f.Original), To: wireTuple(to), Owner: uint16(service), Family: wire.FamilyOf(f.Original.Source.Addr()),
		Backend: uint16(d.inForce.Names.Backends[service][backend])}
	switch f.State {
	case "SYN_SENT":
		return r, false // the client repeats its SYN, or the reply picks the connection up
	case "SYN_RECV":
		r.Heard = wire.HeardSYN
	case "ESTABLISHED":
		r.Heard, r.Open = wire.HeardSYN|wire.HeardACK, 1
	case "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK": // conntrack does not report which side sent the FIN
		r.Heard, r.Open = wire.HeardSYN|wire.HeardACK|wire.HeardFIN, 1
	case "TIME_WAIT", "CLOSE":
		return r, false
	default:
		if f.Replied {
			r.Heard = wire.HeardACK
		}
	}
	return r, true
}

func wireTuple(t flow.Tuple) wire.Tuple {
	return wire.Tuple{Saddr: wire.AddrOf(t.Source.Addr()), Daddr: wire.AddrOf(t.Dest.Addr()), Sport: wire.PortOf(t.Source.Port()),
		Dport: wire.PortOf(t.Dest.Port()), L4Proto: uint8(t.Protocol)}
}
