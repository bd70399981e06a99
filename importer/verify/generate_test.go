// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// chance makes random rules. Addresses, ports and interfaces are few, so that rules overlap.
type chance struct{ *rand.Rand }

func pick[T any](c chance, list ...T) T { return list[c.IntN(len(list))] }

func (c chance) one(in int) bool { return c.IntN(in) == 0 }

// rule is a rule before it is written for one of the programs.
type rule struct {
	in, out        string // with "!" in front for any other
	src, dst       string
	proto          string
	dport          string // "80", "8000:8010", "25,465"
	state          string
	addressType    bool // the destination is the gateway's own
	action, target string
	chain          string // for a jump
}

// ruleSet has the rules of each chain: "nat PREROUTING".
type ruleSet struct {
	policies map[string]string
	chains   map[string][]rule
	order    []string
}

func (s *ruleSet) add(chain string, r rule) {
	if s.chains[chain] == nil {
		s.order = append(s.order, chain)
	}
	s.chains[chain] = append(s.chains[chain], r)
}

func (c chance) ruleSet() *ruleSet {
	s := &ruleSet{policies: map[string]string{}, chains: map[string][]rule{}}
	for range c.IntN(4) {
		s.add("nat PREROUTING", c.destination())
	}
	if c.one(4) {
		r := c.destination()
		r.action, r.chain = "jump", "FORWARDS"
		for range 1 + c.IntN(3) {
			s.add("nat FORWARDS", c.destination())
		}
		s.add("nat PREROUTING", r)
		if c.one(3) {
			s.add("nat OUTPUT", rule{action: "jump", chain: "FORWARDS", addressType: true})
		}
	}
	for range c.IntN(4) {
		s.add("nat POSTROUTING", c.source())
	}
	if c.one(5) { // a relay or hairpin: a packet with a translated destination gets another source too
		for _, r := range s.chains["nat PREROUTING"] {
			if r.action == "DNAT" && !strings.Contains(r.target, "-10.") {
				host, port, _ := strings.Cut(r.target, ":")
				m := rule{dst: host, action: "MASQUERADE"}
				if port != "" && !strings.Contains(port, "-") && c.one(2) {
					m.proto, m.dport = r.proto, port
				}
				if c.one(3) {
					m.action, m.target = "SNAT", pick(c, "10.0.2.1", "198.51.100.10")
				}
				s.add("nat POSTROUTING", m)
			}
		}
	}
	if c.one(3) {
		for range 1 + c.IntN(4) {
			s.add("filter FORWARD", c.filter(true))
		}
		s.policies["filter FORWARD"] = pick(c, "ACCEPT", "ACCEPT", "DROP")
	}
	if c.one(4) {
		for range 1 + c.IntN(3) {
			r := c.filter(false)
			r.out = ""
			s.add("filter INPUT", r)
		}
		s.policies["filter INPUT"] = pick(c, "ACCEPT", "DROP")
	}
	if c.one(5) {
		s.add("mangle FORWARD", rule{out: pick(c, "", "wan0", "wan1", "lan0"), proto: "tcp", action: "TCPMSS"})
	}
	if len(s.order) == 0 {
		s.add("nat POSTROUTING", c.source())
	}
	return s
}

func (c chance) interfaceName(not bool) string {
	s := pick(c, "", "", "wan0", "wan0", "wan1", "lan0", "dmz0")
	if s != "" && not && c.one(5) {
		s = "!" + s
	}
	return s
}

func (c chance) network() string {
	return pick(c, "10.0.2.0/24", "10.0.3.0/24", "10.0.0.0/16", "10.0.2.4", "10.0.3.3", "10.0.2.0/29")
}

func (c chance) ports(r *rule) {
	if c.one(4) {
		return
	}
	r.proto = pick(c, "tcp", "tcp", "udp")
	if c.one(6) {
		return
	}
	r.dport = pick(c, "80", "80", "443", "53", "22", "8000:8010", "25,465")
}

func (c chance) destination() (r rule) {
	r.in = c.interfaceName(true)
	if c.one(5) {
		r.src = pick(c, c.network(), "!10.0.2.0/24", "203.0.113.64/26", "192.0.2.9")
	}
	r.dst = pick(c, "", "198.51.100.1", "198.51.100.1", "198.51.100.10", "203.0.113.1", "8.8.8.8", "198.51.100.0/28", "!10.0.0.0/8")
	if r.dst == "" && c.one(2) {
		r.addressType = true
	}
	c.ports(&r)
	if c.one(8) && r.proto != "" {
		r.state = "NEW"
	}
	switch c.IntN(10) {
	case 0:
		r.action = pick(c, "ACCEPT", "RETURN")
	case 1:
		r.action = "LOG"
	case 2:
		if r.proto == "" {
			r.proto, r.dport = "tcp", "80"
		}
		r.action, r.target = "REDIRECT", "3128"
	default:
		r.action, r.target = "DNAT", pick(c, "10.0.2.2", "10.0.2.2", "10.0.2.3", "10.0.3.2", "192.0.2.200", "10.0.2.5-10.0.2.6")
		if r.proto != "" && c.one(2) {
			r.target += ":" + pick(c, "80", "8080", "8000-8010")
		}
	}
	return r
}

func (c chance) source() (r rule) {
	r.out = c.interfaceName(true)
	r.src = pick(c, "", c.network(), c.network(), "10.0.0.0/16", "!10.0.2.0/24")
	if c.one(3) {
		r.dst = pick(c, "!192.168.0.0/16", "!10.0.0.0/8", "192.0.2.0/24", "10.0.2.2", "10.0.3.2", "192.0.2.200", "192.0.2.9")
	}
	if c.one(5) {
		c.ports(&r)
	}
	switch c.IntN(8) {
	case 0, 1:
		r.action = pick(c, "ACCEPT", "RETURN")
		if r.dst == "" {
			r.dst = pick(c, "192.0.2.0/24", "10.0.0.0/8", "192.0.2.9", "203.0.113.77")
		}
	case 2, 3:
		r.action, r.target = "SNAT", pick(c, "198.51.100.1", "198.51.100.10", "203.0.113.1", "10.0.2.1")
		if r.proto != "" && c.one(3) {
			r.target += ":30000-30100"
		}
	default:
		r.action = "MASQUERADE"
	}
	return r
}

func (c chance) filter(forward bool) (r rule) {
	r.in = c.interfaceName(true)
	if forward {
		r.out = c.interfaceName(true)
	}
	if c.one(3) {
		r.src = pick(c, c.network(), "203.0.113.64/26", "!10.0.0.0/8")
	}
	if c.one(3) {
		r.dst = pick(c, c.network(), "192.0.2.0/24", "10.0.2.2")
	}
	c.ports(&r)
	if c.one(3) {
		r.state = pick(c, "RELATED,ESTABLISHED", "NEW", "INVALID")
	}
	r.action = pick(c, "ACCEPT", "ACCEPT", "DROP", "REJECT", "LOG")
	return r
}

// iptables writes the set as iptables-save does.
func (s *ruleSet) iptables() string {
	var b strings.Builder
	b.WriteString("# Generated by iptables-save v1.8.9\n")
	base := map[string][]string{"nat": {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"}, "filter": {"INPUT", "FORWARD", "OUTPUT"}, "mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}}
	for _, table := range []string{"mangle", "nat", "filter"} {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, c := range base[table] {
			policy := s.policies[table+" "+c]
			if policy == "" {
				policy = "ACCEPT"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", c, policy)
		}
		if s.chains[table+" FORWARDS"] != nil {
			b.WriteString(":FORWARDS - [0:0]\n")
		}
		for _, chain := range s.order {
			t, name, _ := strings.Cut(chain, " ")
			if t != table {
				continue
			}
			for _, r := range s.chains[chain] {
				fmt.Fprintf(&b, "-A %s%s\n", name, r.iptables(name == "OUTPUT"))
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func (r rule) iptables(output bool) string {
	var b strings.Builder
	word := func(option, value string) {
		if rest, not := strings.CutPrefix(value, "!"); not {
			b.WriteString(" ! " + option + " " + rest)
		} else if value != "" {
			b.WriteString(" " + option + " " + value)
		}
	}
	word("-s", r.src)
	word("-d", r.dst)
	if !output {
		word("-i", r.in)
	}
	word("-o", r.out)
	word("-p", r.proto)
	if r.addressType {
		b.WriteString(" -m addrtype --dst-type LOCAL")
	}
	if r.state != "" {
		b.WriteString(" -m conntrack --ctstate " + r.state)
	}
	if r.dport != "" {
		if strings.Contains(r.dport, ",") {
			b.WriteString(" -m multiport --dports " + r.dport)
		} else {
			b.WriteString(" -m " + r.proto + " --dport " + r.dport)
		}
	}
	switch r.action {
	case "jump":
		b.WriteString(" -j " + r.chain)
	case "DNAT":
		b.WriteString(" -j DNAT --to-destination " + r.target)
	case "SNAT":
		b.WriteString(" -j SNAT --to-source " + r.target)
	case "REDIRECT":
		b.WriteString(" -j REDIRECT --to-ports " + r.target)
	case "TCPMSS":
		b.WriteString(" -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu")
	default:
		b.WriteString(" -j " + r.action)
	}
	return b.String()
}

// nftables writes the set as a file for nft -f.
func (s *ruleSet) nftables() string {
	var b strings.Builder
	hooks := map[string]string{
		"nat PREROUTING": "nat hook prerouting priority dstnat", "nat OUTPUT": "nat hook output priority -100", "nat POSTROUTING": "nat hook postrouting priority srcnat",
		"filter FORWARD": "filter hook forward priority filter", "filter INPUT": "filter hook input priority filter", "mangle FORWARD": "filter hook forward priority mangle",
	}
	for _, table := range []string{"mangle", "nat", "filter"} {
		fmt.Fprintf(&b, "table ip %s {\n", table)
		for _, user := range []bool{true, false} { // chains before jumps to them
			for _, chain := range s.order {
				t, name, _ := strings.Cut(chain, " ")
				if t != table || user != (hooks[chain] == "") {
					continue
				}
				fmt.Fprintf(&b, "  chain %s {\n", name)
				if hook := hooks[chain]; hook != "" {
					policy := "accept"
					if s.policies[chain] == "DROP" {
						policy = "drop"
					}
					fmt.Fprintf(&b, "    type %s; policy %s;\n", hook, policy)
				}
				for _, r := range s.chains[chain] {
					fmt.Fprintf(&b, "   %s\n", r.nftables(name == "OUTPUT"))
				}
				b.WriteString("  }\n")
			}
		}
		b.WriteString("}\n")
	}
	return b.String()
}

func (r rule) nftables(output bool) string {
	var b strings.Builder
	word := func(option, value string) {
		if rest, not := strings.CutPrefix(value, "!"); not {
			b.WriteString(" " + option + " != " + rest)
		} else if value != "" {
			b.WriteString(" " + option + " " + value)
		}
	}
	quoted := func(s string) string {
		if s == "" {
			return ""
		}
		not := strings.HasPrefix(s, "!")
		s = `"` + strings.TrimPrefix(s, "!") + `"`
		if not {
			s = "!" + s
		}
		return s
	}
	if !output {
		word("iifname", quoted(r.in))
	}
	word("oifname", quoted(r.out))
	word("ip saddr", r.src)
	word("ip daddr", r.dst)
	switch {
	case r.dport != "":
		value := strings.ReplaceAll(r.dport, ":", "-")
		if strings.Contains(value, ",") {
			value = "{ " + value + " }"
		}
		word(r.proto+" dport", value)
	case r.proto != "":
		word("meta l4proto", r.proto)
	}
	if r.addressType {
		b.WriteString(" fib daddr type local")
	}
	if r.state != "" {
		b.WriteString(" ct state " + strings.ToLower(r.state))
	}
	switch r.action {
	case "jump":
		b.WriteString(" jump " + r.chain)
	case "DNAT":
		b.WriteString(" dnat to " + r.target)
	case "SNAT":
		b.WriteString(" snat to " + r.target)
	case "REDIRECT":
		b.WriteString(" redirect to :" + r.target)
	case "TCPMSS":
		b.WriteString(" tcp flags syn tcp option maxseg size set rt mtu")
	case "LOG":
		b.WriteString(` log prefix "x "`)
	default:
		b.WriteString(" " + strings.ToLower(r.action))
	}
	return b.String()
}
