// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// choiceFollower makes the model repeat the choices of a datapath. It reads the choices from the frames
// that the datapath sent. It makes random choices where the frames show none.
type choiceFollower struct {
	model.Chance
	model   *model.Model
	got     model.Outcome // Outcome of the present frame.
	evicted int           // Evicted SYNs.
}

var _ model.Choices = (*choiceFollower)(nil)

func newFollower(m *model.Model) *choiceFollower {
	return &choiceFollower{Chance: m.Chance(), model: m}
}

// expectedOutcome returns the outcome that the model permits for a frame. The datapath's outcome is got.
func (f *choiceFollower) expectedOutcome(in model.Arrival, got model.Outcome) model.Outcome {
	f.got = got
	return f.model.Follow(in, f)
}

// frame returns the sent frame, nil for none.
func (f *choiceFollower) frame() []byte {
	if len(f.got.Out) == 0 {
		return nil
	}
	return f.got.Out[0].Frame
}

// Provisional returns true: only a forwarded packet shows a choice.
func (*choiceFollower) Provisional() bool { return true }

// ObservedTuple returns the tuple of the sent frame, or the planned one. The frame of a drop is an
// answer to the sender and shows no tuple.
func (f *choiceFollower) ObservedTuple() (flow.Tuple, bool) {
	t, ok := f.got.Planned.Tuple, f.got.Planned.Gateway.IsValid()
	if !ok && f.got.Action != model.Drop {
		t, ok = model.TupleOf(f.frame())
	}
	if ok && t.Source.Addr().Is6() {
		t.Source, ok = f.model.Outside(t.Source)
	}
	return t, ok
}

// Addresses returns the observed address first.
func (f *choiceFollower) Addresses(pool []netip.Addr) []netip.Addr {
	if t, ok := f.ObservedTuple(); ok {
		if i := slices.Index(pool, t.Source.Addr()); i >= 0 {
			return slices.Concat(pool[i:], pool[:i])
		}
	}
	return f.Chance.Addresses(pool)
}

// Ports yields the observed port first.
func (f *choiceFollower) Ports(address netip.Addr, spans []flow.Ports) iter.Seq[uint16] {
	return func(yield func(uint16) bool) {
		t, ok := f.ObservedTuple()
		port := t.Source.Port()
		if ok && t.Source.Addr() == address && slices.ContainsFunc(spans, func(s flow.Ports) bool { return s.Contains(port) }) && !yield(port) {
			return
		}
		f.Chance.Ports(address, spans)(yield)
	}
}

// Backend returns the index of the backend in the sent frame, or of the planned one.
func (f *choiceFollower) Backend(legal []model.Candidate) int {
	if to := f.got.Planned.Gateway; to.IsValid() {
		return slices.IndexFunc(legal, func(c model.Candidate) bool { return c.Address == to })
	}
	t, ok := model.TupleOf(f.frame())
	if !ok {
		return -1
	}
	return slices.IndexFunc(legal, func(c model.Candidate) bool {
		if c.Direct {
			return c.Known && c.MAC == packet.MAC(f.frame()[:6])
		}
		return t.Dest.Addr() == c.Address
	})
}

// Identification returns the identification of the sent IPv4 header.
func (f *choiceFollower) Identification(tunnel bool) uint16 {
	if b := f.frame(); len(b) >= 34 && b[14]>>4 == 4 {
		return binary.BigEndian.Uint16(b[18:])
	}
	return f.Chance.Identification(tunnel)
}

// Cookie returns the sequence number of the sent answer.
func (f *choiceFollower) Cookie() uint32 {
	if t, ok := packet.Find[*packet.TCP](packet.Parse(f.frame())); ok {
		return t.Seq
	}
	return f.Chance.Cookie()
}

// Silent reports whether the datapath sent nothing for reason r.
func (f *choiceFollower) Silent(r model.Reason) bool { return f.frame() == nil && f.got.Reason == r }

// Ends reports whether the datapath's reason was r.
func (f *choiceFollower) Ends(r model.Reason) bool { return f.got.Reason == r }

// AnswerMTU returns the MTU of the sent ICMP error.
func (f *choiceFollower) AnswerMTU() int {
	if f.got.Reason != model.ReasonTooBig {
		return 0
	}
	icmp, ok := packet.Find[*packet.ICMP](packet.Parse(f.frame()))
	if !ok {
		return 0
	}
	return int(icmp.MTU())
}

// synPlaces is the minimum number of SYNs without a session that a datapath stores.
const synPlaces = 1 << 20

// ForgetsSYN reports whether the answer to a SYN matched no entry. A hash selects the table slot of
// each SYN. A limited number of SYNs may lose their slot to a later SYN.
func (f *choiceFollower) ForgetsSYN(sent int) bool {
	if f.got.Reason != model.ReasonNotOurs || f.evicted >= 5+sent*sent/synPlaces {
		return false
	}
	f.evicted++
	return true
}

// ForgetsCookie returns false: the kernel's clock limits the age of a cookie, and tests do not
// advance that clock.
func (*choiceFollower) ForgetsCookie(time.Duration) bool { return false }
