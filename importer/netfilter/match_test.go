// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/flow"
)

// sent is a packet as far as a match looks at it.
type sent struct {
	in, out  string
	src, dst netip.Addr
	proto    flow.Protocol
	dport    uint16
}

// matches is the meaning of a match, for one packet.
func (p sent) matches(m match) bool {
	name := func(n string, yes, no []string) bool {
		is := func(x string) bool { return nameWithin(n, x) }
		return (len(yes) == 0 || slices.ContainsFunc(yes, is)) && !slices.ContainsFunc(no, is)
	}
	address := func(a netip.Addr, yes, no []netip.Prefix) bool {
		is := func(x netip.Prefix) bool { return x.Contains(a) }
		return (len(yes) == 0 || slices.ContainsFunc(yes, is)) && !slices.ContainsFunc(no, is)
	}
	ports := len(m.dport) == 0 || slices.ContainsFunc(m.dport, func(r flow.Ports) bool { return r.First <= p.dport && p.dport <= r.Last })
	return name(p.in, m.in, m.notIn) && name(p.out, m.out, m.notOut) && address(p.src, m.src, m.notSrc) && address(p.dst, m.dst, m.notDst) &&
		(m.proto == flow.Any || m.proto == p.proto) && ports
}

// chance generates matches and packets with few values, so that they often agree.
type chance struct{ *rand.Rand }

func pick[T any](c chance, list ...T) T { return list[c.IntN(len(list))] }

func (c chance) names() []string {
	return pick(c, nil, nil, []string{"wan0"}, []string{"lan0"}, []string{"wan*"}, []string{"wan0", "lan0"})
}

func (c chance) prefixes() []netip.Prefix {
	p := netip.MustParsePrefix
	return pick(c, nil, nil, []netip.Prefix{p("10.0.0.0/8")}, []netip.Prefix{p("10.1.0.0/16")}, []netip.Prefix{p("10.1.2.3/32"), p("192.0.2.0/24")},
		[]netip.Prefix{p("192.0.2.1/32")})
}

func (c chance) match() (m match) {
	m.in, m.out, m.src, m.dst = c.names(), c.names(), c.prefixes(), c.prefixes()
	if c.IntN(3) == 0 {
		m.notIn, m.notDst = c.names(), c.prefixes()
	}
	m.proto = pick(c, flow.Any, flow.TCP, flow.UDP)
	m.dport = pick(c, nil, nil, []flow.Ports{{First: 80, Last: 80}}, []flow.Ports{{First: 53, Last: 80}, {First: 443, Last: 443}})
	return m
}

func (c chance) packet() sent {
	a := func() netip.Addr {
		return netip.MustParseAddr(pick(c, "10.0.0.1", "10.1.2.3", "10.1.9.9", "192.0.2.1", "192.0.2.2", "203.0.113.1"))
	}
	return sent{in: pick(c, "wan0", "wan1", "lan0"), out: pick(c, "wan0", "wan1", "lan0"), src: a(), dst: a(), proto: pick(c, flow.TCP, flow.UDP),
		dport: pick(c, uint16(53), 80, 81, 443)}
}

// TestMatches compares the computed relations of matches with their effect on single packets.
func TestMatches(t *testing.T) {
	c := chance{rand.New(rand.NewPCG(1, 2))}
	met, covered := 0, 0
	for range 20000 {
		a, b := c.match(), c.match()
		both, possible := a.intersect(b)
		covers := a.includes(b)
		for range 20 {
			p := c.packet()
			inA, inB := p.matches(a), p.matches(b)
			if want := inA && inB; want && !possible || possible && p.matches(both) != want {
				t.Fatalf("%+v\nand %+v\nare %+v, %t, of which %+v is not what it is of both", a, b, both, possible, p)
			}
			if inB && !inA && covers {
				t.Fatalf("%+v\ncovers %+v,\nbut not %+v", a, b, p)
			}
			if inA && inB {
				met++
			}
			if inB && covers {
				covered++
			}
		}
	}
	if met < 1000 || covered < 100 {
		t.Errorf("%d packets met both, %d a covered match: the test says little", met, covered)
	}
}

// TestCover: a range of addresses is the prefixes that it is covered by.
func TestCover(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1-10.0.0.1":               "10.0.0.1/32",
		"10.0.0.0-10.0.0.255":             "10.0.0.0/24",
		"10.0.0.1-10.0.0.6":               "10.0.0.1/32 10.0.0.2/31 10.0.0.4/31 10.0.0.6/32",
		"0.0.0.0-255.255.255.255":         "0.0.0.0/0",
		"255.255.255.254-255.255.255.255": "255.255.255.254/31",
		"2001:db8::-2001:db8::3":          "2001:db8::/126",
	} {
		list, err := prefixesOf(text)
		var words []string
		for _, p := range list {
			words = append(words, p.String())
		}
		if got := strings.Join(words, " "); err != nil || got != want {
			t.Errorf("%s: got %q, %v; want %q", text, got, err, want)
		}
	}
	for _, bad := range []string{"10.0.0.2-10.0.0.1", "10.0.0.1-2001:db8::", "10.0.0.0/33", "10.0.0.0/255.0.255.0", "x", ""} {
		if list, err := prefixesOf(bad); err == nil {
			t.Errorf("%q: %v", bad, list)
		}
	}
}

// TestLoops: chains that call each other end in an error.
func TestLoops(t *testing.T) {
	for _, text := range []string{
		"*nat\n:PREROUTING ACCEPT [0:0]\n:a - [0:0]\n:b - [0:0]\n-A PREROUTING -j a\n-A a -j b\n-A b -j a\nCOMMIT\n",
		"*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j PREROUTING\nCOMMIT\n",
	} {
		if _, err := IPTables(text, Options{}); err == nil || !strings.Contains(err.Error(), "more than 32 deep") {
			t.Errorf("got %v", err)
		}
	}
}
