// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

const nearestYAML = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}
  - {name: inner, listen: [{address: 192.0.2.11, ports: [53], interface: lan0}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0, except: [10.9.0.0/16]}
  - {name: published, type: port-forward, listen: {address: 192.0.2.12, ports: [22]}, protocol: tcp, to: {address: 10.0.2.2}}
  - {name: six, type: nat64, source: ["fd00:2::/64"], prefix: "64:ff9b::/96", pool: [203.0.113.1]}
`

// TestNearest: the result names the closest rule and its first unsatisfied condition.
func TestNearest(t *testing.T) {
	c, err := config.Decode("nearest.yaml", []byte(nearestYAML))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ protocol, from, to, in, out, want string }{
		{"tcp", "203.0.113.5:4000", "192.0.2.10:81", "wan0", "wan0", "service web is nearest: on 192.0.2.10 it takes ports [80], not 81"},
		{"udp", "203.0.113.5:4000", "192.0.2.10:80", "wan0", "", "service web is nearest: it takes protocol tcp, not udp"},
		{"udp", "203.0.113.5:4000", "192.0.2.11:53", "wan0", "", "service inner is nearest: it takes packets that arrive by lan0, not by wan0"},
		{"tcp", "10.0.2.3:4000", "198.18.0.1:80", "lan0", "wan1", "nat rule office is nearest: it takes packets that leave by wan0, and this one leaves by wan1"},
		{"tcp", "10.0.2.3:4000", "10.9.0.1:80", "lan0", "wan0", "nat rule office is nearest: 10.9.0.1 is among its exceptions"},
		{"tcp", "203.0.113.5:4000", "192.0.2.12:23", "wan0", "", "nat rule published is nearest: on 192.0.2.12 it takes ports [22], not 23"},
		{"tcp", "[fd00:2::5]:4000", "[2001:db8::1]:23", "lan0", "", "nat rule six is nearest: it translates packets to 64:ff9b::/96, not to 2001:db8::1"},
		{"tcp", "203.0.113.5:4000", "198.18.0.1:80", "wan0", "", ""},
	} {
		p, err := flow.ParseProtocol(x.protocol)
		if err != nil {
			t.Fatal(err)
		}
		tuple := flow.Tuple{Protocol: p, Source: netip.MustParseAddrPort(x.from), Dest: netip.MustParseAddrPort(x.to)}
		if got := Nearest(c, tuple, x.in, x.out); got != x.want {
			t.Errorf("%s: got %q, want %q", tuple, got, x.want)
		}
	}
}

// TestUnhelped: a note reports further connections that no helper translates.
func TestUnhelped(t *testing.T) {
	c, err := config.Decode("test", []byte(`
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}
  - {name: helped, type: masquerade, source: [10.0.3.0/24], out: wan0, helper: [ftp, tftp]}
  - {name: strict, type: masquerade, source: [10.0.4.0/24], out: wan0, filtering: address-and-port-dependent}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		owner, datapath string
		protocol        flow.Protocol
		port            uint16
		want            string
	}{
		{"office", "nftables", flow.TCP, 21, "write helper: ftp in nat rule office"},
		{"office", "ebpf", flow.TCP, 21, "write helper: ftp in nat rule office"},
		{"office", "ebpf", flow.UDP, 69, ""},
		{"office", "nftables", flow.UDP, 69, "helper: tftp"},
		{"strict", "ebpf", flow.UDP, 69, "helper: tftp"},
		{"helped", "nftables", flow.TCP, 21, ""},
		{"office", "nftables", flow.TCP, 80, ""},
		{"office", "nftables", flow.UDP, 21, ""},
		{"other", "nftables", flow.TCP, 21, ""},
	} {
		e := &Explanation{Owner: x.owner, Datapath: x.datapath, Action: "forward",
			Before: flow.Tuple{Protocol: x.protocol, Dest: netip.AddrPortFrom(netip.MustParseAddr("198.18.0.1"), x.port)}}
		if got := Unhelped(c, e); (got == "") != (x.want == "") || !strings.Contains(got, x.want) {
			t.Errorf("%s %s %s %d: %q, want %q", x.owner, x.datapath, x.protocol, x.port, got, x.want)
		}
	}
}

// TestBypass: a backend on its client's own network answers it without the gateway.
func TestBypass(t *testing.T) {
	web := config.Service{Name: "web", Mode: config.ModeDNAT, Hairpin: config.SwitchOff, Listen: []config.Listen{{Address: netip.MustParseAddr("192.0.2.10")}},
		Backends: []config.Backend{{Name: "a", Address: netip.MustParseAddr("10.0.2.2")}}}
	s := &Snapshot{Services: []Service{{Service: &web}}}
	networks := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24"), netip.MustParsePrefix("192.0.2.10/32")}
	note := func(client string) string {
		from := netip.MustParseAddrPort(client)
		return AnswersBypass(s, networks, &Explanation{Owner: "web", Before: flow.Tuple{Source: from, Dest: netip.MustParseAddrPort("192.0.2.10:80")},
			After: flow.Tuple{Source: from, Dest: netip.MustParseAddrPort("10.0.2.2:8080")}})
	}
	for client, want := range map[string]string{"203.0.113.5:4000": "", "10.0.2.3:4000": "client's own network 10.0.2.0/24", "10.0.2.2:4000": "the backend itself"} {
		if got := note(client); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", client, got, want)
		}
	}
	s.NAT = []*config.NATRule{{Name: "http", Type: config.NATPortForward, Hairpin: config.SwitchOff}}
	e := &Explanation{Owner: "http", Before: flow.Tuple{Source: netip.MustParseAddrPort("10.0.2.3:4000"), Dest: netip.MustParseAddrPort("192.0.2.10:80")},
		After: flow.Tuple{Source: netip.MustParseAddrPort("10.0.2.3:4000"), Dest: netip.MustParseAddrPort("10.0.2.2:8080")}}
	if got := AnswersBypass(s, networks, e); !strings.Contains(got, "the target is on the client's own network") || !strings.Contains(got, "hairpin: auto in nat rule http") {
		t.Errorf("of a port-forward without hairpin: %q", got)
	}
	if s.NAT[0].Hairpin = ""; AnswersBypass(s, networks, e) != "" {
		t.Error("a port-forward that gives such clients another source is said not to")
	}
	if w := Bypassed(s, networks); len(w) != 0 {
		t.Errorf("warned of a service on another network: %v", w)
	}
	web.Listen[0].Address = netip.MustParseAddr("10.0.2.100")
	if w := Bypassed(s, networks); len(w) != 1 || !strings.Contains(w[0], "backend a is on the network 10.0.2.0/24") {
		t.Errorf("warnings %v", w)
	}
	for _, turned := range []config.Service{{Mode: config.ModeFullNAT}, {Mode: config.ModeDNAT}} {
		web.Mode, web.Hairpin = turned.Mode, turned.Hairpin
		if w := Bypassed(s, networks); len(w) != 0 {
			t.Errorf("mode %s needs no warning: %v", web.Mode, w)
		}
	}
}
