// SPDX-License-Identifier: Apache-2.0

package outcome

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// subject names the exchanges of the class: "23 of 24 connections to 10.0.0.2:25565".
func (c *Class) subject() string {
	kind := "connection"
	switch protocols := c.Protocols(); {
	case len(protocols) > 1:
		kind = "exchange"
	case protocols[0] == flow.UDP:
		kind = "UDP exchange"
	case protocols[0] != flow.TCP:
		kind = protocols[0].String() + " exchange"
	}
	plural := "s"
	if c.Of == 1 {
		plural = ""
	}
	s := fmt.Sprintf("%d of %d %s%s", c.Failing, c.Of, kind, plural)
	switch c.Attribute {
	case ByNextHop:
		if a := c.Reason.Unresolved; a.IsValid() {
			return s + fmt.Sprintf(" to the next hop %s on %s", a, c.Reason.UnresolvedOn)
		}
		return s + fmt.Sprintf(" that left by %s to %s", c.Example.Out(), c.hopText())
	case ByService:
		return s + " forwarded to " + c.Value
	case ByServer, ByServerAddress, ByPort:
		return s + " to " + c.Value
	case ByOut:
		return s + " that left by " + c.Value
	case ByIn:
		return s + " from " + c.Value
	case BySource, BySourceNetwork:
		return s + " of " + c.Value
	}
	return s
}

// hopText is the link address to which packets were sent.
func (c *Class) hopText() string {
	mac, known := c.Example.NextHopMAC()
	if !known {
		return "the next hop"
	}
	return net.HardwareAddr(mac[:]).String()
}

// String is the class in a sentence: how many fail, where they end, and what shows it.
func (c *Class) String() string { return c.subject() + c.target() + " " + c.ending() }

// target names the server where all exchanges of the class have the same one, and the subject does not name it.
func (c *Class) target() string {
	if c.Attribute == ByService || c.Attribute == ByServer || c.Attribute == ByServerAddress {
		return ""
	}
	server := c.Example.Server()
	for _, e := range c.Members {
		if e.Server() != server {
			return ""
		}
	}
	if c.Example.Request.Protocol.HasPorts() {
		return ", all to " + server.String() + ","
	}
	return ", all to " + server.Addr().String() + ","
}

func (c *Class) ending() string {
	e, d := c.Example, c.Reason.Drop
	lost := ""
	if d != nil {
		if lost = d.Cause.Title; d.Cause.ID == trace.CauseOther.ID {
			lost = "for a reason that no check knows"
		}
		if d.Interface != "" {
			lost += " (" + d.Interface + ")"
		}
	}
	if hop := c.Reason.Unresolved; c.Reason.Unheard {
		protocol := "ARP"
		if !hop.Is4() {
			protocol = "neighbour discovery"
		}
		what := map[bool]string{true: "were answered, and the answers did not leave this host", false: "did not leave this host"}[c.Stage == AnswerLost]
		return fmt.Sprintf("%s: %s for the next hop %s on %s is dropped here: %s", what, protocol, hop, c.Reason.UnresolvedOn, lost)
	}
	switch c.Stage {
	case NeverLeft:
		switch hop := c.Reason.Unresolved; {
		case d != nil && d.Cause.ID != trace.CauseNeighbour.ID:
			return "did not leave this host: dropped: " + lost
		case hop.IsValid():
			if c.Attribute == ByNextHop {
				return "did not leave this host: the next hop does not answer for its address (ARP, neighbour discovery)"
			}
			return fmt.Sprintf("did not leave this host: the next hop %s on %s does not answer for its address", hop, c.Reason.UnresolvedOn)
		case d != nil:
			return "did not leave this host: dropped: " + lost
		case c.Reason.Rejection != nil:
			return "did not leave this host: " + c.Reason.Rejection.String()
		}
		if mac := c.Reason.Elsewhere; mac != "" {
			return fmt.Sprintf("arrived by %s for the hardware address %s, which this host does not have, and were ignored", e.In(), mac)
		}
		return "arrived and did not leave this host"
	case WrongWay:
		if c.Reason.Loop {
			return fmt.Sprintf("go in a circle: the same packets arrive by %s again and again, with a smaller hop limit each time", e.In())
		}
		text := fmt.Sprintf("got no answer here: they left by the interface of their arrival, %s", e.Out())
		if n := c.Reason.Network; n.Interface != "" {
			text += fmt.Sprintf(", although the server is in the network %s of %s: the route to it is missing, or another one is more specific", n.Prefix, n.Interface)
		}
		return text
	case Untranslated:
		if c.Attribute == ByOut {
			return "kept their private source address, untranslated, and got no answer"
		}
		return fmt.Sprintf("left by %s with their private source address, untranslated, and got no answer", e.Out())
	case NoAnswer:
		if e.Out() == "" {
			return "arrived and this host sent no answer"
		}
		if c.Reason.Bypass {
			return fmt.Sprintf("left by %s and their answers do not pass this host: the clients acknowledge what was not seen here", e.Out())
		}
		text := "got no answer"
		if c.Attribute != ByOut && c.Attribute != ByNextHop {
			text += "; they left by " + e.Out()
		}
		if _, known := e.NextHopMAC(); known && c.Attribute != ByNextHop {
			text += " to " + c.hopText()
		}
		if d != nil {
			return text + "; some were dropped: " + lost
		}
		if a := c.foreignSource(); a.IsValid() {
			text += fmt.Sprintf("; their source was translated to %s, which this host does not have", a)
		}
		return text + "; nothing came back on any interface"
	case AnswerLost:
		if c.Reason.HopLimit && d.Cause.ID == trace.CauseTTL.ID {
			return fmt.Sprintf("were answered, and the answers arrive by %s with a hop limit (TTL) of 1, so that they end here", e.reply.in)
		}
		if hop := c.Reason.Unresolved; hop.IsValid() && (d == nil || d.Cause.ID == trace.CauseNeighbour.ID) {
			return fmt.Sprintf("were answered, and the answers did not leave this host: the next hop %s on %s does not answer for its address", hop, c.Reason.UnresolvedOn)
		}
		if c.Reason.Unrecognised {
			if lost != "" {
				lost = ", and dropped as packets to this host: " + lost
			}
			return fmt.Sprintf("were answered by %s, and the answers were not recognised as such: they are not translated back%s", e.reply.in, lost)
		}
		if d != nil {
			return "were answered, and the answers were dropped here: " + lost
		}
		return fmt.Sprintf("were answered by %s, and the answers did not leave this host", e.reply.in)
	case Refused:
		return "were refused: " + c.Reason.Rejection.String()
	case ClientRejects:
		if a := c.Reason.OtherSource; a.IsValid() {
			return fmt.Sprintf("were answered from %s instead of %s, which was asked: clients ignore such answers", a, e.Request.Dest.Addr())
		}
		if e.In() != "" && e.AnswerOut() != "" && e.In() != e.AnswerOut() {
			return fmt.Sprintf("were answered, and the clients repeat their requests: they arrive by %s, the answers leave by %s", e.In(), e.AnswerOut())
		}
		return fmt.Sprintf("were answered by %s, and the clients repeat their requests as if nothing had come", e.AnswerOut())
	case TooBig:
		text := fmt.Sprintf("stall: packets of %d bytes are repeated and never acknowledged, small ones are", c.Reason.Large)
		if d != nil {
			text += "; dropped: " + lost
		}
		return text
	case Unread:
		who := "the client"
		if c.Reason.Unread == e.Server() {
			who = "the server"
		}
		return fmt.Sprintf("stall: %s does not read, %s has announced a receive window of 0 bytes for %.1f s", who, c.Reason.Unread, c.Reason.UnreadFor.Seconds())
	}
	return "failed"
}

// foreignSource is the translated source of all members, if it is one address that this host does not have.
func (c *Class) foreignSource() netip.Addr {
	source := c.Example.Reply.Dest.Addr()
	for _, e := range c.Members {
		if !e.Reason.ForeignSource || e.Reply.Dest.Addr() != source {
			return netip.Addr{}
		}
	}
	return source
}

// String names the sender of the rejection and its kind.
func (r *Rejection) String() string {
	who := r.From.String()
	if r.Own {
		who = "this host"
	}
	if r.Reset {
		return who + " answers by a reset"
	}
	return fmt.Sprintf("%s answers by an ICMP error (%s)", who, icmpText(r.From.Is4(), r.Type, r.Code))
}

// icmpText names the common errors (RFC 792, RFC 1812 §5.2.7.1, RFC 4443 §3).
func icmpText(four bool, kind, code uint8) string {
	names := map[[2]uint8]string{{3, 0}: "network unreachable", {3, 1}: "host unreachable", {3, 3}: "port unreachable", {3, 13}: "prohibited", {3, 10}: "prohibited", {3, 9}: "prohibited", {11, 0}: "hop limit expired"}
	if !four {
		names = map[[2]uint8]string{{1, 0}: "no route", {1, 1}: "prohibited", {1, 3}: "address unreachable", {1, 4}: "port unreachable", {3, 0}: "hop limit expired"}
	}
	if name := names[[2]uint8{kind, code}]; name != "" {
		return name
	}
	return fmt.Sprintf("type %d code %d", kind, code)
}

// Evidence lists the steps of the example.
func (c *Class) Evidence() (lines []string) {
	e := c.Example
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	switch {
	case e.In() != "":
		add("%s arrived by %s", e.Request, e.In())
	default:
		add("%s was sent by this host", e.Request)
	}
	if e.Out() != "" {
		to := ""
		if _, known := e.NextHopMAC(); known {
			to = " to " + c.hopText()
		}
		add("left by %s%s as %s", e.Out(), to, e.request.tuple)
	}
	if e.reply.in != "" {
		add("an answer arrived by %s", e.reply.in)
	}
	if e.reply.out != "" {
		add("an answer left by %s", e.reply.out)
	}
	if d := c.Reason.Drop; d != nil {
		what := "the request"
		if d.Answer {
			what = "the answer"
		}
		add("%s was dropped: %s (%s)", what, d.Cause.Title, d.Place)
	}
	if r := c.Reason.Rejection; r != nil {
		add("%s", r)
	}
	if a := c.Reason.Unresolved; a.IsValid() {
		add("questions for the link address of %s have no answer", a)
	}
	return lines
}

// Text sums up the namespace: "214 of 216 connections were answered".
func (r *Report) Text() string {
	text := fmt.Sprintf("%d of %d connections and exchanges were answered", r.Answered, r.Answered+r.Failed)
	if r.Probes > 0 {
		text += fmt.Sprintf("; %d health checks of Sluice got no answer (sluice show backends)", r.Probes)
	}
	return text
}
