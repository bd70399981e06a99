// SPDX-License-Identifier: Apache-2.0

// Package replay shows the effect of a ruleset on a packet without sending the packet on the host's network. It
// creates a temporary network namespace with interfaces, addresses, routes and settings like the host's, and loads
// the ruleset there. It sends the packet in and reports the matching rules and the resulting packets. The host's own
// tables never process the packet.
package replay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath/nft/nfnl"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/packet"
)

// Question is the input of a replay.
type Question struct {
	Home    int // descriptor of the host's network namespace
	Ruleset *ruleset.Ruleset
	// Host holds all rules of the host, used in place of Ruleset; nil for none.
	Host *Rules
	// In is the input interface. If it is empty, the interface of the route to Source is used.
	In     string
	Source netip.Addr
	// Packet from the IP header on.
	Packet packet.Packet
	// Entry is an existing connection tracking entry; nil for none.
	Entry *conntrack.Entry
}

// Answer is the result of a replay.
type Answer struct {
	In    string // Interface.
	Steps []Step // in order
	// Sent lists the outgoing packets with their interface: the packet itself, its fragments, or an answer by a rule
	// or the kernel.
	Sent []Sent
	// Routed is the packet at its routing decision; invalid if it was not reached. Local reports that the destination
	// is the host itself.
	Routed flow.Tuple
	Local  bool
	// Hop is the next hop of Routed on the interface HopOut, if no mark selects another route. NoRoute is the reason
	// if there is none.
	Hop     netip.Addr
	HopOut  string
	NoRoute error
	// Entry is the resulting connection tracking entry; nil for none.
	Entry   *conntrack.Entry
	Omitted []string // differences from the host
}

// Step is a rule that matched.
type Step struct {
	Chain   ruleset.ID
	Rule    ruleset.Rule
	Owner   string // owner of the fragment with the rule
	Verdict ruleset.Verdict
	// Goes reports that the rule had no verdict, so the next rule follows.
	Goes bool
}

// Sent is an outgoing packet.
type Sent struct {
	Out    string
	Packet packet.Packet
}

// Names of additional chains: the start of tracing, and the points on the packet's path that they mark.
const (
	chainStart  = "explain-start"
	chainRouted = "explain-routed"
	chainLocal  = "explain-local"
)

const verdictContinue = -1 // NFT_CONTINUE

// Priorities before and after every chain of Sluice. Connection tracking confirms at the largest number.
const first, last = -500, 1<<31 - 1 - 2

// points returns the additional chains.
func points(in string, of netip.Addr, ingress bool) *ruleset.Fragment {
	family := ruleset.IP6
	if of.Is4() {
		family = ruleset.IP
	}
	start := []ruleset.Rule{ruleset.NewRule().Trace().Rule("")}
	chain := func(table ruleset.Family, name, point, device string, priority int32, rules ...ruleset.Rule) *ruleset.Chain {
		return &ruleset.Chain{ID: ruleset.ID{Table: table, Name: name},
			Hook: &ruleset.Hook{Type: "filter", Point: point, Priority: priority, Device: device}, Rules: rules}
	}
	f := &ruleset.Fragment{Chains: []*ruleset.Chain{
		chain(ruleset.Inet, chainStart, "prerouting", "", first, start...), chain(ruleset.Inet, chainRouted, "prerouting", "", last),
		chain(ruleset.Inet, chainLocal, "input", "", last),
	}}
	if ingress {
		f.Chains = append(f.Chains, chain(ruleset.Netdev, chainStart, "ingress", in, first,
			ruleset.NewRule().ForFamily(ruleset.Netdev, family).Trace().Rule(""))) // a condition on the marker excludes other frames
	}
	return f
}

// turn serializes replays, because each holds namespaces with all interfaces of the host.
var turn = make(chan struct{}, 1)

// Run replays a packet.
func Run(ctx context.Context, q Question) (a *Answer, err error) {
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("replay: waiting for another one to end: %w", ctx.Err())
	}
	err = inNamespaces(q.Home, func(h *host, far int) error {
		a, err = run(ctx, q, h, far)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return a, nil
}

func run(ctx context.Context, q Question, h *host, far int) (*Answer, error) {
	if err := h.build(ctx, far); err != nil {
		return nil, err
	}
	a := &Answer{Omitted: h.omitted}
	in, err := h.inputInterface(q, a)
	if err != nil {
		return nil, err
	}
	conn, err := nfnl.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ingress := slices.ContainsFunc(q.Ruleset.Fragments, func(f *ruleset.Fragment) bool {
		return slices.ContainsFunc(f.Chains, func(c *ruleset.Chain) bool { return c.Table == ruleset.Netdev && c.Hook != nil })
	})
	rules := &ruleset.Ruleset{Fragments: append(slices.Clone(q.Ruleset.Fragments), points(in.name, q.Source, ingress))}
	if err := conn.Apply(ruleset.Diff(nil, rules)); err != nil {
		return nil, err
	}
	if q.Host != nil {
		a.Omitted = append(a.Omitted, q.Host.load(ctx)...)
	}
	_ = write(quiet[4:])
	tracked, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	defer tracked.Close()
	if q.Entry != nil {
		if _, err := tracked.InsertNAT(ctx, []conntrack.Entry{*q.Entry}); err != nil {
			return nil, err
		}
	}
	traces, err := nfnl.OpenTrace()
	if err != nil {
		return nil, err
	}
	defer traces.Close()
	if err := h.passPacket(in, far, q.Packet, a); err != nil {
		return nil, err
	}
	list, err := traces.Read()
	if err != nil {
		return nil, err
	}
	if err := a.addTraces(list, conn, rules); err != nil {
		return nil, err
	}
	if q.Host != nil {
		q.Host.addMatched(ctx, list, a)
	}
	a.route(in)
	err = tracked.Dump(ctx, nil, func(e *conntrack.Entry) error {
		one := *e
		a.Entry = &one
		return nil
	})
	return a, err
}

// inputInterface returns the input interface of the packet.
func (h *host) inputInterface(q Question, a *Answer) (*link, error) {
	name := q.In
	if name == "" {
		routes, err := netlink.RouteGet(q.Source.AsSlice())
		if err != nil || len(routes) == 0 {
			return nil, fmt.Errorf("no route to the source %s: name the interface that the packet arrives on with --in (%w)", q.Source, err)
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			return nil, err
		}
		if name = l.Attrs().Name; name == "lo" {
			return nil, fmt.Errorf("the source %s is an address of this host: explain is about packets that arrive; name the interface", q.Source)
		}
	}
	at := slices.IndexFunc(h.links, func(l link) bool { return l.name == name })
	if at < 0 {
		return nil, fmt.Errorf("interface %s: no interface has this name", name)
	}
	l := &h.links[at]
	if m := slices.IndexFunc(h.links, func(m link) bool { return m.real == l.master }); m >= 0 && l.master != 0 {
		a.Omitted = append(a.Omitted, fmt.Sprintf("%s is a port of %s: the packet is taken to arrive there", l.name, h.links[m].name))
		l = &h.links[m]
	}
	switch {
	case !l.up:
		return nil, fmt.Errorf("interface %s is down", l.name)
	case l.farName == "":
		return nil, fmt.Errorf("interface %s is one of the kernel's own tunnels, which cannot be replayed", l.name)
	}
	for _, o := range h.links {
		if o.vrf {
			a.Omitted = append(a.Omitted, o.name+" belongs to a VRF: its routing table is left out")
		}
	}
	a.In = l.name
	return l, nil
}

// marker is the type of a frame reserved for experiments by IEEE 802. After its arrival, all earlier frames have been
// processed.
const marker = 0x88b5

// replayTimeout bounds the time of a packet in the scratch namespace.
const replayTimeout = 5 * time.Second

// passPacket sends the packet in and collects the outgoing packets. The kernel processes frames that one CPU sends to a
// veth pair in order and on that CPU.
func (h *host) passPacket(in *link, far int, p packet.Packet, a *Answer) error {
	_, restore, err := kernel.OneCPU()
	if err != nil {
		return err
	}
	defer restore()
	watch, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	defer unix.Close(watch)
	tv := unix.NsecToTimeval(int64(replayTimeout))
	if err := unix.SetsockoptTimeval(watch, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	if err := inject(in, far, p); err != nil {
		return err
	}
	names := map[int]string{}
	for _, l := range h.links {
		names[l.index] = l.name
	}
	buf := make([]byte, 1<<16)
	for deadline := time.Now().Add(replayTimeout); ; {
		n, from, err := unix.Recvfrom(watch, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			return fmt.Errorf("the packet was not processed in the scratch namespace within %s", replayTimeout)
		}
		if err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		l, ok := from.(*unix.SockaddrLinklayer)
		if !ok {
			continue
		}
		if l.Protocol == htons(marker) {
			return nil
		}
		if out := names[l.Ifindex]; l.Pkttype == unix.PACKET_OUTGOING && out != "" {
			a.Sent = append(a.Sent, Sent{out, packet.Parse(buf[:n])})
		}
	}
}

// inject sends the packet and the marker from the far end of a veth pair.
func inject(in *link, far int, p packet.Packet) error {
	here, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(here)
	if err := unix.Setns(far, unix.CLONE_NEWNET); err != nil {
		return err
	}
	defer unix.Setns(here, unix.CLONE_NEWNET)
	end, err := netlink.LinkByName(in.farName)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	defer unix.Close(fd)
	// The queueing discipline of a new interface may not be ready yet. Frames that bypass it are sent at once.
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	ether := &packet.Ethernet{Src: packet.MAC{2, 0, 0, 0, 0, 1}, Dst: packet.MAC(in.mac)}
	mark := &packet.Ethernet{Src: ether.Src, Dst: ether.Dst, Type: packet.Force(marker)}
	for _, frame := range [][]byte{append(packet.Packet{ether}, p...).Build(), packet.Packet{mark, &packet.Data{Bytes: make([]byte, 46)}}.Build()} {
		if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: end.Attrs().Index}); err != nil {
			return fmt.Errorf("send on %s: %w", in.farName, err)
		}
	}
	return nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }
