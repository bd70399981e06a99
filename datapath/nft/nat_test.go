// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

func TestSourceNAT(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	inside := []prefixT{prefix("10.1.10.0/24")}
	for _, c := range []struct {
		name string
		rule config.NATRule
		want func(answer) bool
	}{
		{"masquerade", config.NATRule{Type: config.NATMasquerade, Source: inside, Out: "wan0"}, nil},
		{"masquerade from anywhere", config.NATRule{Type: config.NATMasquerade, Out: "wan0", FullyRandom: true}, nil},
		{"snat", config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121")}, nil},
		{
			"snat with ports", config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121"), Ports: flow.Ports{First: 50000, Last: 50010}, FullyRandom: true},
			func(a answer) bool { return a.client.Port() >= 50000 && a.client.Port() <= 50010 },
		},
		{"two sources", config.NATRule{Type: config.NATSNAT, Source: append(inside, prefix("10.1.20.0/24")), Out: "wan0", To: snatTo("211.155.226.121")}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.rule.Name = "office"
			b.apply(&config.Config{NAT: []config.NATRule{c.rule}})
			for range 3 {
				a, err := b.tcp("pc", "", "203.0.113.1:80")
				if err != nil {
					t.Fatalf("%v\n%s", err, b.ruleset())
				}
				if a.client.Addr() != addr("211.155.226.121") || c.want != nil && !c.want(a) {
					t.Errorf("the server saw %s", a.client)
				}
			}
		})
	}
	t.Run("except", func(t *testing.T) {
		b.apply(&config.Config{NAT: []config.NATRule{{
			Name: "office", Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121"),
			Except: []prefixT{prefix("203.0.113.9/32")},
		}}})
		a, err := b.tcp("pc", "", "203.0.113.1:80")
		if err != nil || a.client.Addr() != addr("211.155.226.121") {
			t.Errorf("server saw %v, %v", a.client, err)
		}
		if c, err := b.dial("udp", "pc", "", "203.0.113.9:53"); err == nil {
			_, _ = c.Write([]byte("x"))
			c.Close()
		}
		untranslated := 0
		for _, f := range b.tracked() {
			if f.Forward.DstIP.String() == "203.0.113.9" && f.Reverse.DstIP.Equal(f.Forward.SrcIP) {
				untranslated++
			}
		}
		if untranslated != 1 {
			t.Errorf("%d untranslated flows to the exception, want 1", untranslated)
		}
	})
}

func snatTo(addresses ...string) (to config.Target) {
	for _, a := range addresses {
		to.Addresses = append(to.Addresses, pool(a, a))
	}
	return to
}

func TestPortForwardWithHairpin(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "web")
	office := config.NATRule{Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", To: snatTo("211.155.226.121")}
	l := listen("211.155.226.121", "8080")
	forward := config.NATRule{
		Name: "http", Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.2"), Port: 80},
	}
	b.apply(&config.Config{NAT: []config.NATRule{office, forward}})
	a, err := b.tcp("outside", "203.0.113.1", "211.155.226.121:8080")
	if err != nil || a.client.Addr() != addr("203.0.113.1") {
		t.Errorf("from outside: server saw %v, %v\n%s", a.client, err, b.ruleset())
	}
	a, err = b.tcp("pc", "", "211.155.226.121:8080")
	if err != nil || a.client.Addr() != addr("10.1.10.1") {
		t.Errorf("from inside: server saw %v, %v\n%s", a.client, err, b.ruleset())
	}
	forward.Hairpin = config.SwitchOff
	b.apply(&config.Config{NAT: []config.NATRule{office, forward}})
	if _, err := b.dialFor(300*time.Millisecond, "tcp", "pc", "", "211.155.226.121:8080"); err == nil {
		t.Error("hairpin is off, but a connection was opened")
	}
}

func TestStaticAndPrefixTranslation(t *testing.T) {
	b := newBench(t, lab.IPv6Only())
	b.tcpServers(80, "outside", "dmz", "old")
	b.udpServers(53, "outside", "dmz", "old")
	b.apply(&config.Config{NAT: []config.NATRule{
		{Name: "dmz", Type: config.NATStatic, External: prefix("198.51.100.0/24"), Internal: prefix("10.9.0.0/24")},
		{Name: "renumber", Type: config.NATNPT66, External: prefix("2001:db8:a::/48"), Internal: prefix("fd00:a::/48")},
	}})
	for _, c := range []struct{ from, to, server, seen string }{
		{"outside", "198.51.100.2", "dmz", "192.0.2.2"},
		{"dmz", "192.0.2.2", "outside", "198.51.100.2"},
	} {
		for _, ask := range []func() (answer, error){
			func() (answer, error) { return b.tcp(c.from, "", c.to+":80") },
			func() (answer, error) { return b.udp(c.from, "", c.to+":53") },
		} {
			a, err := ask()
			if err != nil || a.server != c.server || a.client.Addr() != addr(c.seen) {
				t.Errorf("%s to %s: answered by %q, who saw %v, %v", c.from, c.to, a.server, a.client, err)
			}
		}
	}
	mapped := npt66(addr("fd00:a::2"), prefix("fd00:a::/48"), prefix("2001:db8:a::/48"))
	for range 2 {
		a, err := b.tcp("old", "", "[2001:db8:f::2]:80")
		if err != nil || a.server != "outside" || a.client.Addr() != mapped {
			t.Errorf("out: answered by %q, who saw %v, want %v, %v\n%s", a.server, a.client, mapped, err, b.ruleset())
		}
		a, err = b.udp("outside", "", fmt.Sprintf("[%s]:53", mapped))
		if err != nil || a.server != "old" || a.client.Addr() != addr("2001:db8:f::2") {
			t.Errorf("in: answered by %q, who saw %v, %v", a.server, a.client, err)
		}
	}
}
