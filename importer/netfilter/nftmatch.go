// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// compare reads a condition: the left side is compared with the right.
func (n *nftables) compare(r *rule, left, right *draft.Value, not bool) {
	m := &r.match
	other := func() {
		word := ""
		if not {
			word = "!= "
		}
		m.other = append(m.other, render(left)+" "+word+render(right))
	}
	meta, payload := left.Get("meta", "key").Str(), left.Get("payload")
	switch {
	case meta == "iifname" || meta == "iif":
		ifnames(right, not, &m.in, &m.notIn, other)
	case meta == "oifname" || meta == "oif":
		ifnames(right, not, &m.out, &m.notOut, other)
	case meta == "l4proto" || payload.Get("field").Str() == "protocol" || payload.Get("field").Str() == "nexthdr":
		list := protocolWords(right)
		if not || len(list) != 1 {
			other()
			return
		}
		m.proto = list[0]
	case meta == "nfproto" || meta == "protocol":
		family := map[string]int{"ipv4": 4, "ipv6": 6, "ip": 4, "ip6": 6}[right.Str()]
		if family == 0 || not {
			other()
			return
		}
		m.family = family
	case meta == "mark":
		k, ok := markOf(right.Str())
		if !ok {
			other()
		} else if not {
			m.notMark = &k
		} else {
			m.mark = &k
		}
	case left.Get("fib", "result").Str() == "type" && right.Str() == "local" && !not && len(left.Get("fib", "flags").List()) == 1:
		m.dstLocal = left.Get("fib", "flags").List()[0].Str() == "daddr"
		m.srcLocal = !m.dstLocal
	case payload != nil:
		n.payload(r, payload, right, not, other)
	default:
		other()
	}
}

// payload compares a field of the packet.
func (n *nftables) payload(r *rule, payload, right *draft.Value, not bool, other func()) {
	m := &r.match
	proto, field := payload.Get("protocol").Str(), payload.Get("field").Str()
	switch {
	case (proto == "ip" || proto == "ip6") && (field == "saddr" || field == "daddr"):
		m.family = map[string]int{"ip": 4, "ip6": 6}[proto]
		yes, no, set := &m.src, &m.notSrc, &m.srcSet
		if field == "daddr" {
			yes, no, set = &m.dst, &m.notDst, &m.dstSet
		}
		if name, named := strings.CutPrefix(right.Str(), "@"); named {
			if not || n.set.sets[name] == nil {
				other()
			} else {
				*set = name
			}
			return
		}
		list, err := addressesOf(right)
		switch {
		case err != nil:
			other()
		case not:
			*no = append(*no, list...)
		default:
			*yes = list
		}
	case (proto == "tcp" || proto == "udp" || proto == "sctp" || proto == "th") && (field == "sport" || field == "dport"):
		if proto != "th" {
			_ = m.proto.UnmarshalText([]byte(proto)) // a known word
		}
		list, err := portsIn(right)
		if err != nil {
			other()
			return
		}
		if not {
			list = otherPorts(list)
		}
		if field == "sport" {
			m.sport = list
		} else {
			m.dport = list
		}
	default:
		if proto == "tcp" || proto == "udp" || proto == "icmp" || proto == "icmpv6" {
			_ = m.proto.UnmarshalText([]byte(proto))
		}
		other()
	}
}

// setValues returns the values of an anonymous set, or the one value.
func setValues(v *draft.Value) []*draft.Value {
	if set := v.Get("set"); set != nil {
		return set.List()
	}
	return []*draft.Value{v}
}

func ifnames(v *draft.Value, not bool, yes, no *[]string, other func()) {
	var list []string
	for _, a := range setValues(v) {
		if a.Str() == "" || strings.HasPrefix(a.Str(), "@") {
			other()
			return
		}
		list = append(list, a.Str())
	}
	if not {
		*no = append(*no, list...)
	} else {
		*yes = list
	}
}

// protocolsOf returns the protocols in a match, or nil for other matches.
func protocolsOf(match *draft.Value) []flow.Protocol {
	left := match.Get("left")
	if match.Get("op").Str() == "!=" || left.Get("meta", "key").Str() != "l4proto" && left.Get("payload", "field").Str() != "protocol" {
		return nil
	}
	return protocolWords(match.Get("right"))
}

func protocolWords(v *draft.Value) (list []flow.Protocol) {
	for _, a := range setValues(v) {
		var p flow.Protocol
		word := a.Str()
		if word == "ipv6-icmp" {
			word = "icmpv6"
		}
		if k, err := strconv.ParseUint(word, 10, 8); err == nil {
			p = flow.Protocol(k)
		} else if err := p.UnmarshalText([]byte(word)); err != nil {
			return nil
		}
		list = append(list, p)
	}
	return list
}

// addressesOf reads addresses, prefixes and ranges.
func addressesOf(v *draft.Value) (list []netip.Prefix, err error) {
	for _, a := range setValues(v) {
		switch {
		case a.Get("prefix") != nil:
			p, err := prefixOf(a.Get("prefix", "addr").Str() + "/" + a.Get("prefix", "len").Str())
			if err != nil {
				return nil, err
			}
			list = append(list, p)
		case len(a.Get("range").List()) == 2:
			ends := a.Get("range").List()
			more, err := prefixesOf(ends[0].Str() + "-" + ends[1].Str())
			if err != nil {
				return nil, err
			}
			list = append(list, more...)
		default:
			p, err := prefixOf(a.Str())
			if err != nil || strings.Contains(a.Str(), "/") {
				return nil, fmt.Errorf("%q is not an address", a.Str())
			}
			list = append(list, p)
		}
	}
	return list, nil
}

// portsIn reads single ports and ranges.
func portsIn(v *draft.Value) (list []flow.Ports, err error) {
	for _, a := range setValues(v) {
		text := a.Str()
		if ends := a.Get("range").List(); len(ends) == 2 {
			text = ends[0].Str() + "-" + ends[1].Str()
		}
		if text == "" {
			return nil, fmt.Errorf("not ports")
		}
		more, err := portsOf(text)
		if err != nil {
			return nil, err
		}
		list = append(list, more...)
	}
	return list, nil
}

// renderEntry returns the text of an entry for notes.
func renderEntry(v *draft.Value) string {
	kind, o := v.Fields[0].Key, v.Fields[0].Value
	where := strings.TrimSpace(o.Get("family").Str() + " " + o.Get("table").Str())
	switch kind {
	case "metainfo":
		return "metainfo"
	case "rule":
		var words []string
		for _, e := range o.Get("expr").List() {
			words = append(words, renderStatement(e))
		}
		if c := o.Get("comment").Str(); c != "" {
			words = append(words, strconv.Quote(c))
		}
		words = slices.DeleteFunc(words, func(w string) bool { return w == "" })
		return where + " " + o.Get("chain").Str() + ": " + strings.Join(words, " ")
	case "chain":
		s := "chain " + where + " " + o.Get("name").Str()
		if h := o.Get("hook").Str(); h != "" {
			s += " { type " + o.Get("type").Str() + " hook " + h + " priority " + o.Get("prio").Str() + "; policy " + o.Get("policy").Str() + "; }"
		}
		return s
	}
	return strings.TrimSpace(kind + " " + where + " " + o.Get("name").Str())
}

func renderStatement(e *draft.Value) string {
	if len(e.Fields) == 0 {
		return ""
	}
	key, v := e.Fields[0].Key, e.Fields[0].Value
	switch key {
	case "counter":
		return ""
	case "match":
		op := ""
		if v.Get("op").Str() != "==" && v.Get("op").Str() != "in" {
			op = v.Get("op").Str() + " "
		}
		return render(v.Get("left")) + " " + op + render(v.Get("right"))
	case "jump", "goto":
		return key + " " + v.Get("target").Str()
	case "snat", "dnat", "masquerade", "redirect":
		s := key
		if a := v.Get("addr"); a != nil {
			s += " to " + render(a)
		}
		if p := v.Get("port"); p != nil {
			s += ":" + render(p)
		}
		return s
	case "vmap":
		return render(v.Get("key")) + " vmap " + render(v.Get("data"))
	case "log":
		return "log " + strconv.Quote(v.Get("prefix").Str())
	case "limit":
		return "limit rate " + v.Get("rate").Str() + "/" + v.Get("per").Str()
	case "mangle":
		return render(v.Get("key")) + " set " + render(v.Get("value"))
	case "ct helper":
		return "ct helper set " + v.Str()
	}
	return key
}

// render returns the short text of a value.
func render(v *draft.Value) string {
	if v == nil {
		return ""
	}
	if v.IsArray() {
		var words []string
		for _, i := range v.Items {
			words = append(words, render(i))
		}
		return strings.Join(words, ", ")
	}
	if len(v.Fields) == 0 {
		return v.Str()
	}
	key, inner := v.Fields[0].Key, v.Fields[0].Value
	switch key {
	case "meta", "ct":
		return strings.TrimSpace(map[string]string{"ct": "ct "}[key] + inner.Get("key").Str())
	case "payload":
		return strings.TrimSpace(inner.Get("protocol").Str() + " " + inner.Get("field").Str())
	case "prefix":
		return inner.Get("addr").Str() + "/" + inner.Get("len").Str()
	case "range":
		return strings.ReplaceAll(render(inner), ", ", "-")
	case "set":
		return "{ " + render(inner) + " }"
	case "map":
		return render(inner.Get("key")) + " map " + render(inner.Get("data"))
	case "numgen":
		return "numgen " + inner.Get("mode").Str() + " mod " + inner.Get("mod").Str()
	case "fib":
		return "fib " + render(inner.Get("flags")) + " " + inner.Get("result").Str()
	case "rt":
		return "rt " + inner.Get("key").Str()
	case "tcp option":
		return "tcp option " + inner.Get("name").Str() + " " + inner.Get("field").Str()
	case "concat":
		return strings.ReplaceAll(render(inner), ", ", " . ")
	case "op", "left":
		return renderStatement(&draft.Value{Fields: []draft.Field{{Key: "match", Value: v}}})
	case "&", "|":
		return strings.ReplaceAll(render(inner), ", ", " "+key+" ")
	case "jump", "goto", "accept", "drop", "return":
		return renderStatement(v)
	}
	return strings.TrimSpace(key + " " + render(inner))
}
