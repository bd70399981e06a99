// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// busyRing always has a record until done. The records produce no packet.
type busyRing func() (done bool)

func (busyRing) SetDeadline(time.Time) {}

func (done busyRing) ReadInto(r *ringbuf.Record) error {
	if done() {
		return os.ErrClosed
	}
	r.RawSample = nil
	return nil
}

// TestHeldExpireWhileBusy: held packets expire in time under any number of new records.
func TestHeldExpireWhileBusy(t *testing.T) {
	k := wire.FragmentKey{Id: 1}
	h := &holder{d: &Datapath{}, waiting: map[wire.FragmentKey][]heldFrame{k: {{at: monotonic() - heldLife - time.Second}}},
		senders: map[wire.Addr]int{k.Saddr: 1}, frames: 1}
	h.expired = monotonic()
	var holding uint32
	patience := time.Now().Add(10 * time.Second)
	h.serve(busyRing(func() bool { return h.frames == 0 || time.Now().After(patience) }), &holding)
	if h.frames != 0 || holding != 0 || len(h.waiting)+len(h.senders) != 0 {
		t.Errorf("%d fragments wait still, of %d senders; the programs are told of %d", h.frames, len(h.senders), holding)
	}
}

// TestHeldFailEachForItself: a packet that cannot be sent does not affect other held packets. The log has one line for all
// failures.
func TestHeldFailEachForItself(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	works, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: uint32(binary.Size(wire.Work{})), MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer works.Close()
	var log strings.Builder
	d := &Datapath{opt: Options{Log: slog.New(slog.NewTextHandler(&log, nil))},
		held: &heldPrograms{Collection: &ebpf.Collection{Programs: map[string]*ebpf.Program{"sluice_tc": p}, Maps: map[string]*ebpf.Map{"works": works}}}}
	h := &holder{d: d}
	good, bad := heldFrame{ifindex: 1, frame: make([]byte, 64)}, heldFrame{ifindex: 1, frame: make([]byte, 1)} // shorter than Ethernet's header
	for range 3 {
		h.send(bad, good, bad)
	}
	if h.failed != 6 || d.failedEvents.Load() != 6 {
		t.Errorf("6 packets failed, and %d (%d) were counted", h.failed, d.failedEvents.Load())
	}
	h.report()
	h.countLost(1, h.failure)
	h.reported += time.Hour // whatever the test has taken
	h.report()              // too soon
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "packets=6") {
		t.Errorf("the log has %d lines: %s", n, &log)
	}
	h.reported -= time.Hour + reportEvery
	if h.report(); !strings.Contains(log.String(), "packets=1 ") {
		t.Errorf("the log never tells of the last one: %s", &log)
	}
}

// deadlineRing keeps the deadline of its only read.
type deadlineRing struct{ late bool }

func (r *deadlineRing) SetDeadline(t time.Time) { r.late = t.IsZero() || t.After(time.Now()) }

func (*deadlineRing) ReadInto(*ringbuf.Record) error { return os.ErrClosed }

// TestNextHopsAreLookedAtAtOnce: no later deadline delays the check of a next hop.
func TestNextHopsAreLookedAtAtOnce(t *testing.T) {
	for name, h := range map[string]*holder{
		"quiet":          {},
		"fragments wait": {frames: 1},
	} {
		h.unresolved = map[netdev.Hop]*waitingPackets{{Ifindex: 1}: {nextCheck: 1}}
		var ring deadlineRing
		if h.serve(&ring, new(uint32)); ring.late {
			t.Errorf("%s: the next hop is not looked at now", name)
		}
	}
}

// TestPiecesFitTheLink fragments packets that stay IPv4. A packet that fits is not changed. A fragment is cut into smaller
// fragments. Fragments of a tunnel packet get an identification, which the tunnel's header did not have.
func TestPiecesFitTheLink(t *testing.T) {
	const eth, udp = "eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/", "/udp(sport=1,dport=2)/data(1400)"
	was := packet.MustText(eth + "ip4(src=10.0.2.2,dst=192.0.2.1,id=9)" + udp).Build()
	for _, c := range []struct {
		name, is string
		mtu      int
		pieces   int
		tunnel   bool
	}{
		{"it fits", "ip4(src=198.51.100.1,dst=192.0.2.1,id=9)" + udp, 1428, 1, false},
		{"one byte too large", "ip4(src=198.51.100.1,dst=192.0.2.1,id=9)" + udp, 1427, 2, false},
		{"a small link", "ip4(src=198.51.100.1,dst=192.0.2.1,id=9)" + udp, 68, 30, false},
		{"options", "ip4(src=198.51.100.1,dst=192.0.2.1,id=9,opts=01010101)" + udp, 1428, 2, false},
		{"a fragment", "ip4(src=198.51.100.1,dst=192.0.2.1,id=9,off=800,mf)/data(1400)", 1400, 2, false},
		{"a tunnel", "ip4(src=10.0.1.1,dst=10.0.2.9,df)/ip4(src=10.0.2.2,dst=192.0.2.1,id=9)" + udp, 1440, 2, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			is := packet.MustText(eth + c.is).Build()
			whole := append([]byte(nil), is...)
			pieces, err := fragments(was, is, c.mtu, 0)
			if err != nil || len(pieces) != c.pieces {
				t.Fatalf("%d pieces, want %d: %v", len(pieces), c.pieces, err)
			}
			first, _ := packet.Find[*packet.IPv4](packet.Parse(whole))
			at := int(first.Offset)
			var got []byte
			for i, b := range pieces {
				ip, _ := packet.Find[*packet.IPv4](packet.Parse(b))
				header := 14 + int(b[14]&15)*4
				if len(b)-14 > c.mtu || int(ip.Offset) != at || ip.DF || ip.MF != (first.MF || i < len(pieces)-1) || packet.Checksum(b[14:header]) != 0 {
					t.Errorf("piece %d: %s", i, packet.Parse(b))
				}
				if numbers, _ := packet.Find[*packet.IPv4](packet.Parse(pieces[0])); ip.ID != numbers.ID || !c.tunnel && ip.ID != 9 {
					t.Errorf("piece %d has identification %d", i, ip.ID)
				}
				got = append(got, b[header:]...)
				at += len(b) - header
			}
			if want := whole[14+int(whole[14]&15)*4:]; string(got) != string(want) {
				t.Errorf("put together %x, want %x", got, want)
			}
		})
	}
}

// TestPiecesOfIPv6: only packets that were translated from IPv6 and have no DF in IPv4 are fragmented (RFC 7915 §5.1,
// §5.1.1).
func TestPiecesOfIPv6(t *testing.T) {
	const eth = "eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/"
	was := packet.MustText(eth + "ip6(src=fd00:2::2,dst=64:ff9b::c612:1)/udp(sport=1,dport=2)/data(1200)").Build()
	for is, want := range map[string]int{
		"ip4(src=198.51.100.1,dst=192.0.2.1,id=9)/udp(sport=1,dport=2)/data(1200)": 2,
		"ip4(src=198.51.100.1,dst=192.0.2.1,id=9)/udp(sport=1,dport=2)/data(972)":  1,
		"ip4(src=198.51.100.1,dst=192.0.2.1,id=9,off=1200,mf)/data(1200)":          2,
		"ip6(src=fd00:2::2,dst=fd00:2::3)/udp(sport=1,dport=2)/data(1200)":         1,
	} {
		pieces, err := fragments(was, packet.MustText(eth+is).Build(), 1000, 0)
		if err != nil || len(pieces) != want {
			t.Errorf("%s: %d pieces, want %d: %v", is, len(pieces), want, err)
		}
		for _, b := range pieces {
			if ip, ok := packet.Find[*packet.IPv4](packet.Parse(b)); ok && (ip.ID != 9 || len(b) > 1014) {
				t.Errorf("%s: piece %s", is, packet.Parse(b))
			}
		}
	}
}
