// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// Bounds of a collection: an exchange with its tuples takes about 1.5 kB.
const (
	mostExchanges  = 30_000 // of all collectors with one budget
	mostNeighbours = 1_024
	mostBuffers    = 8_192
)

// pairedWithin is the longest time between the arrival and the departure of one socket buffer.
const pairedWithin = 5 * time.Millisecond

// Collector groups packets into exchanges.
type Collector struct {
	host       Host
	exchanges  []*Exchange
	byTuple    map[key]party
	buffers    map[uint64]arrival
	neighbours map[netip.Addr]*asked
	mute       map[netip.Addr]*Mute // Own addresses that hosts ask for.
	holders    map[netip.Addr]*Conflict
	routed     map[string]bool // Interfaces by which requests with private sources are answered.
	oneArmed   map[string]bool // Interfaces by which answered requests arrive and leave.
	budget     *Budget
	groups     int  // Packets to groups and broadcasts.
	cut        bool // More exchanges than mostExchanges.
	end        time.Duration
}

// key identifies the packets of one direction of an exchange. Each transaction of DNS is an exchange of its own:
// resolvers send several queries from one socket. Without a transaction the key of DNS is that of the last one.
type key struct {
	flow.Tuple
	transaction uint16
}

const dnsPort = 53

// transaction identifies the query of a packet of DNS; 0 for other packets. Connection tracking knows the port for which
// the client asked.
func transaction(p *trace.Packet) uint16 {
	t, answer := p.Tuple, p.Tuple.Source.Port() == dnsPort
	if p.Original.IsValid() {
		t, answer = p.Original, false
	}
	if t.Protocol != flow.UDP || t.Dest.Port() != dnsPort && !answer {
		return 0
	}
	return p.Query
}

// lookup returns the exchange of a tuple. The port of a server may be that of DNS only after translation.
func (c *Collector) lookup(t flow.Tuple, transaction uint16) (party, bool) {
	who, there := c.byTuple[key{t, transaction}]
	if !there && transaction != 0 {
		who, there = c.byTuple[key{Tuple: t}]
		there = there && who.exchange.Request.Dest.Port() != dnsPort
	}
	return who, there
}

func (c *Collector) register(t flow.Tuple, transaction uint16, e *Exchange, answer bool) {
	c.byTuple[key{t, transaction}] = party{e, answer}
	if transaction != 0 {
		c.byTuple[key{Tuple: t}] = party{e, answer}
	}
}

// party is an exchange in which packets of a tuple are requests or answers.
type party struct {
	exchange *Exchange
	answer   bool
}

// arrival is the last packet that arrived in a socket buffer.
type arrival struct {
	party
	at time.Duration
}

// asked is what this host asked about a neighbour.
type asked struct {
	questions int
	answered  bool
	iface     string
	last      time.Duration
	drop      *Drop // of a question or an answer, by a rule
}

// inVain reports whether the host does not learn the link address.
func (a *asked) inVain() bool { return a != nil && (!a.answered || a.drop != nil) }

// Budget bounds the exchanges of several collectors.
type Budget struct{ left int }

// NewBudget returns the budget for one observation.
func NewBudget() *Budget { return &Budget{mostExchanges} }

// NewCollector collects for a namespace.
func NewCollector(h Host, b *Budget) *Collector {
	return &Collector{host: h, byTuple: map[key]party{}, buffers: map[uint64]arrival{}, neighbours: map[netip.Addr]*asked{}, mute: map[netip.Addr]*Mute{}, holders: map[netip.Addr]*Conflict{},
		routed: map[string]bool{}, oneArmed: map[string]bool{}, budget: b}
}

// Add takes the next packet, in the order of time.
func (c *Collector) Add(p *trace.Packet) {
	c.end = max(c.end, p.Time)
	t := p.Tuple
	switch {
	case p.Neighbour != nil:
		c.neighbour(p)
		return
	case !t.IsValid():
		return
	case c.toGroup(t.Dest.Addr()) || t.Source.Addr().IsUnspecified():
		c.groups++
		return
	case p.Error():
		c.rejection(p)
		return
	case t.Protocol.HasPorts() && t.Dest.Port() == 0, // a later fragment
		(t.Protocol == flow.ICMP || t.Protocol == flow.ICMPv6) && t.Source.Port() == 0:
		return
	}
	who, there := c.find(p)
	if !there {
		return
	}
	e, w := who.exchange, &who.exchange.request
	if who.answer {
		w = &e.reply
	}
	bridge, port := c.host.Ports[p.Interface]
	port = port && bridge != ""
	w.add(p, port, p.HasMACs && p.DestMAC[0]&1 == 0 && len(c.host.MACs) > 0 && !c.host.MACs[p.DestMAC])
	if p.Point == trace.Received {
		c.arrived(p, who)
	}
	if t.Protocol == flow.TCP {
		e.addTCP(p, who.answer, w, port)
	} else if !who.answer && c.enters(p, port) {
		e.attempt(p.Time)
	}
}

// enters reports whether a packet is seen for the first time here: it arrives, or this host makes it.
func (c *Collector) enters(p *trace.Packet, port bool) bool {
	return !port && (p.Point == trace.Received || p.InIfIndex == 0)
}

func (e *Exchange) attempt(at time.Duration) {
	if e.attempts++; e.attempts == 1 {
		e.firstAttempt = at
	}
	e.lastAttempt = at
}

func (e *Exchange) addTCP(p *trace.Packet, answer bool, w *way, port bool) {
	if p.TCPFlags&trace.TCPAck != 0 && (w.ack == 0 || int32(p.Ack-w.ack) > 0) {
		w.ack = p.Ack
	}
	if answer {
		if p.TCPFlags&trace.TCPRst != 0 && p.Point != trace.Dropped {
			e.resets++
			if e.refused == nil {
				e.refused = &Rejection{From: p.Tuple.Source.Addr(), Reset: true, Own: p.Point == trace.Transmitted && p.InIfIndex == 0}
			}
		}
	} else if p.Opening() {
		if !port && (p.Point == trace.Received || p.InIfIndex == 0 && p.Point == trace.Transmitted || p.InIfIndex == 0 && w.transmitted == 0) {
			e.attempt(p.Time)
			if e.reply.firstSent != 0 && p.Time > e.reply.firstSent {
				e.repeated++
			}
		}
	} else if p.TCPFlags&trace.TCPRst == 0 {
		e.acknowledged = true
	}
	if p.TCPFlags&(trace.TCPSyn|trace.TCPRst) != 0 {
		return
	}
	other := &e.reply
	if answer {
		other = &e.request
	}
	if p.Window > 0 {
		w.closed = repeats{}
	} else if !port {
		w.closed.add(p, 0)
	}
	if p.Point != trace.Received && p.Payload > 0 {
		class := &w.small
		if p.Length >= largeBytes {
			class = &w.large
		}
		if class.add(p, p.Length) && p.Payload > 1 { // new data that is no probe: the window was opened
			other.closed = repeats{}
		}
	}
}

// largeBytes is the observer's limit between its size classes.
const largeBytes = 1000

// toGroup reports whether an address is of several hosts.
func (c *Collector) toGroup(a netip.Addr) bool {
	if a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return true
	}
	if !a.Is4() {
		return false
	}
	n, there := c.host.network(a)
	return there && n.Prefix.Bits() < 31 && a == last(n.Prefix)
}

// last is the broadcast address of an IPv4 network.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

func (c *Collector) neighbour(p *trace.Packet) {
	c.link(p)
	target, own := p.Neighbour.Target, p.Neighbour.Sender.IsValid() && c.host.Addresses[p.Neighbour.Sender]
	a := c.neighbours[target]
	dropped := p.Point == trace.Dropped && byRule(&p.Cause)
	switch {
	case p.Neighbour.Answer && a != nil && dropped:
		a.drop = dropOf(p)
	case p.Neighbour.Answer && a != nil && p.Point == trace.Received:
		a.answered = true
	case !p.Neighbour.Answer && own && (p.Point == trace.Transmitted || dropped) && !c.host.Addresses[target]:
		if a == nil {
			if len(c.neighbours) == mostNeighbours {
				return
			}
			a = &asked{}
			c.neighbours[target] = a
		}
		if a.iface == "" || c.host.Ports[a.iface] != "" {
			a.iface = p.Interface
		}
		a.questions++
		a.last = p.Time
		if dropped {
			a.drop = dropOf(p)
		}
	}
}

// rejection adds an ICMP error to the exchange that it quotes.
func (c *Collector) rejection(p *trace.Packet) {
	who, there := c.lookup(p.Quoted, 0)
	who = who.present()
	if !there || who.answer || p.Point == trace.Dropped {
		return
	}
	tooBig := p.Tuple.Protocol == flow.ICMPv6 && p.ICMPType == 2 || p.Tuple.Protocol == flow.ICMP && p.ICMPType == 3 && p.ICMPCode == 4
	if tooBig || who.exchange.refused != nil {
		return
	}
	who.exchange.refused = &Rejection{From: p.Tuple.Source.Addr(), Type: p.ICMPType, Code: p.ICMPCode,
		Own: p.Point == trace.Transmitted && p.InIfIndex == 0 || c.host.Addresses[p.Tuple.Source.Addr()]}
}

func (c *Collector) arrived(p *trace.Packet, who party) {
	if len(c.buffers) >= mostBuffers {
		clear(c.buffers)
	}
	c.buffers[p.Buffer] = arrival{who, p.Time}
}

// find returns the exchange of a packet, a new one where none is known.
func (c *Collector) find(p *trace.Packet) (party, bool) {
	if p.Original.IsValid() {
		return c.findTracked(p)
	}
	id := transaction(p)
	if who, there := c.lookup(p.Tuple, id); there {
		return who.present(), true
	}
	// Translated or encapsulated without connection tracking: the same buffer arrived just now.
	if a, there := c.buffers[p.Buffer]; there && p.Point == trace.Transmitted && p.InIfIndex != 0 && p.Time-a.at < pairedWithin {
		a.party = a.present()
		if p.Tuple.Protocol != a.exchange.Request.Protocol {
			if a.answer {
				a.exchange.reply.encapsulated = true
			} else {
				a.exchange.request.encapsulated = true
			}
			return a.party, true
		}
		c.register(p.Tuple, id, a.exchange, a.answer)
		c.register(p.Tuple.Reverse(), id, a.exchange, !a.answer)
		if a.answer {
			return a.party, true
		}
		a.exchange.Reply = p.Tuple.Reverse()
		return a.party, true
	}
	answer, begins := role(p)
	if !begins || p.Point == trace.Dropped && p.Tuple.Protocol == flow.TCP && !p.Opening() {
		return party{}, false
	}
	request := p.Tuple
	if answer {
		request = request.Reverse()
	}
	e, there := c.newExchange(request, request.Reverse())
	if !there {
		return party{}, false
	}
	c.register(request, id, e, false)
	c.register(request.Reverse(), id, e, true)
	return party{e, answer}, true
}

// role guesses the direction of a packet without a connection; begins is false for those that say
// nothing about an exchange.
func role(p *trace.Packet) (answer, begins bool) {
	switch p.Tuple.Protocol {
	case flow.TCP:
		if p.TCPFlags&trace.TCPRst != 0 {
			return false, false
		}
		return p.TCPFlags&(trace.TCPSyn|trace.TCPAck) == trace.TCPSyn|trace.TCPAck ||
			p.TCPFlags&trace.TCPSyn == 0 && p.Tuple.Source.Port() < p.Tuple.Dest.Port(), true
	case flow.ICMP, flow.ICMPv6:
		return p.EchoReply(), true
	}
	from, to := p.Tuple.Source.Port(), p.Tuple.Dest.Port()
	return from < 1024 && to >= 1024 && from != 0, true
}

func (c *Collector) newExchange(request, reply flow.Tuple) (*Exchange, bool) {
	if c.budget.left == 0 {
		c.cut = true
		return nil, false
	}
	c.budget.left--
	e := &Exchange{Request: request, Reply: reply}
	c.exchanges = append(c.exchanges, e)
	return e, true
}

// findTracked returns the exchange of a packet with an entry of connection tracking.
func (c *Collector) findTracked(p *trace.Packet) (party, bool) {
	answer, id := p.Direction == flow.Reply, transaction(p)
	who, there := c.lookup(p.Original, id)
	if there && who.exchange.known && !who.answer && who.exchange.Request == p.Original {
		if who.exchange.Reply != p.Reply {
			c.translates(who.exchange, p)
		}
		return party{who.exchange, answer}, true
	}
	// An answer with a connection of its own was not recognised: it is tracked in another zone than its request.
	if there && who.answer && !answer && who.exchange.known && who.exchange.SourceTranslated() && who.exchange.Reply == p.Original {
		who.exchange.unrecognised = true
		return who, true
	}
	e, created := c.newExchange(p.Original, p.Reply)
	if !created {
		return party{}, false
	}
	e.known = true
	// What arrived before its connection was known.
	c.absorb(e, p.Original, id, false)
	c.absorb(e, p.Reply, id, true)
	c.translates(e, p)
	return party{e, answer}, true
}

// translates registers the tuples of an exchange before and after translation.
func (c *Collector) translates(e *Exchange, p *trace.Packet) {
	e.Reply = p.Reply
	for _, t := range []flow.Tuple{p.Original, p.Reply.Reverse()} {
		c.register(t, transaction(p), e, false)
		c.register(t.Reverse(), transaction(p), e, true)
	}
}

// absorb joins an exchange that was guessed from packets of a tuple.
func (c *Collector) absorb(e *Exchange, t flow.Tuple, transaction uint16, answer bool) {
	who, there := c.lookup(t, transaction)
	who = who.present()
	old := who.exchange
	if !there || old == e || old.known {
		return
	}
	request, reply := &old.request, &old.reply
	old.into, old.turned = e, who.answer != answer
	if old.turned {
		request, reply = reply, request
		old.attempts, old.firstAttempt, old.lastAttempt, old.refused = 0, 0, 0, nil
		if e.Request.Protocol != flow.TCP && request.received > 0 {
			old.attempts, old.firstAttempt, old.lastAttempt = request.received, request.first, request.last
		}
	}
	e.request.merge(request)
	e.reply.merge(reply)
	if old.attempts > 0 {
		if e.attempts == 0 || old.firstAttempt < e.firstAttempt {
			e.firstAttempt = old.firstAttempt
		}
		e.attempts, e.lastAttempt = e.attempts+old.attempts, max(e.lastAttempt, old.lastAttempt)
	}
	e.acknowledged = e.acknowledged || old.acknowledged
	if e.refused == nil {
		e.refused = old.refused
	}
	e.resets += old.resets
}

// present follows exchanges that were joined to others.
func (p party) present() party {
	for p.exchange != nil && p.exchange.into != nil {
		p.answer = p.answer != p.exchange.turned
		p.exchange = p.exchange.into
	}
	return p
}
