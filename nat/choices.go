// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"iter"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Choices makes the choices that the RFCs leave to an implementation. The model asks while it
// handles a frame. It knows what is legal, and takes nothing else: what it is offered and may not
// take it passes over.
//
// [Chance] is the implementation for prediction. Another one may repeat what a datapath has chosen
// for the same frame; see package judge.
type Choices interface {
	// Addresses returns the addresses of a pool in the order in which they are tried. A client
	// that has one keeps it, and is not asked about (RFC 4787 REQ-2, RFC 6888 REQ-2).
	Addresses(pool []netip.Addr) []netip.Addr
	// Ports yields ports, or identifiers of ICMP queries, of an address in the order in which they
	// are tried. The model takes the first one that is free and suits the inside port (RFC 4787
	// REQ-3 and REQ-4).
	Ports(address netip.Addr, spans []flow.Ports) iter.Seq[uint16]
	// Backend returns the index of the backend that a new connection gets, among those that the
	// scheduler may give it, or -1 to have the scheduler decide. It is not asked where the
	// backend follows from the packet by a hash.
	Backend(legal []Candidate) int
	// Identification is that of an IPv4 header that the gateway writes: of a packet that was IPv6
	// (RFC 7915 §5.1), or of a tunnel (RFC 6864 §4.1).
	Identification(tunnel bool) uint16
	// Cookie is the initial sequence number of a SYN-ACK that asks for a proof (RFC 4987 §3.6).
	Cookie() uint32

	// Silent reports whether no answer is sent about a packet that ends for the reason: of ICMP
	// errors a gateway may limit the rate (RFC 1812 §4.3.2.8).
	Silent(r Reason) bool
	// Ends reports whether a packet ends for the reason. The model asks where two reasons are
	// legal, and takes the other one when it does not: the queue of a worker may be full, or the
	// reason depends on a choice that is provisional.
	Ends(r Reason) bool
	// Told is the MTU that the answer to a packet which is too large tells, 0 when none is known.
	AnswerMTU() int
	// ForgetsSYN reports whether a SYN that left without a session was forgotten for a later one,
	// when so many of them have left in all.
	ForgetsSYN(sent int) bool
	// ForgetsCookie reports whether a cookie of that age is not accepted any more.
	ForgetsCookie(age time.Duration) bool

	// Provisional reports whether choices become known only when a packet shows them. What the
	// model takes where nothing is shown is provisional then: it is exchanged for what is shown
	// later, if that is legal (provisional.go).
	Provisional() bool
	// Shown returns what the packet is known to become. Its source is an endpoint of the pool also
	// where that stands in the prefix of a nat64 rule. For an ICMP error it is what answers the
	// quoted packet.
	ObservedTuple() (flow.Tuple, bool)
}

// Candidate is a backend that a scheduler may choose.
type Candidate struct {
	Address netip.Addr
	// Direct backends get the packet with its destination unchanged (dsr): it is told by the
	// hardware address MAC of the next hop, when that is known.
	Direct bool
	MAC    packet.MAC
	Known  bool
	// SourceTranslated backends get the packet from an address of the gateway, since the client is in their own
	// network.
	SourceTranslated bool
}

// Chance is Choices by a seed. Everything is known at once, nothing is left out or forgotten.
type Chance struct{ random *rand.Rand }

var _ Choices = Chance{}

// NewChance returns the choices of a seed.
func NewChance(seed uint64) Chance { return Chance{rand.New(rand.NewPCG(seed, 0))} }

// Addresses begins anywhere.
func (c Chance) Addresses(pool []netip.Addr) []netip.Addr {
	if len(pool) == 0 {
		return nil
	}
	start := c.random.IntN(len(pool))
	return slices.Concat(pool[start:], pool[:start])
}

// Ports begins anywhere in each span.
func (c Chance) Ports(_ netip.Addr, spans []flow.Ports) iter.Seq[uint16] {
	return func(yield func(uint16) bool) {
		for _, span := range spans {
			n := span.Len()
			if n == 0 {
				continue
			}
			start := c.random.IntN(n)
			for i := range n {
				if !yield(span.First + uint16((start+i)%n)) {
					return
				}
			}
		}
	}
}

// Backend leaves it to the scheduler.
func (Chance) Backend([]Candidate) int { return -1 }

// Slot is where the scheduler "random" begins in a table of n.
func (c Chance) Slot(n int) int { return c.random.IntN(n) }

// Identification is any, of a tunnel 0, which DF allows.
func (c Chance) Identification(tunnel bool) uint16 {
	if tunnel {
		return 0
	}
	return uint16(c.random.Uint32())
}

// Cookie is any number.
func (c Chance) Cookie() uint32 { return c.random.Uint32() }

// Silent is false: every answer is sent.
func (Chance) Silent(Reason) bool { return false }

// Ends is false: there is room, and no choice is provisional.
func (Chance) Ends(Reason) bool { return false }

// Told is nothing: what is told is for the model to say.
func (Chance) AnswerMTU() int { return 0 }

// ForgetsSYN is false.
func (Chance) ForgetsSYN(int) bool { return false }

// ForgetsCookie is true after cookieLife.
func (Chance) ForgetsCookie(age time.Duration) bool { return age > cookieLife }

// Provisional is false.
func (Chance) Provisional() bool { return false }

// Shown is nothing: what a packet becomes is for the model to say.
func (Chance) ObservedTuple() (flow.Tuple, bool) { return flow.Tuple{}, false }
