// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/trace"
)

// frameChecks look at bridges and at the two ends of virtual cables.
func frameChecks() []Check {
	return []Check{
		{ID: "RX11", Name: "bridge-ports", About: "ports of bridges that do not forward", Weight: 88, Run: checkBridgePorts,
			Symptom: "what was plugged in or started just now gets no address by DHCP, and answers after half a minute",
			Remedy:  Remedy{Do: "turn spanning tree off on a bridge without a second path to another one", Risk: "without it two paths between bridges are a loop"}},
		{ID: "RX12", Name: "veth-mtu", About: "the MTUs of both ends of a virtual cable", Weight: 89, Run: checkVethMTU,
			Symptom: "large answers over UDP are lost without an ICMP error; TCP works where it announces its segment size",
			Remedy:  Remedy{Do: "give both ends of the cable the same MTU", Risk: "a bridge takes the smallest MTU of its ports"}},
	}
}

func checkBridgePorts(_ context.Context, c *Case) Finding {
	g, dropping := c.drops(trace.CauseBridgePort)
	var waiting *observe.Link
	for i, l := range c.NS.After.Links {
		if l.Up && (l.STP == observe.STPListening || l.STP == observe.STPLearning) {
			waiting = &c.NS.After.Links[i]
		}
	}
	switch {
	case waiting != nil:
		v := Info // a short delay, as libvirt's of 2 s, is over before anything asks for an address again
		if delay := c.delayOf(waiting.Master); delay == 0 || delay > shortDelay {
			v = Warn
		}
		f := found(v, "port %s of bridge %s does not forward yet: spanning tree (STP) keeps it %s", waiting.Name, c.linkName(waiting.Master), waiting.STP).
			with("state of "+waiting.Name, waiting.STP.String(), fromLinks)
		if dropping {
			f.Summary += fmt.Sprintf("; %s were dropped", plural(int(g.Packets), "frame"))
			f = f.losing(g.PerSecond)
		}
		f.Remedy = &Remedy{Do: "wait for twice the forward delay, or turn spanning tree off on a bridge without a second path to another one",
			Commands: []string{fmt.Sprintf("ip link set %s type bridge stp_state 0", c.linkName(waiting.Master)), fmt.Sprintf("ip link set %s type bridge_slave state 3", waiting.Name)},
			Risk:     "without it two paths between bridges are a loop"}
		return c.withDrops(f, trace.CauseBridgePort)
	case dropping && c.unwanted(g) >= Warn:
		return c.withDrops(found(Info, "a bridge port that spanning tree (STP) blocks dropped %s: one of two ways to another bridge", plural(int(g.Packets), "frame")), trace.CauseBridgePort)
	}
	return ok("every port of a bridge forwards, or is blocked for good")
}

// shortDelay is the forward delay that a client's repetition of a question outlasts.
const shortDelay = 3 * time.Second

// delayOf is the forward delay of a bridge; 0: not known.
func (c *Case) delayOf(bridge int) time.Duration {
	for _, l := range c.NS.After.Links {
		if l.Index == bridge {
			return l.ForwardDelay
		}
	}
	return 0
}

func (c *Case) linkName(index int) string {
	for _, l := range c.NS.After.Links {
		if l.Index == index {
			return l.Name
		}
	}
	return fmt.Sprint("interface ", index)
}

func checkVethMTU(_ context.Context, c *Case) Finding {
	g, dropping := c.drops(trace.CauseFarEnd)
	var unequal []observe.Link
	for _, l := range c.NS.After.Links {
		if l.Up && l.PeerMTU > 0 && l.MTU > l.PeerMTU {
			unequal = append(unequal, l)
		}
	}
	if dropping {
		f := found(grade(g.PerSecond, 0, 5), "%s were larger than the MTU of the far end of their link, or it is down; no ICMP error is sent", plural(int(g.Packets), "frame")).losing(g.PerSecond)
		if g.Packets < 5 || len(unequal) == 0 && c.unwanted(g) < Warn { // a bridge floods frames to an end that is down
			f.Verdict = Info
		}
		if len(unequal) > 0 {
			l := c.dropsOn(unequal, g)
			f.Summary = fmt.Sprintf("%s were too large for the far end of %s, whose MTU is %d instead of %d; no ICMP error is sent", plural(int(g.Packets), "frame"), l.Name, l.PeerMTU, l.MTU)
			f = f.with("MTU of "+l.Name+" and of its far end", fmt.Sprintf("%d, %d", l.MTU, l.PeerMTU), fromLinks)
			f.Remedy = &Remedy{Do: "give both ends of the link the same MTU", Commands: []string{fmt.Sprintf("ip link set dev %s mtu %d", l.Name, l.PeerMTU)}, Risk: "a bridge takes the smallest MTU of its ports"}
		}
		return c.withDrops(f, trace.CauseFarEnd)
	}
	if len(unequal) > 0 {
		var names []string
		for _, l := range unequal {
			names = append(names, fmt.Sprintf("%s (%d, far end %d)", l.Name, l.MTU, l.PeerMTU))
		}
		return found(Info, "larger MTU than at the far end: %s; frames above it would be lost", strings.Join(names[:min(len(names), 4)], ", "))
	}
	return ok("both ends of every virtual cable have the same MTU, as far as they can be seen")
}

// dropsOn is the one of some links by which a dropped frame was to leave.
func (c *Case) dropsOn(links []observe.Link, g trace.DropGroup) observe.Link {
	for _, p := range g.Places {
		for _, l := range links {
			if l.Name == p.Interface {
				return l
			}
		}
	}
	return links[0]
}
