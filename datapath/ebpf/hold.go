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

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// Bounds of the fragments that wait for their first one (RFC 4787 REQ-14, RFC 6146
// §3.4): a flood of them costs this much memory and no more, and one sender cannot
// take it all.
const (
	heldFrames    = 1024
	heldPerSender = 64
	heldLife      = 5 * time.Second // RFC 6146 §3.4: 2 s at least
)

// How often the held fragments are looked through, and the log tells of what failed.
const expireEvery, reportEvery = 50 * time.Millisecond, time.Second

// The programs are loaded this long after a change, before a packet needs them: it takes up to seconds, in which the
// sender would give up. Changes often come several at a time.
const prepareAfter = time.Second

// holder keeps fragments that came before their first one, and sends them through
// a program of its own when it has come. What is too large for IPv6 goes through it at
// once, and on in fragments, and so does what the kernel would not fragment. Translated
// packets that the kernel would not take wait for their next hop. It belongs to one goroutine.
type holder struct {
	d          *Datapath
	waiting    map[wire.FragmentKey][]heldFrame
	senders    map[wire.Addr]int
	frames     int
	due        []wire.FragmentKey // whose first fragment has come
	large      []heldFrame        // to be fragmented
	unresolved map[netdev.Hop]*unresolved
	expired    time.Duration // of the monotonic clock: when expire last ran

	changed time.Duration // of the monotonic clock: when the programs may have changed; 0: they are loaded

	failed   int // packets that could not be sent on and that the log does not tell of yet
	failure  error
	reported time.Duration // of the monotonic clock

	// The program runs on the tables in force, in working memory of its own, on
	// one CPU: nobody else's packet comes between a run and its plan.
	programs *ebpf.Collection
	switches wire.Switches
	tables   *table.Tables
	cpu      int
	socket   int
	loading  <-chan loading // nil: nothing is being loaded
}

type heldFrame struct {
	at      time.Duration // of the monotonic clock
	ifindex uint32
	frame   []byte
}

// hold handles the fragments that the programs hand over, until the ring is closed. It is told by
// flushing the ring that the programs have changed.
func (d *Datapath) hold(ring *ringbuf.Reader) {
	h := &holder{d: d, changed: monotonic(), waiting: map[wire.FragmentKey][]heldFrame{}, senders: map[wire.Addr]int{}, unresolved: map[netdev.Hop]*unresolved{}}
	if err := h.enter(); err != nil {
		d.opt.Log.Warn("fragments that come before their first one are dropped", "error", err)
		return
	}
	defer h.leave()
	h.serve(ring, &d.t.Control.Values[0].Holding)
}

// heldRing is a ringbuf.Reader, or what stands for one in a test.
type heldRing interface {
	SetDeadline(time.Time)
	ReadInto(*ringbuf.Record) error
}

// serve works off the ring until it is closed, and says how many fragments wait.
func (h *holder) serve(ring heldRing, holding *uint32) {
	var r ringbuf.Record
	for {
		*holding = uint32(h.frames)
		wait, some := h.nextLook(monotonic())
		if h.frames+len(h.large)+h.failed > 0 {
			wait, some = min(wait, expireEvery), true
		}
		if h.changed > 0 {
			wait, some = min(wait, prepareAfter), true
		}
		if some {
			ring.SetDeadline(time.Now().Add(wait))
		} else {
			ring.SetDeadline(time.Time{})
		}
		err := ring.ReadInto(&r)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, ringbuf.ErrFlushed):
			h.changed = monotonic()
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil:
			h.d.opt.Log.Warn("fragments that come before their first one are dropped", "error", err)
			return
		default:
			h.take(r.RawSample)
		}
		if now := monotonic(); now-h.expired >= expireEvery { // however busy the ring is
			h.expire(now)
		}
		h.release()
		h.resolve(monotonic())
		if now := monotonic(); h.changed > 0 && now-h.changed >= prepareAfter {
			if _, err := h.ready(); err != nil { // release says so when a packet needs them
				h.changed = now
			}
		}
		h.report()
	}
}

// enter gives the goroutine a thread of its own in the datapath's namespace.
func (h *holder) enter() (err error) {
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

// leave gives up what the goroutine has, and waits for what is being loaded.
func (h *holder) leave() {
	if h.loading != nil {
		if l := <-h.loading; l.err == nil {
			l.programs.Close()
		}
	}
	h.forget()
	unix.Close(h.socket)
}

func (h *holder) forget() {
	if h.programs != nil {
		h.programs.Close()
		h.programs = nil
	}
}

func monotonic() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// take keeps a fragment, or notes that a first one has come.
func (h *holder) take(b []byte) {
	if len(b) < int(unsafe.Sizeof(wire.Held{})) {
		if len(b) >= int(unsafe.Sizeof(wire.FragmentKey{})) {
			h.due = append(h.due, *(*wire.FragmentKey)(unsafe.Pointer(&b[0])))
		}
		return
	}
	w := (*wire.Held)(unsafe.Pointer(&b[0]))
	f := heldFrame{at: time.Duration(w.At), ifindex: w.Ifindex, frame: append([]byte(nil), w.Frame[:min(int(w.Len&^wire.HeldUnsummed), len(w.Frame))]...)}
	if w.Len&wire.HeldUnsummed != 0 {
		fillSum(f.frame)
	}
	if monotonic()-f.at > heldLife { // handed over to a daemon that is gone
		return
	}
	if w.Out != 0 {
		h.await(netdev.Hop{Ifindex: int(w.Out), Addr: wire.AddrFrom(w.NextHop, w.NextFamily == wire.Family6)}, f)
		return
	}
	if w.Key == (wire.FragmentKey{}) {
		if len(h.large) >= heldFrames {
			h.d.missed.Add(1)
			return
		}
		h.large = append(h.large, f)
		return
	}
	if h.frames >= heldFrames || h.senders[w.Key.Saddr] >= heldPerSender {
		h.d.missed.Add(1)
		return
	}
	h.waiting[w.Key] = append(h.waiting[w.Key], f)
	h.senders[w.Key.Saddr]++
	h.frames++
	// The first one may have come while nobody asked for it.
	h.d.t.Control.Values[0].Holding = uint32(h.frames)
	var seen wire.Fragment
	if h.d.t.Maps["fragments"].Lookup(w.Key, &seen) == nil {
		h.due = append(h.due, w.Key)
	}
}

// fillSum completes the checksum of the UDP or TCP segment in an IPv4 frame, where the sum
// of its pseudo-header stands (CHECKSUM_PARTIAL).
func fillSum(frame []byte) {
	const ip = 14
	if len(frame) < ip+20 {
		return
	}
	l4, end := ip+int(frame[ip]&15)*4, ip+int(binary.BigEndian.Uint16(frame[ip+2:]))
	at := l4 + 6
	if frame[ip+9] == unix.IPPROTO_TCP {
		at = l4 + 16
	}
	if end > len(frame) || at+2 > end {
		return
	}
	sum := packet.Checksum(frame[l4:end])
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(frame[at:], sum)
}

// drop lets go of a datagram's fragments.
func (h *holder) drop(k wire.FragmentKey) {
	n := len(h.waiting[k])
	h.frames -= n
	if h.senders[k.Saddr] -= n; h.senders[k.Saddr] == 0 {
		delete(h.senders, k.Saddr)
	}
	delete(h.waiting, k)
}

// expire gives up the datagrams whose oldest fragment has waited long enough.
func (h *holder) expire(now time.Duration) {
	h.expired = now
	for k, list := range h.waiting {
		if now-list[0].at > heldLife {
			h.drop(k)
		}
	}
}

// loading is the outcome of loading programs for these tables.
type loading struct {
	programs *ebpf.Collection
	switches wire.Switches
	tables   *table.Tables
	err      error
}

// ready tells whether the programs are those of the tables in force, and has them loaded where they are not. Only
// packets that need them wait for that: others wait for a next hop meanwhile.
func (h *holder) ready() (bool, error) {
	select {
	case l := <-h.loading:
		h.loading = nil
		if l.err != nil {
			return false, l.err
		}
		h.forget()
		h.programs, h.switches, h.tables = l.programs, l.switches, l.tables
	default:
	}
	if !h.d.mu.TryLock() {
		return false, nil
	}
	defer h.d.mu.Unlock()
	if h.d.t == nil || h.d.inForce == nil || h.loaded() {
		h.changed = 0
		return true, nil
	}
	if h.loading != nil {
		return false, nil
	}
	l := loading{switches: h.d.switches, tables: h.d.t}
	p, err := l.tables.Prepare(l.switches, false, "sluice_tc")
	if err != nil {
		return false, err
	}
	done := make(chan loading, 1)
	h.loading = done
	go func() {
		l.programs, l.err = p.Load()
		done <- l
	}()
	return false, nil
}

func (h *holder) loaded() bool {
	return h.programs != nil && h.switches == h.d.switches && h.tables == h.d.t
}

// release sends on the fragments that are due, and what is to be fragmented. What
// cannot go now, because the datapath is being changed, goes the next time.
func (h *holder) release() {
	if len(h.large)+len(h.due) == 0 {
		return
	}
	ok, err := h.ready()
	if !ok && err == nil {
		return
	}
	if len(h.large) > 0 && h.try(h.large, err) {
		h.large = h.large[:0]
	}
	for len(h.due) > 0 {
		k := h.due[0]
		if list := h.waiting[k]; len(list) > 0 {
			if !h.try(list, err) {
				return
			}
			h.drop(k)
		}
		h.due = h.due[1:]
	}
}

// try sends packets on, or loses them where the programs do not load; false when that has to wait.
func (h *holder) try(list []heldFrame, unloaded error) bool {
	if unloaded != nil {
		h.lose(len(list), unloaded)
		return true
	}
	if !h.d.mu.TryLock() {
		return false
	}
	defer h.d.mu.Unlock()
	if h.d.t == nil || h.d.inForce == nil {
		return true
	}
	if !h.loaded() {
		return false
	}
	h.send(list)
	return true
}

// lose counts packets that could not be sent on.
func (h *holder) lose(packets int, err error) {
	h.d.missed.Add(uint64(packets))
	h.failed, h.failure = h.failed+packets, err
}

// report tells the log of what was lost, once in a while.
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

// send sends packets on, each for itself.
func (h *holder) send(list []heldFrame) {
	for _, f := range list {
		if err := h.forward(f); err != nil {
			h.lose(1, err)
		}
	}
}

// forward runs a packet through the program and sends what that makes of it.
func (h *holder) forward(f heldFrame) error {
	o := &ebpf.RunOptions{Data: f.frame, DataOut: make([]byte, len(f.frame)+256), Context: skbMeta{Ingress: f.ifindex, Ifindex: f.ifindex}}
	verdict, err := h.programs.Programs["sluice_tc"].Run(o)
	if err != nil {
		return fmt.Errorf("run a held packet: %w", err)
	}
	if verdict != tcRedirect {
		return nil // counted with its reason
	}
	var works []wire.Work
	if err := h.programs.Maps["works"].Lookup(uint32(0), &works); err != nil {
		return fmt.Errorf("map works: %w", err)
	}
	out, err := h.d.t.HopOf(&works[h.cpu])
	if err != nil {
		return err
	}
	frames, err := h.pieces(f.frame, o.DataOut, int(out.Mtu))
	if err != nil {
		return err
	}
	to := &unix.SockaddrLinklayer{Ifindex: int(out.Ifindex), Halen: 6}
	bare, err := h.d.t.Bare(out.Ifindex)
	if err != nil {
		return err
	}
	for _, b := range frames {
		if bare {
			to.Protocol = binary.NativeEndian.Uint16(b[12:])
			b = b[14:]
		}
		if err := unix.Sendto(h.socket, b, 0, to); err != nil {
			return fmt.Errorf("send a held packet by interface %d: %w", out.Ifindex, err)
		}
	}
	return nil
}

// pieces cuts what became of an IPv6 packet and has no DF, or of an IPv4 packet without DF, and is too large for a link of that
// MTU, or for the path in IPv6, into fragments; in IPv6 those that every path carries (RFC
// 7915 §4.1). They keep the identification of the IPv4 packet, but for a tunnel's, whose
// header has none because of its DF: that was for packets that are not fragmented (RFC
// 2003 §3.1).
func (h *holder) pieces(was, is []byte, mtu int) ([][]byte, error) {
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
	lowest := int(h.switches.LowestIPv6MTU)
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
