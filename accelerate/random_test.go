// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

var (
	sets = flag.Int("sets", 20, "random rule sets that TestRandomRules compares")
	seed = flag.Uint64("seed", 1, "of the first rule set of TestRandomRules")
)

// phrase is a part of a rule in the languages of iptables and nft.
type phrase struct{ iptables, nft string }

func (p phrase) in(by string) string {
	if by == "nft" {
		return p.nft
	}
	return p.iptables
}

// ruleSet generates rules. The same random numbers make the same rules in each language.
type ruleSet struct {
	r  *rand.Rand
	by string
	// single reports whether a rule depends on single packets.
	single bool
}

var (
	protocols = []string{"tcp", "udp"}
	services  = []string{"10.0.2.2:7", "10.0.2.2:80", "10.0.2.3:80", "192.0.2.10:80", "192.0.2.10:443", "10.0.1.1:8080"}
	states    = []string{"NEW", "ESTABLISHED", "RELATED,ESTABLISHED", "INVALID"}
	// perPacket are conditions with a result that depends on the packet.
	perPacket = []phrase{
		{"-m length --length 100:400", "meta length 100-400"},
		{"-m ttl --ttl-lt 64", "ip ttl < 64"},
		{"-m tos --tos 0x10/0x10", "ip dscp & 0x04 == 0x04"},
		{"-p tcp -m tcp --tcp-flags PSH PSH", "tcp flags & psh == psh"},
	}
	// changes are statements that change the packet.
	changes = []phrase{
		{"-j TTL --ttl-set 99", "ip ttl set 99"},
		{"-j DSCP --set-dscp 9", "ip dscp set 9"},
	}
)

func oneOf[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// conditions returns up to two conditions that all packets of a direction have in common.
func (s *ruleSet) conditions(hook string) (out []phrase) {
	for range s.r.IntN(3) {
		proto, port := oneOf(s.r, protocols), oneOf(s.r, []int{7, 80, 443, 8080, 40001, 40004})
		all := []phrase{
			{fmt.Sprintf("-p %s -m %s --dport %d", proto, proto, port), fmt.Sprintf("%s dport %d", proto, port)},
			{fmt.Sprintf("-p %s -m %s --sport %d", proto, proto, port), fmt.Sprintf("%s sport %d", proto, port)},
			{"-p " + proto, "meta l4proto " + proto},
			{"-s 10.0.1.0/24", "ip saddr 10.0.1.0/24"},
			{"-d 10.0.2.2/32", "ip daddr 10.0.2.2"},
			{"! -d 10.0.2.3/32", "ip daddr != 10.0.2.3"},
			{"-m mark --mark 1", "meta mark 1"},
			{"-m connmark --mark 1", "ct mark 1"},
		}
		if hook != "POSTROUTING" {
			all = append(all, phrase{"-i lan0", "iifname lan0"}, phrase{"! -i lan0", "iifname != lan0"})
		}
		if hook != "PREROUTING" {
			all = append(all, phrase{"-o wan0", "oifname wan0"})
		}
		one := oneOf(s.r, all)
		word := func(p phrase) string { return strings.TrimPrefix(p.iptables, "! ")[:2] }
		repeated := false
		for _, p := range out {
			repeated = repeated || word(p) == word(one) // iptables accepts an option once
		}
		if !repeated {
			out = append(out, one)
		}
	}
	return out
}

// line returns one rule of a chain.
func (s *ruleSet) line(chain string, parts ...phrase) string {
	var words []string
	if s.by != "nft" {
		words = append(words, "-A", chain)
	}
	for _, p := range parts {
		words = append(words, p.in(s.by))
	}
	return strings.Join(words, " ") + "\n"
}

// filter returns the rules of a chain of the table filter or mangle.
func (s *ruleSet) filter(table, hook string, jumps []string) (out string) {
	for range s.r.IntN(5) {
		parts := s.conditions(hook)
		if s.r.IntN(3) == 0 {
			state := oneOf(s.r, states)
			parts = append(parts, phrase{"-m conntrack --ctstate " + state, "ct state " + strings.ToLower(state)})
		}
		narrow := false
		if s.single && s.r.IntN(3) == 0 {
			one := oneOf(s.r, perPacket)
			if narrow = s.r.IntN(8) > 0; narrow { // most exclude some flows only
				proto, port, of := oneOf(s.r, protocols), oneOf(s.r, []int{7, 80, 443, 40001, 40002}), oneOf(s.r, []string{"dport", "sport"})
				parts = []phrase{{fmt.Sprintf("-p %s -m %s --%s %d", proto, proto, of, port), fmt.Sprintf("%s %s %d", proto, of, port)}}
			}
			if !strings.HasPrefix(one.iptables, "-p") || len(parts) == 0 {
				parts = append(parts, one)
			}
		}
		verdicts := []phrase{{"-j ACCEPT", "accept"}, {"-j DROP", "drop"}, {"-j RETURN", "return"}}
		if table == "mangle" {
			verdicts = []phrase{{"-j MARK --set-mark 1", "meta mark set 1"}, {"-j CONNMARK --set-mark 1", "ct mark set 1"},
				{"-j CONNMARK --restore-mark", "meta mark set ct mark"}, {"-j ACCEPT", "accept"}}
			if narrow {
				verdicts = append(verdicts, changes...)
			}
		}
		if len(parts) == 0 {
			verdicts = verdicts[:1] // or most sets would drop all packets
		}
		for _, to := range jumps {
			verdicts = append(verdicts, phrase{"-j " + to, "jump " + to}, phrase{"-g " + to, "goto " + to})
		}
		out += s.line(hook, append(parts, oneOf(s.r, verdicts))...)
	}
	return out
}

// destinations returns rules that translate services.
func (s *ruleSet) destinations() (out string) {
	for _, service := range services[2:] {
		if s.r.IntN(4) == 0 {
			continue
		}
		address, port, _ := strings.Cut(service, ":")
		to := oneOf(s.r, []string{"10.0.2.2:80", "10.0.2.2:7", "10.0.2.3:80", "10.0.2.3:443"})
		for _, proto := range protocols {
			out += s.line("PREROUTING", phrase{fmt.Sprintf("-d %s -p %s -m %s --dport %s -j DNAT --to-destination %s", address, proto, proto, port, to),
				fmt.Sprintf("ip daddr %s %s dport %s dnat to %s", address, proto, port, to)})
		}
	}
	return out
}

// sources returns rules that translate clients.
func (s *ruleSet) sources() (out string) {
	for range s.r.IntN(4) {
		proto := oneOf(s.r, protocols)
		parts := append(s.conditions("POSTROUTING"), oneOf(s.r, []phrase{
			{"-j MASQUERADE", "masquerade"},
			{"-j SNAT --to-source 10.0.2.9", "snat to 10.0.2.9"},
			{"-j RETURN", "return"},
		}))
		if s.r.IntN(3) == 0 {
			parts = []phrase{{"-p " + proto + " -j MASQUERADE --to-ports 20000-20999", "meta l4proto " + proto + " masquerade to :20000-20999"}}
		}
		out += s.line("POSTROUTING", parts...)
	}
	return out + s.line("POSTROUTING", phrase{"-o wan0 -p udp -j MASQUERADE", "oifname wan0 meta l4proto udp masquerade"})
}

// text returns the rule set.
func (s *ruleSet) text() string {
	pre, post := s.destinations(), s.sources()
	manglePre, mangleForward, manglePost := s.filter("mangle", "PREROUTING", nil), s.filter("mangle", "FORWARD", nil), s.filter("mangle", "POSTROUTING", nil)
	inner := s.filter("filter", "inner", nil)
	outer := s.filter("filter", "outer", []string{"inner"})
	forward := s.filter("filter", "FORWARD", []string{"inner", "outer"})
	if s.r.IntN(2) == 0 {
		established := s.line("FORWARD", phrase{"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "ct state related,established accept"})
		forward = established + forward
	}
	policy := "accept"
	if s.r.IntN(3) == 0 {
		policy = "drop"
		forward += s.line("FORWARD", phrase{"-i lan0 -j ACCEPT", "iifname lan0 accept"}) +
			s.line("FORWARD", phrase{"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "ct state related,established accept"})
	}
	if s.by == "nft" {
		chain := func(name, hook, rules string) string { return "chain " + name + " {\n" + hook + "\n" + rules + "}\n" }
		return "table ip nat {\n" + chain("PREROUTING", "type nat hook prerouting priority dstnat", pre) +
			chain("POSTROUTING", "type nat hook postrouting priority srcnat", post) + "}\n" +
			"table ip mangle {\n" + chain("PREROUTING", "type filter hook prerouting priority mangle", manglePre) +
			chain("FORWARD", "type filter hook forward priority mangle", mangleForward) +
			chain("POSTROUTING", "type filter hook postrouting priority mangle", manglePost) + "}\n" +
			"table inet filter {\n" + chain("inner", "", inner) + chain("outer", "", outer) +
			chain("FORWARD", "type filter hook forward priority filter; policy "+policy+";", forward) + "}\n"
	}
	return "*nat\n" + pre + post + "COMMIT\n*mangle\n" + manglePre + mangleForward + manglePost + "COMMIT\n*filter\n:inner - [0:0]\n:outer - [0:0]\n:FORWARD " +
		strings.ToUpper(policy) + " [0:0]\n" + inner + outer + forward + "COMMIT\n"
}

// TestRandomRules compares the packets behind random rule sets with and without acceleration. Every third set has rules
// that depend on single packets: acceleration is refused, or the flows that may traverse them stay slow.
func TestRandomRules(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"))
	for i := range *sets {
		seed := *seed + uint64(i)
		by := []string{"nft", "iptables-nft", "iptables-legacy"}[seed%3]
		t.Run(fmt.Sprintf("%d %s", seed, by), func(t *testing.T) {
			t.Parallel()
			s := &ruleSet{r: rand.New(rand.NewPCG(seed, 2)), by: by, single: seed/3%3 == 0}
			text := s.text()
			t.Cleanup(func() {
				if t.Failed() {
					t.Log(text)
				}
			})
			p := passageOf(t, labtest.New(t, router()))
			n := p.router
			command(t, n, "", "ip", "addr", "add", "10.0.2.9/24", "dev", "wan0")
			command(t, n, "", "ip", "neigh", "add", "10.0.2.3", "lladdr", p.server.mac.String(), "dev", "wan0")
			command(t, n, "", "ip", "route", "add", "192.0.2.0/24", "via", "10.0.2.2")
			if err := n.Sysctl("net.netfilter.nf_conntrack_tcp_loose", "0"); err != nil { // a refused connection stays refused
				t.Fatal(err)
			}
			loadRules(t, n, by, text)
			for j := range 12 {
				p.connect([]byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}[j%2], services[j/2])
			}
			var j *judgement
			err := n.Do(func() (err error) {
				j, err = examine(t.Context())
				return err
			})
			switch {
			case err != nil:
				t.Fatal(err)
			case len(j.all)+len(j.some) > 0 && !s.single:
				t.Fatalf("refused: %v, excluded: %v", j.all, j.some)
			case len(j.all) > 0:
				t.Logf("refused: %v", j.all)
				return
			}
			p.identical(1500, seed)
		})
	}
}
