// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// options reads the words of one iptables rule.
type options struct {
	words  []string
	module string // name of the match after the last -m
	r      *rule
}

// parse reads all words. An unknown option includes the words up to the next one that begins with a
// dash.
func (o *options) parse() {
	for len(o.words) > 0 {
		word := o.next()
		not := word == "!"
		if not {
			word = o.next()
		}
		if !o.match(word, not) && !o.target(word) {
			text := word
			for len(o.words) > 0 && !strings.HasPrefix(o.words[0], "-") && o.words[0] != "!" {
				text += " " + o.next()
			}
			o.addUnsupported(not, text)
		}
	}
	if o.r.do == doDNAT { // stores the client for the rule that checks it
		o.r.match.other = slices.DeleteFunc(o.r.match.other, func(s string) bool { return s == "-m recent --set" })
	}
}

// next takes one word, "" at the end.
func (o *options) next() string {
	if len(o.words) == 0 {
		return ""
	}
	w := o.words[0]
	o.words = o.words[1:]
	return w
}

// addUnsupported records a condition without an equivalent.
func (o *options) addUnsupported(not bool, text string) {
	if o.module != "" {
		text = "-m " + o.module + " " + text
	}
	if not {
		text = "! " + text
	}
	o.r.match.other = append(o.r.match.other, text)
}

// match parses one condition, and reports whether it is one.
func (o *options) match(word string, not bool) bool {
	m := &o.r.match
	switch word {
	case "-m", "--match":
		o.module = o.next()
	case "--comment":
		o.r.name = o.next()
	case "-s", "--source", "--src":
		o.prefixes(word, not, &m.src, &m.notSrc)
	case "-d", "--destination", "--dst":
		o.prefixes(word, not, &m.dst, &m.notDst)
	case "-i", "--in-interface":
		o.iface(not, &m.in, &m.notIn)
	case "-o", "--out-interface":
		o.iface(not, &m.out, &m.notOut)
	case "-p", "--protocol":
		o.protocol(not)
	case "--sport", "--source-port", "--sports", "--source-ports":
		o.ports(word, not, &m.sport)
	case "--dport", "--destination-port", "--dports", "--destination-ports":
		o.ports(word, not, &m.dport)
	case "--src-range", "--dst-range":
		list, err := prefixesOf(o.next())
		switch {
		case err != nil || not:
			o.addUnsupported(not, word)
		case word == "--src-range":
			m.src = list
		default:
			m.dst = list
		}
	case "--dst-type", "--src-type":
		o.addressType(word, not)
	case "--match-set":
		o.matchSet(not)
	case "--mark":
		o.mark(not)
	case "--limit":
		m.rate = o.next()
		if m.burst == 0 {
			m.burst = 5
		}
	case "--limit-burst":
		m.burst, _ = strconv.Atoi(o.next())
	case "--mode", "--probability", "--every", "--packet":
		o.statistic(word)
	case "--rcheck", "--update":
		m.remember = max(m.remember, 1)
	case "--seconds":
		m.remember, _ = strconv.Atoi(o.next())
	case "--reap", "--rsource", "--set":
		if word == "--set" && o.module == "recent" {
			o.addUnsupported(not, word)
		}
	case "--name", "--mask":
		o.next()
	default:
		return false
	}
	return true
}

func (o *options) prefixes(word string, not bool, yes, no *[]netip.Prefix) {
	text := o.next()
	list, err := prefixesOf(text)
	switch {
	case err != nil:
		o.addUnsupported(not, word+" "+text)
	case not:
		*no = append(*no, list...)
	default:
		*yes = list
	}
}

func (o *options) iface(not bool, yes, no *[]string) {
	name := o.next()
	if strings.HasSuffix(name, "+") {
		name = strings.TrimSuffix(name, "+") + "*"
	}
	switch {
	case name == "*" && !not: // matches any value
	case not:
		*no = append(*no, name)
	default:
		*yes = []string{name}
	}
}

func (o *options) protocol(not bool) {
	word := o.next()
	if word == "all" || word == "0" {
		return
	}
	if word == "ipv6-icmp" || word == "icmp6" {
		word = "icmpv6"
	}
	var p flow.Protocol
	if n, err := strconv.ParseUint(word, 10, 8); err == nil {
		p = flow.Protocol(n)
	} else if err := p.UnmarshalText([]byte(word)); err != nil {
		o.addUnsupported(not, "-p "+word)
		return
	}
	if not {
		o.addUnsupported(true, "-p "+word)
		return
	}
	o.r.match.proto = p
}

func (o *options) ports(word string, not bool, to *[]flow.Ports) {
	text := o.next()
	list, err := portsOf(text)
	if err != nil {
		o.addUnsupported(not, word+" "+text)
		return
	}
	if not {
		list = otherPorts(list)
	}
	*to = list
}

func (o *options) addressType(word string, not bool) {
	kind := o.next()
	local := &o.r.match.dstLocal
	if word == "--src-type" {
		local = &o.r.match.srcLocal
	}
	if kind == "LOCAL" && !not && (len(o.words) == 0 || !strings.HasPrefix(o.words[0], "--limit-iface")) {
		*local = true
		return
	}
	o.addUnsupported(not, word+" "+kind)
}

func (o *options) matchSet(not bool) {
	name, ways := o.next(), o.next()
	switch {
	case not || ways != "src" && ways != "dst":
		o.addUnsupported(not, "--match-set "+name+" "+ways)
	case ways == "src":
		o.r.match.srcSet = name
	default:
		o.r.match.dstSet = name
	}
}

func (o *options) mark(not bool) {
	text := o.next()
	k, ok := markOf(text)
	switch {
	case o.module != "mark" || !ok:
		o.addUnsupported(not, "--mark "+text)
	case not:
		o.r.match.notMark = &k
	default:
		o.r.match.mark = &k
	}
}

// markOf reads "0x4000/0x4000".
func markOf(text string) (k packetMark, ok bool) {
	value, mask, masked := strings.Cut(text, "/")
	v, err1 := strconv.ParseUint(value, 0, 32)
	m, err2 := uint64(0xffffffff), error(nil)
	if masked {
		m, err2 = strconv.ParseUint(mask, 0, 32)
	}
	return packetMark{uint32(v), uint32(m)}, err1 == nil && err2 == nil
}

func (o *options) statistic(word string) {
	m, value := &o.r.match, o.next()
	switch word {
	case "--mode":
		m.inOrder = value == "nth"
	case "--probability":
		m.share, _ = strconv.ParseFloat(value, 64)
	case "--every":
		if n, err := strconv.Atoi(value); err == nil && n > 0 {
			m.share = 1 / float64(n)
		}
	}
	if !(m.share >= 0 && m.share <= 1) {
		m.share = 0
		o.addUnsupported(false, word+" "+value)
	}
}

// prefixesOf reads addresses, prefixes with a length or a mask, and ranges, separated by commas.
func prefixesOf(text string) (list []netip.Prefix, err error) {
	for _, s := range strings.Split(text, ",") {
		if lo, hi, ranged := strings.Cut(s, "-"); ranged {
			first, err1 := netip.ParseAddr(lo)
			last, err2 := netip.ParseAddr(hi)
			if err1 != nil || err2 != nil || first.BitLen() != last.BitLen() || last.Less(first) {
				return nil, fmt.Errorf("%q is not a range", s)
			}
			list = append(list, rangePrefixes(first, last)...)
			continue
		}
		p, err := prefixOf(s)
		if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

func prefixOf(s string) (netip.Prefix, error) {
	address, mask, masked := strings.Cut(s, "/")
	a, err := netip.ParseAddr(address)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, fmt.Errorf("%q is not an address", s)
	}
	a = a.Unmap()
	bits := a.BitLen()
	if m, err := netip.ParseAddr(mask); masked && err == nil && m.BitLen() == a.BitLen() {
		bits = 0
		for _, b := range m.AsSlice() {
			for ; b&0x80 != 0; b <<= 1 {
				bits++
			}
			if b != 0 {
				return netip.Prefix{}, fmt.Errorf("mask %s is not a prefix length", mask)
			}
		}
		if whole := netip.PrefixFrom(m, bits).Masked().Addr(); whole != m {
			return netip.Prefix{}, fmt.Errorf("mask %s is not a prefix length", mask)
		}
	} else if masked {
		if bits, err = strconv.Atoi(mask); err != nil {
			return netip.Prefix{}, fmt.Errorf("%q is not a prefix", s)
		}
	}
	p, err := a.Prefix(bits)
	return p, err
}

// rangePrefixes returns the prefixes of a range of addresses.
func rangePrefixes(first, last netip.Addr) (list []netip.Prefix) {
	for a := first; a.IsValid() && a.Compare(last) <= 0; {
		bits := a.BitLen()
		for bits > 0 {
			p := netip.PrefixFrom(a, bits-1)
			if p.Masked().Addr() != a || lastOf(p).Compare(last) > 0 {
				break
			}
			bits--
		}
		p := netip.PrefixFrom(a, bits)
		list = append(list, p)
		a = lastOf(p).Next()
	}
	return list
}

// lastOf returns the highest address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	host := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), uint(len(b)*8-p.Bits())), big.NewInt(1))
	n := new(big.Int).Or(new(big.Int).SetBytes(b), host)
	a, _ := netip.AddrFromSlice(n.FillBytes(make([]byte, len(b))))
	return a
}

// portsOf reads ports and ranges, "80,443,8000:8080". 0:65535 and an empty list are all ports.
func portsOf(text string) (list []flow.Ports, err error) {
	for _, s := range strings.Split(text, ",") {
		lo, hi, ranged := strings.Cut(s, ":")
		if !ranged {
			lo, hi, ranged = strings.Cut(s, "-")
		}
		if !ranged {
			hi = lo
		}
		first, err1 := portOf(lo, 0)
		last, err2 := portOf(hi, 65535)
		if err1 != nil || err2 != nil || last < first {
			return nil, fmt.Errorf("%q: not ports", s)
		}
		list = append(list, flow.Ports{First: first, Last: last})
	}
	return list, nil
}

var serviceNames = map[string]uint16{
	"ftp": 21, "ssh": 22, "telnet": 23, "smtp": 25, "domain": 53, "bootps": 67, "bootpc": 68, "tftp": 69, "http": 80, "ntp": 123,
	"snmp": 161, "https": 443, "ldap": 389, "submission": 587, "sip": 5060,
}

func portOf(s string, empty uint16) (uint16, error) {
	if s == "" {
		return empty, nil
	}
	if p, ok := serviceNames[s]; ok {
		return p, nil
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}

// otherPorts returns the ports that are not in the list.
func otherPorts(list []flow.Ports) (rest []flow.Ports) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b flow.Ports) int { return int(a.First) - int(b.First) })
	next := 1 // port 0 is not used
	for _, r := range list {
		if int(r.First) > next {
			rest = append(rest, flow.Ports{First: uint16(next), Last: r.First - 1})
		}
		next = max(next, int(r.Last)+1)
	}
	if next <= 65535 {
		rest = append(rest, flow.Ports{First: uint16(next), Last: 65535})
	}
	return rest
}
