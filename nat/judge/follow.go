// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/packet"
)

// follower has a model make the choices that a datapath has made: it reads them from the frames
// that the datapath has sent. What they do not show is chosen by chance.
type follower struct {
	nat.Chance
	model   *nat.Model
	got     nat.Outcome // of the present frame
	evicted int         // SYNs
}

var _ nat.Choices = (*follower)(nil)

func newFollower(m *nat.Model) *follower { return &follower{Chance: m.Chance(), model: m} }

// want returns what should have become of a frame, of which the datapath made got.
func (f *follower) expected(in nat.Arrival, got nat.Outcome) nat.Outcome {
	f.got = got
	return f.model.Follow(in, f)
}

// frame returns what was sent, nil for nothing.
func (f *follower) frame() []byte {
	if len(f.got.Out) == 0 {
		return nil
	}
	return f.got.Out[0].Frame
}

// Provisional is true: a choice shows only with a packet that goes on.
func (*follower) Provisional() bool { return true }

// Shown reads the tuple of the frame that was sent. That of a drop answers its sender.
func (f *follower) ObservedTuple() (flow.Tuple, bool) {
	if f.got.Action == nat.Drop {
		return flow.Tuple{}, false
	}
	t, ok := nat.TupleOf(f.frame())
	if ok && t.Source.Addr().Is6() {
		t.Source, ok = f.model.Outside(t.Source)
	}
	return t, ok
}

// Addresses begins with the one that was chosen.
func (f *follower) Addresses(pool []netip.Addr) []netip.Addr {
	if t, ok := f.ObservedTuple(); ok {
		if i := slices.Index(pool, t.Source.Addr()); i >= 0 {
			return slices.Concat(pool[i:], pool[:i])
		}
	}
	return f.Chance.Addresses(pool)
}

// Ports begins with the one that was chosen.
func (f *follower) Ports(address netip.Addr, spans []flow.Ports) iter.Seq[uint16] {
	return func(yield func(uint16) bool) {
		t, ok := f.ObservedTuple()
		port := t.Source.Port()
		if ok && t.Source.Addr() == address && slices.ContainsFunc(spans, func(s flow.Ports) bool { return s.Contains(port) }) && !yield(port) {
			return
		}
		f.Chance.Ports(address, spans)(yield)
	}
}

// Backend finds the one that the frame was sent to. Those of dsr whose hardware addresses are not
// known look alike, and so do those of other modes whose packets wait for these.
func (f *follower) Backend(legal []nat.Candidate) int {
	t, ok := nat.TupleOf(f.frame())
	if f.got.Reason == nat.ReasonUnresolved {
		waits := func(c nat.Candidate) bool { return !c.Known && c.Address.Is4() }
		// Others than those whose packets cannot be left to the kernel were passed.
		if at := slices.IndexFunc(legal, func(c nat.Candidate) bool { return waits(c) && c.SourceTranslated }); at >= 0 {
			return at
		}
		return slices.IndexFunc(legal, waits)
	}
	if !ok {
		return -1
	}
	at := slices.IndexFunc(legal, func(c nat.Candidate) bool {
		switch {
		case !c.Direct:
			return t.Dest.Addr() == c.Address
		case c.Known:
			return c.MAC == packet.MAC(f.frame()[:6])
		}
		return f.got.Reason == nat.ReasonNoNeighbour
	})
	if at < 0 && f.got.Reason == nat.ReasonNoNeighbour { // of a tunnel
		at = slices.IndexFunc(legal, func(c nat.Candidate) bool { return !c.Known })
	}
	return at
}

// Identification reads that of the IPv4 header that was sent.
func (f *follower) Identification(tunnel bool) uint16 {
	if b := f.frame(); len(b) >= 34 && b[14]>>4 == 4 {
		return binary.BigEndian.Uint16(b[18:])
	}
	return f.Chance.Identification(tunnel)
}

// Cookie reads the sequence number of the answer that was sent.
func (f *follower) Cookie() uint32 {
	if t, ok := packet.Find[*packet.TCP](packet.Parse(f.frame())); ok {
		return t.Seq
	}
	return f.Chance.Cookie()
}

// Silent reports whether nothing was sent.
func (f *follower) Silent(r nat.Reason) bool { return f.frame() == nil && f.got.Reason == r }

// Ends reports whether that was the reason.
func (f *follower) Ends(r nat.Reason) bool { return f.got.Reason == r }

// Told reads the MTU of the ICMP error that was sent.
func (f *follower) AnswerMTU() int {
	if f.got.Reason != nat.ReasonTooBig {
		return 0
	}
	icmp, ok := packet.Find[*packet.ICMP](packet.Parse(f.frame()))
	if !ok {
		return 0
	}
	return int(icmp.MTU())
}

// synPlaces is how many SYNs without a session a datapath remembers at least.
const synPlaces = 1 << 20

// ForgetsSYN reports whether the answer to a SYN was nobody's. Each SYN has its place in a table by
// chance: so many of them may have met a later one there.
func (f *follower) ForgetsSYN(sent int) bool {
	if f.got.Reason != nat.ReasonNotOurs || f.evicted >= 5+sent*sent/synPlaces {
		return false
	}
	f.evicted++
	return true
}

// ForgetsCookie is false: how old a cookie may be is a matter of the kernel's clock, which nobody
// advances for a test.
func (*follower) ForgetsCookie(time.Duration) bool { return false }
