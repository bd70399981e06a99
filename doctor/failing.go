// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// outcomesCheck is the check that looks at connections themselves; the others look for causes.
const outcomesCheck = "OC01"

const fromPackets = "packets at the interfaces"

func outcomeChecks() []Check {
	return []Check{
		{ID: outcomesCheck, Name: "outcomes", About: "connections and exchanges that were answered, against those that failed", Weight: 100, Run: checkOutcomes,
			Symptom: "the clients of these connections wait, or fail",
			Remedy:  Remedy{Do: "look at what follows the last step that was seen", Risk: "none: it only looks"}},
	}
}

func checkOutcomes(_ context.Context, c *Case) Finding {
	t := c.NS.Traffic
	switch {
	case t == nil && c.NS.DropsErr != nil:
		return unknown("%v", c.NS.DropsErr)
	case t == nil:
		return ok("connections were not observed")
	}
	for i := range t.Classes {
		class := &t.Classes[i]
		if !class.Sizable {
			continue
		}
		f := found(severityOf(class), "%s", class).losing(c.perSecond(uint64(class.Failing)))
		for _, line := range class.Evidence() {
			f = f.with("for example", line, fromPackets)
		}
		f.Remedy = remedyOf(class)
		return f
	}
	return ok("%s", t.Text())
}

// severityOf is critical where most of all exchanges fail.
func severityOf(c *outcome.Class) Verdict {
	if c.Failing >= 10 && 2*c.Failing >= c.All {
		return Critical
	}
	return Warn
}

// remedyOf is the next step if no check explains a class.
func remedyOf(c *outcome.Class) *Remedy {
	m := &Remedy{Risk: "none: it only looks"}
	e := c.Example
	server := e.Server()
	switch d := c.Reason.Drop; {
	case c.Reason.HopLimit && d.Cause.ID == trace.CauseTTL.ID:
		family, field := "ip", "ip ttl"
		if !server.Addr().Is4() {
			family, field = "ip6", "ip6 hoplimit"
		}
		return &Remedy{Do: "set a higher hop limit where the answers arrive; their sender, or a provider that allows a single device, sends them so",
			Commands: []string{fmt.Sprintf("nft 'add table %s hops; add chain %s hops pre { type filter hook prerouting priority mangle; }; add rule %s hops pre iifname %q %s 1 %s set 64'", family, family, family, c.Example.AnswerIn(), field, field)},
			Risk:     "a loop through this link no longer ends"}
	case c.Reason.Unrecognised:
		m.Do = fmt.Sprintf("look for a rule that lets one direction alone have another zone (ct zone set), or keeps what arrives by %s untracked (notrack): requests and answers need the same", c.Example.AnswerIn())
		m.Commands = []string{"nft -a list ruleset"}
		return m
	case c.Reason.OtherSource.IsValid():
		m.Do = fmt.Sprintf("let the program at port %d answer from the address that was asked: bind it to each address, or switch on its option for hosts with several addresses (IP_PKTINFO)", server.Port())
		m.Commands = []string{fmt.Sprintf("ss -lunp 'sport = :%d'", server.Port())}
		return m
	case c.Reason.Elsewhere != "":
		m.Do = fmt.Sprintf("if the senders mean this host, have them ask for its hardware address again (gratuitous ARP: arping -A; ip neigh flush there); else this is traffic of others, which a mirror port or a hub shows, and nothing is wrong. At a sender, compare %s", c.Reason.Elsewhere)
		m.Commands = []string{"ip -br link"}
		return m
	case d != nil && d.Cause.Remedy != "":
		return &Remedy{Do: d.Cause.Remedy, Risk: "see the evidence first"}
	}
	switch c.Stage {
	case outcome.NoAnswer, outcome.Refused:
		if e.Out() == "" {
			m.Do, m.Commands = fmt.Sprintf("look at the program that serves %s", server), []string{fmt.Sprintf("ss -lnp 'sport = :%d'", server.Port())}
			return m
		}
		if c.Stage == outcome.Refused {
			m.Do = fmt.Sprintf("look at the program that should listen at %s, and at its firewall: requests are refused there", server)
			return m
		}
		m.Do = fmt.Sprintf("look at %s, and at its route back to %s: what left here was not answered", server.Addr(), e.Reply.Dest.Addr())
		m.Commands = []string{fmt.Sprintf("ip route show table all match %s", server.Addr())}
	case outcome.Unread:
		reader := c.Reason.Unread
		m.Do = fmt.Sprintf("look at the program of %s: it has hung, or is slower than its peer", reader)
		if reader == server && e.Out() == "" || reader == e.Client() && e.In() == "" {
			m.Commands = []string{fmt.Sprintf("ss -tnpm 'sport = :%d'", reader.Port())}
		}
	case outcome.TooBig:
		m.Do = "find the link of the path with the smaller MTU, and clamp the segment size to it"
		m.Commands = []string{fmt.Sprintf("ip route show table all match %s", server.Addr())}
	case outcome.Untranslated:
		return translateRemedy(c)
	case outcome.WrongWay:
		if n := c.Reason.Network; n.Interface != "" {
			m.Do, m.Risk = "restore the route of the network; delete a more specific one", "none: the network is on the link"
			m.Commands = []string{fmt.Sprintf("ip route replace %s dev %s", n.Prefix, n.Interface)}
			return m
		}
		return lookAtRoute(m, server.Addr())
	default:
		return lookAtRoute(m, server.Addr())
	}
	return m
}

func lookAtRoute(m *Remedy, to netip.Addr) *Remedy {
	m.Do = fmt.Sprintf("look at the route to %s and at the rules for it", to)
	m.Commands = []string{fmt.Sprintf("ip route show table all match %s", to)}
	return m
}

// translateRemedy translates the sources of a class.
func translateRemedy(c *outcome.Class) *Remedy {
	e := c.Example
	family, bits := "ip", 24
	if !e.Client().Addr().Is4() {
		family, bits = "ip6", 64
	}
	network, _ := e.Client().Addr().Prefix(bits)
	return &Remedy{
		Do: fmt.Sprintf("translate what leaves by %s: no rule matched these connections; correct the rule that should, or add one", e.Out()),
		Commands: []string{fmt.Sprintf("nft 'add table %s translate; add chain %s translate post { type nat hook postrouting priority srcnat; }; add rule %s translate post oifname \"%s\" %s saddr %s masquerade'",
			family, family, family, e.Out(), family, network)},
		Risk: "the rule that should translate stays wrong; connections between networks that know each other lose their source",
	}
}

// failing is a class with the finding that explains it.
type failing struct {
	namespace *observe.Namespace
	class     *outcome.Class
	cause     *Finding // nil: no check explains it
}

// failingClasses are the classes of all namespaces that are no accident, those that are explained first.
func (r *Report) failingClasses(s *observe.Sample) (list []failing) {
	passed := map[flow.Tuple]bool{} // exchanges that end at another stage than silence
	for _, n := range s.Namespaces {
		if n.Traffic == nil {
			continue
		}
		for i := range n.Traffic.Classes {
			if c := &n.Traffic.Classes[i]; c.Sizable {
				list = append(list, failing{n, c, r.causeOf(n, c)})
				for _, e := range c.Members {
					if c.Stage != outcome.NoAnswer {
						passed[e.Request] = true
					}
				}
			}
		}
	}
	// Where client or server run in other namespaces of this host, their silence is a consequence.
	list = slices.DeleteFunc(list, func(f failing) bool {
		return f.class.Stage == outcome.NoAnswer && f.cause == nil && passed[f.class.Example.Request]
	})
	slices.SortStableFunc(list, func(a, b failing) int {
		unexplained := func(f failing) int {
			if f.cause == nil && !f.class.Reason.Evident() {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(unexplained(a), unexplained(b)), cmp.Compare(b.class.Failing, a.class.Failing))
	})
	return list
}

// causeOf is the finding that explains a class best; nil: none does.
func (r *Report) causeOf(n *observe.Namespace, c *outcome.Class) (best *Finding) {
	rate := 0
	for i := range r.Findings {
		f := &r.Findings[i]
		if f.Check == outcomesCheck || f.Namespace != n.Name && f.Namespace != "" {
			continue
		}
		if rated := explainedBy(c, f); rated > rate {
			best, rate = f, rated
		}
	}
	return best
}

// counting are checks with counters that matter only if connections fail.
var counting = []string{"CT07", "CT10", "ST02", "ST08", "ST11", "PT03", "RL14", "RL15", "FW02", "FW04", "FW07", "FW08", "FW09", "FW12", "LS02"}

// loads are checks of the load of the host's CPUs, to which other programs contribute.
var loads = []string{"RX02", "RX03", "RX04", "RX10"}

// noteCounters makes notes of findings by counters in namespaces without failing connections. The load of the host is a
// note unless connections fail for no known reason, packets were not seen, or nothing that passed was answered.
func (r *Report) noteCounters(s *observe.Sample, classes []failing) {
	unexplained := slices.ContainsFunc(classes, func(f failing) bool { return f.cause == nil })
	for i := range r.Findings {
		f := &r.Findings[i]
		load := slices.Contains(loads, f.Check)
		if f.Verdict < Warn || !load && !slices.Contains(counting, f.Check) {
			continue
		}
		concerned := slices.DeleteFunc(slices.Clone(s.Namespaces), func(n *observe.Namespace) bool { return f.Namespace != "" && n.Name != f.Namespace })
		victims := func(n *observe.Namespace) bool { return !works(n.Traffic) || refusing(n.Traffic, f) }
		if load {
			victims = func(n *observe.Namespace) bool {
				t := n.Traffic
				return unexplained || t == nil || t.Lost.Openings > 0 || t.Answered == 0 && t.Failed+t.OneWay+t.Unknown > 0
			}
		}
		if len(concerned) > 0 && !unseen(f) && !slices.ContainsFunc(concerned, victims) {
			f.Verdict = Info
		}
	}
}

// works reports whether exchanges were answered, none was lost to view, and no class fails.
func works(t *outcome.Report) bool {
	return t != nil && t.Answered > 0 && !t.Lost.Any() && !t.Cut && !slices.ContainsFunc(t.Classes, func(c outcome.Class) bool { return c.Sizable })
}

// refusing reports whether a rule that drops refused exchanges between two hosts.
func refusing(t *outcome.Report, f *Finding) bool {
	return f.Check == "RL15" && slices.ContainsFunc(t.Refused, func(c outcome.Class) bool { return c.Sizable })
}

// unseen reports whether a rule drops messages that configure this host: a single one matters.
func unseen(f *Finding) bool {
	return f.Check == "RL15" && f.Concerns != nil && len(f.Concerns.Protocols) > 0
}

// concluded is a failing class as the conclusion names it, with its cause.
func (f failing) concluded(s *observe.Sample) Conclusion {
	c := Conclusion{Check: outcomesCheck, Namespace: f.namespace.Name, Severity: severityOf(f.class), Summary: upperFirst(f.class.String()), Commands: []string{}}
	if f.cause != nil {
		c.Check, c.Severity = f.cause.Check, max(c.Severity, f.cause.Verdict)
		c.Summary = fmt.Sprintf("%s. Cause: %s", upperFirst(f.class.String()), f.cause.Summary)
		if extra := table(*f.cause, s); extra != "" {
			c.Summary += "; " + extra
		}
		if m := f.cause.Remedy; m != nil {
			c.Do, c.Commands = m.Do, m.Commands
		}
	} else {
		m := remedyOf(f.class)
		c.Do, c.Commands = m.Do, m.Commands
	}
	if len(s.Namespaces) > 1 {
		c.Summary = fmt.Sprintf("In namespace %s: %s%s", f.namespace.Name, strings.ToLower(c.Summary[:1]), c.Summary[1:])
	}
	return c
}

// answeredText says how many exchanges were answered, and what became of the others.
func answeredText(s *observe.Sample) string {
	var sum outcome.Report
	for _, n := range s.Namespaces {
		if t := n.Traffic; t != nil {
			sum.Answered, sum.Failed, sum.Filtered, sum.Noise = sum.Answered+t.Answered, sum.Failed+t.Failed, sum.Filtered+t.Filtered, sum.Noise+t.Noise
			sum.Probes += t.Probes
			if len(sum.Classes) == 0 && len(t.Classes) > 0 {
				sum.Classes = t.Classes[:1]
			}
		}
	}
	if sum.Answered+sum.Failed+sum.Probes == 0 {
		return ""
	}
	text := sum.Text()
	if len(sum.Classes) > 0 {
		text += fmt.Sprintf("; of the other %d: %s", sum.Failed, &sum.Classes[0])
	}
	return text
}
