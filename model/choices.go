// SPDX-License-Identifier: Apache-2.0

package model

import (
	"iter"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Choices makes the choices that the RFCs leave to an implementation. The model calls it for each
// frame that needs a choice. The model skips every offered value that is not legal.
//
// [Chance] chooses at random, for prediction. Package judge has another implementation: it repeats
// the choices of a datapath for the same frame.
type Choices interface {
	// Addresses returns the addresses of a pool in allocation order. The model does not call it for
	// a client that already has an address (RFC 4787 REQ-2, RFC 6888 REQ-2).
	Addresses(pool []netip.Addr) []netip.Addr
	// Ports yields the ports or ICMP query identifiers of an address in allocation order. The model
	// takes the first free port that suits the inside port (RFC 4787 REQ-3 and REQ-4).
	Ports(address netip.Addr, spans []flow.Ports) iter.Seq[uint16]
	// Backend returns the index of the backend for a new connection among the candidates of the
	// scheduler. The result -1 leaves the choice to the scheduler. The model does not call Backend
	// if a hash of the packet determines the backend.
	Backend(legal []Candidate) int
	// Identification returns the identification of an IPv4 header that the gateway writes: of a
	// translated IPv6 packet (RFC 7915 §5.1) or of a tunnel (RFC 6864 §4.1).
	Identification(tunnel bool) uint16
	// Cookie returns the initial sequence number of a SYN-ACK with a SYN cookie (RFC 4987 §3.6).
	Cookie() uint32

	// Silent reports whether the gateway sends no answer for a packet that ends with reason r. A
	// gateway may limit the rate of ICMP errors (RFC 1812 §4.3.2.8).
	Silent(r Reason) bool
	// Ends reports whether a packet ends with reason r. The model calls it where two reasons are
	// legal, and uses the other reason for the result false. Two reasons are legal if a worker's
	// queue may be full or if a provisional choice decides.
	Ends(r Reason) bool
	// AnswerMTU returns the MTU in the "too big" answer, 0 if it is unknown.
	AnswerMTU() int
	// ForgetsSYN reports whether the datapath lost its record of a SYN without a session. The
	// argument is the total number of such SYNs.
	ForgetsSYN(sent int) bool
	// ForgetsCookie reports whether a cookie of that age has expired.
	ForgetsCookie(age time.Duration) bool

	// Provisional reports whether only later packets show some choices. The model then makes a
	// provisional choice, and replaces it when a packet shows another legal one (provisional.go).
	Provisional() bool
	// ObservedTuple returns the tuple of the translated packet, if it is known. Its source is an
	// endpoint of the pool, even if the packet carries it embedded in the prefix of a nat64 rule.
	// For an ICMP error the tuple belongs to an answer to the quoted packet.
	ObservedTuple() (flow.Tuple, bool)
}

// Candidate is a backend that the scheduler may select.
type Candidate struct {
	Address netip.Addr
	// Direct reports that the packet keeps its destination address (dsr). The MAC address of the
	// next hop identifies such a backend, if it is known.
	Direct bool
	MAC    packet.MAC
	Known  bool
}

// Chance makes random choices from a seed. It suppresses no answer and expires nothing but cookies.
type Chance struct{ random *rand.Rand }

var _ Choices = Chance{}

// NewChance returns the choices of a seed.
func NewChance(seed uint64) Chance { return Chance{rand.New(rand.NewPCG(seed, 0))} }

// Addresses returns the pool from a random start.
func (c Chance) Addresses(pool []netip.Addr) []netip.Addr {
	if len(pool) == 0 {
		return nil
	}
	start := c.random.IntN(len(pool))
	return slices.Concat(pool[start:], pool[:start])
}

// Ports starts at a random port in each span.
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

// Backend returns -1: the scheduler chooses.
func (Chance) Backend([]Candidate) int { return -1 }

// Slot returns the start of the scheduler "random" in a table of n entries.
func (c Chance) Slot(n int) int { return c.random.IntN(n) }

// Identification returns a random value, for a tunnel 0: a packet with DF may have it.
func (c Chance) Identification(tunnel bool) uint16 {
	if tunnel {
		return 0
	}
	return uint16(c.random.Uint32())
}

// Cookie returns a random number.
func (c Chance) Cookie() uint32 { return c.random.Uint32() }

// Silent returns false: the gateway sends every answer.
func (Chance) Silent(Reason) bool { return false }

// Ends returns false: queues have room, and no choice is provisional.
func (Chance) Ends(Reason) bool { return false }

// AnswerMTU returns 0: the model computes the MTU.
func (Chance) AnswerMTU() int { return 0 }

// ForgetsSYN returns false.
func (Chance) ForgetsSYN(int) bool { return false }

// ForgetsCookie reports whether age exceeds cookieLife.
func (Chance) ForgetsCookie(age time.Duration) bool { return age > cookieLife }

// Provisional returns false.
func (Chance) Provisional() bool { return false }

// ObservedTuple returns false: the model computes the translation.
func (Chance) ObservedTuple() (flow.Tuple, bool) { return flow.Tuple{}, false }
