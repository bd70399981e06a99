// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// Limits of fragments waiting for their first fragment (RFC 4787 REQ-14, RFC 6146 §3.4). They bound
// the memory for a flood of fragments, and the share of one sender.
const (
	heldFrames    = 1024
	heldPerSender = 64
	heldLife      = 5 * time.Second // RFC 6146 §3.4: 2 s at least
)

// Intervals of the search for expired fragments and of log messages about failures.
const expireEvery, reportEvery = 50 * time.Millisecond, time.Second

// holder keeps fragments received before their first fragment. When the first fragment arrives, it
// runs them through the copy of the program (heldPrograms). Packets with an unresolved next hop wait
// for the neighbour table. Two other kinds pass the program at once and leave in fragments: packets
// that exceed the MTU after translation to IPv6, and packets that the kernel would not fragment. One
// goroutine owns the holder. It never waits for mu of the datapath, because changes take up to seconds.
type holder struct {
	d          *Datapath
	waiting    map[wire.FragmentKey][]heldFrame
	senders    map[wire.Addr]int
	frames     int
	unresolved map[netdev.Hop]*waitingPackets
	expired    time.Duration // monotonic time of the last call of expire

	failed   int // dropped packets that are not yet logged
	failure  error
	reported time.Duration // monotonic time of the last report

	cpu    int // The only CPU of the holder's thread.
	socket int
}

// heldPrograms is a copy of the program for held packets, with the tables and constants in force. Its
// working memory is its own: packets of the network may interrupt a run by user space, and would
// overwrite the plan in shared memory. The copy holds no packets. It is loaded before the programs
// that hold packets for it are attached, so that no packet waits for the verifier.
type heldPrograms struct {
	*ebpf.Collection
	switches wire.Switches
}

// runHeldBy sets the programs for held packets.
func (d *Datapath) runHeldBy(p *heldPrograms) {
	d.heldMu.Lock()
	defer d.heldMu.Unlock()
	d.held = p
}

func (p *heldPrograms) close() {
	if p != nil {
		p.Close()
	}
}

type heldFrame struct {
	at      time.Duration // monotonic time of reception
	ifindex uint32
	frame   []byte
	hop     netdev.Hop // Next hop that the packet has waited for; zero for none.
}

// handleUnresolved handles the packets from the programs until the ring is closed.
func (d *Datapath) handleUnresolved(ring *ringbuf.Reader) {
	h := &holder{d: d, waiting: map[wire.FragmentKey][]heldFrame{}, senders: map[wire.Addr]int{}, unresolved: map[netdev.Hop]*waitingPackets{}}
	if err := h.enterNamespace(); err != nil {
		d.opt.Log.Warn("packets to unresolved next hops, and fragments before their first one, are dropped", "error", err)
		return
	}
	defer unix.Close(h.socket)
	h.serve(ring, &d.t.Control.Values[0].Holding)
}

// heldRing is a ringbuf.Reader or its replacement in a test.
type heldRing interface {
	SetDeadline(time.Time)
	ReadInto(*ringbuf.Record) error
}

// serve reads the ring until it is closed. It writes the number of waiting fragments to holding.
func (h *holder) serve(ring heldRing, holding *uint32) {
	var r ringbuf.Record
	for {
		*holding = uint32(h.frames)
		wait, some := h.nextCheck(monotonic())
		if h.frames+h.failed > 0 {
			wait, some = min(wait, expireEvery), true
		}
		if some {
			ring.SetDeadline(time.Now().Add(wait))
		} else {
			ring.SetDeadline(time.Time{})
		}
		err := ring.ReadInto(&r)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil:
			h.d.opt.Log.Warn("packets to unresolved next hops, and fragments before their first one, are dropped", "error", err)
			return
		default:
			h.receive(r.RawSample)
		}
		if now := monotonic(); now-h.expired >= expireEvery { // also while the ring is busy
			h.expire(now)
		}
		h.resolve(monotonic())
		h.report()
	}
}

// enterNamespace locks the goroutine to a thread in the datapath's namespace and opens the packet socket.
func (h *holder) enterNamespace() (err error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(h.d.ns); err != nil {
		return err
	}
	if h.cpu, _, err = kernel.OneCPU(); err != nil {
		return err
	}
	h.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	return err
}

func monotonic() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// receive stores a packet that must wait, and sends one that must be fragmented. It sends the
// fragments of a datagram when its first fragment has arrived.
func (h *holder) receive(b []byte) {
	if len(b) < int(unsafe.Sizeof(wire.Held{})) {
		if len(b) >= int(unsafe.Sizeof(wire.FragmentKey{})) {
			h.release(*(*wire.FragmentKey)(unsafe.Pointer(&b[0])))
		}
		return
	}
	w := (*wire.Held)(unsafe.Pointer(&b[0]))
	f := heldFrame{at: time.Duration(w.At), ifindex: w.Ifindex, frame: append([]byte(nil), w.Frame[:min(int(w.Len&^wire.HeldUnsummed), len(w.Frame))]...)}
	if w.Len&wire.HeldUnsummed != 0 {
		fillSum(f.frame)
	}
	if monotonic()-f.at > heldLife { // sent to a daemon that has exited
		return
	}
	if w.Out != 0 {
		f.at = monotonic() // a request that waited for the start of the daemon is sent now
		h.enqueue(netdev.Hop{Ifindex: int(w.Out), Addr: wire.AddrFrom(w.NextHop, w.NextFamily == wire.Family6)}, f)
		return
	}
	if w.Key == (wire.FragmentKey{}) {
		h.send(f)
		return
	}
	if h.frames >= heldFrames || h.senders[w.Key.Saddr] >= heldPerSender {
		h.d.failedEvents.Add(1)
		return
	}
	h.waiting[w.Key] = append(h.waiting[w.Key], f)
	h.senders[w.Key.Saddr]++
	h.frames++
	// The first fragment may have arrived before holding was set.
	h.d.t.Control.Values[0].Holding = uint32(h.frames)
	var seen wire.Fragment
	if h.d.t.Maps["fragments"].Lookup(w.Key, &seen) == nil {
		h.release(w.Key)
	}
}

// release sends the fragments of a datagram.
func (h *holder) release(k wire.FragmentKey) {
	list := h.waiting[k]
	h.drop(k)
	h.send(list...)
}

// fillSum completes the checksum of a UDP or TCP segment in a frame. The field contains the sum of
// the pseudo-header (CHECKSUM_PARTIAL).
func fillSum(frame []byte) {
	protocol, l4, end := segmentIn(frame)
	at := l4 + 6
	if protocol == unix.IPPROTO_TCP {
		at = l4 + 16
	}
	if l4 == 0 || end > len(frame) || at+2 > end {
		return
	}
	sum := packet.Checksum(frame[l4:end])
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(frame[at:], sum)
}

// segmentIn returns the protocol of the segment in a frame and its bounds. l4 is 0 if there is none.
func segmentIn(frame []byte) (protocol byte, l4, end int) {
	const ip = 14
	if len(frame) < ip+20 {
		return 0, 0, 0
	}
	if frame[ip]>>4 == 4 {
		return frame[ip+9], ip + int(frame[ip]&15)*4, ip + int(binary.BigEndian.Uint16(frame[ip+2:]))
	}
	if len(frame) < ip+40 {
		return 0, 0, 0
	}
	protocol, l4, end = frame[ip+6], ip+40, ip+40+int(binary.BigEndian.Uint16(frame[ip+4:]))
	for protocol == unix.IPPROTO_HOPOPTS || protocol == unix.IPPROTO_ROUTING || protocol == unix.IPPROTO_DSTOPTS {
		if l4+2 > len(frame) {
			return 0, 0, 0
		}
		protocol, l4 = frame[l4], l4+8+8*int(frame[l4+1])
	}
	return protocol, l4, end
}

// drop removes a datagram's fragments.
func (h *holder) drop(k wire.FragmentKey) {
	n := len(h.waiting[k])
	h.frames -= n
	if h.senders[k.Saddr] -= n; h.senders[k.Saddr] == 0 {
		delete(h.senders, k.Saddr)
	}
	delete(h.waiting, k)
}

// expire drops a datagram when its oldest fragment has waited longer than heldLife.
func (h *holder) expire(now time.Duration) {
	h.expired = now
	for k, list := range h.waiting {
		if now-list[0].at > heldLife {
			h.drop(k)
		}
	}
}

// countLost counts dropped packets.
func (h *holder) countLost(packets int, err error) {
	h.d.failedEvents.Add(uint64(packets))
	h.failed, h.failure = h.failed+packets, err
}

// report logs dropped packets, at most once per reportEvery.
func (h *holder) report() {
	if now := monotonic(); h.failed > 0 && now-h.reported >= reportEvery {
		h.d.opt.Log.Warn("packets that the daemon held are dropped", "packets", h.failed, "error", h.failure)
		h.failed, h.reported = 0, now
	}
}

// skbMeta is struct __sk_buff.
type skbMeta struct {
	Len, PktType, Mark, Queue, Protocol, VlanPresent, VlanTCI, VlanProto, Priority, Ingress, Ifindex, TCIndex uint32
	_                                                                                                         [29]uint32
	GSOSegs                                                                                                   uint32
	_                                                                                                         [2]uint32
	GSOSize                                                                                                   uint32
	_                                                                                                         [3]uint32
}

const tcRedirect = 7 // TC_ACT_REDIRECT

// send sends packets one by one.
func (h *holder) send(list ...heldFrame) {
	h.d.heldMu.Lock()
	defer h.d.heldMu.Unlock()
	for _, f := range list {
		if err := h.forward(f); err != nil {
			h.countLost(1, err)
		}
	}
}

// forward runs a packet through the program and sends the result.
func (h *holder) forward(f heldFrame) error {
	o := &ebpf.RunOptions{Data: f.frame, DataOut: make([]byte, len(f.frame)+256), Context: skbMeta{Ingress: f.ifindex, Ifindex: f.ifindex}}
	verdict, err := h.d.held.Programs["sluice_tc"].Run(o)
	if err != nil {
		return fmt.Errorf("run a held packet: %w", err)
	}
	var works []wire.Work
	if err := h.d.held.Maps["works"].Lookup(uint32(0), &works); err != nil {
		return fmt.Errorf("map works: %w", err)
	}
	if hop := nextHopOf(&works[h.cpu]); works[h.cpu].Plan.Reason == wire.ReasonUnresolved && hop != f.hop {
		f.at = monotonic() // the route has changed
		h.enqueue(hop, f)
		return nil
	}
	if verdict != tcRedirect {
		return nil // the program has counted the drop
	}
	by, frames := f.ifindex, [][]byte{o.DataOut} // the output is an answer to the sender
	if works[h.cpu].Plan.Action == wire.ActionForward {
		out, err := h.d.t.HopOf(&works[h.cpu])
		if err != nil {
			return err
		}
		if frames, err = fragments(f.frame, o.DataOut, int(out.Mtu), int(h.d.held.switches.LowestIPv6MTU)); err != nil {
			return err
		}
		by = out.Ifindex
	}
	to := &unix.SockaddrLinklayer{Ifindex: int(by), Halen: 6}
	bare, err := h.d.t.Bare(by)
	if err != nil {
		return err
	}
	for _, b := range frames {
		if bare {
			to.Protocol = binary.NativeEndian.Uint16(b[12:])
			b = b[14:]
		}
		if err := unix.Sendto(h.socket, b, 0, to); err != nil {
			return fmt.Errorf("send a held packet by interface %d: %w", by, err)
		}
	}
	return nil
}

// fragments splits a translated packet that exceeds the MTU. It handles IPv4 packets without DF,
// and IPv6 packets translated to IPv4 without DF. After translation to IPv6, the fragments also fit
// lowest (config.LowestIPv6MTU), so that every path carries them (RFC 7915 §4.1). Fragments keep the IPv4
// identification. A tunnel header with DF has no identification for fragments (RFC 2003 §3.1), so
// its fragments get a random one.
func fragments(was, is []byte, mtu, lowest int) ([][]byte, error) {
	const ethernet, ipv4, fragmentHeader = 14, 0x0800, 40 + 8
	if len(is) < ethernet+20 {
		return [][]byte{is}, nil
	}
	if binary.BigEndian.Uint16(was[12:]) != ipv4 {
		if binary.BigEndian.Uint16(is[12:]) != ipv4 || int(binary.BigEndian.Uint16(is[ethernet+2:])) <= mtu {
			return [][]byte{is}, nil
		}
		return packet.Fragments(is, (mtu-int(is[ethernet]&15)*4)&^7, uint32(binary.BigEndian.Uint16(is[ethernet+4:])))
	}
	id := uint32(binary.BigEndian.Uint16(was[ethernet+4:]))
	if binary.BigEndian.Uint16(is[12:]) == ipv4 {
		if int(binary.BigEndian.Uint16(is[ethernet+2:])) <= mtu {
			return [][]byte{is}, nil
		}
		if is[ethernet+6]&0x40 != 0 {
			is[ethernet+6] &^= 0x40
			id = rand.Uint32()
		}
		return packet.Fragments(is, (mtu-int(is[ethernet]&15)*4)&^7, id)
	}
	most := mtu
	if lowest > 0 {
		most = min(most, lowest)
	}
	if len(is)-ethernet <= most {
		return [][]byte{is}, nil
	}
	size := min(max(lowest, 1280), mtu) - fragmentHeader
	return packet.Fragments(is, size&^7, id)
}
