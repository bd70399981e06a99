// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// text returns the trace as a packet case with the model's expected results. Ports portNames by the
// subject become $names.
func (t *trace) text(sc Scenario) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Found by random packets, scenario %s.\n-- config --%s", sc.Name, sc.YAML)
	for _, r := range t.reloads {
		if slices.ContainsFunc(t.steps, func(s judgedStep) bool { return s.change == "apply "+r.name }) {
			fmt.Fprintf(&b, "-- config %s --\n%s", r.name, strings.TrimLeft(r.yaml, "\n"))
		}
	}
	host := slices.Clone(sc.HostLines)
	for _, a := range t.unresolved {
		host = append(host, "forget "+a)
	}
	if len(host) > 0 {
		fmt.Fprintf(&b, "-- host --\n%s\n", strings.Join(host, "\n"))
	}
	fmt.Fprint(&b, "-- packets --\n")
	names := &portNames{names: map[string]string{}}
	for _, s := range t.steps {
		if s.change != "" {
			fmt.Fprintln(&b, s.change)
			continue
		}
		if s.wait > 0 {
			fmt.Fprintf(&b, "wait %s\n", s.wait)
			continue
		}
		in := packet.Parse(s.in.Frame)
		fmt.Fprintf(&b, "in %s: %s\n", s.in.Interface, names.replace(in.String()))
		fmt.Fprintf(&b, "%s %s\n", s.want.Action, s.want.Reason)
		for _, d := range s.want.Out {
			out := packet.Parse(d.Frame)
			if s.want.Reason == model.ReasonNewFlow {
				names.add(in, out)
			}
			fmt.Fprintf(&b, "out %s: %s\n", d.Interface, names.replace(out.String()))
		}
	}
	return b.String()
}

// portNames maps the source ports and identifiers that a datapath chose to their names.
type portNames struct {
	names map[string]string
}

func (c *portNames) add(in, out packet.Packet) {
	was, now := source(in), source(out)
	if now != "" && was != now && c.names[now] == "" {
		c.names[now] = fmt.Sprintf("$p%d", len(c.names)+1)
	}
}

func source(p packet.Packet) string {
	for _, l := range p {
		switch l := l.(type) {
		case *packet.TCP:
			return fmt.Sprint(l.SrcPort)
		case *packet.UDP:
			return fmt.Sprint(l.SrcPort)
		case *packet.ICMP:
			return fmt.Sprint(l.ID())
		}
	}
	return ""
}

var ports = regexp.MustCompile(`(sport|dport|[(,]id)=(\d+)`)

func (c *portNames) replace(text string) string {
	return ports.ReplaceAllStringFunc(text, func(s string) string {
		key, value, _ := strings.Cut(s, "=")
		if n := c.names[value]; n != "" {
			return key + "=" + n
		}
		return s
	})
}
