// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// natpmpc runs the client of libnatpmp, the most common one, on a host.
func (g *gateway) natpmpc(node, args string) (string, error) {
	out, err := g.Node(node).Command(g.t.Context(), "natpmpc", strings.Fields("-g 10.0.2.1 "+args)...).CombinedOutput()
	return string(out), err
}

// RFC 6886: a host that only supports NAT-PMP learns its outside address and maps ports. Every outside host can
// reach the ports until the host deletes the mappings.
func TestRFC6886Mapping(t *testing.T) {
	if _, err := exec.LookPath("natpmpc"); err != nil {
		labtest.Lacks(t, "natpmpc is not installed")
	}
	prove(t, "6886-3", snat("pcp: true, filtering: address-and-port-dependent"), func(g *gateway) error {
		game := g.udp("i1", i1+":4500")
		text, err := g.natpmpc("i1", "-a 4501 4500 udp 600")
		if err != nil {
			return fmt.Errorf("natpmpc: %w: %s", err, text)
		}
		mapped := regexp.MustCompile(`Mapped public port (\d+) protocol UDP to local port 4500 \w+ 600\b`).FindStringSubmatch(text)
		address := regexp.MustCompile(`Public IP address : (\S+)`).FindStringSubmatch(text)
		if mapped == nil || address == nil {
			return errors.New(text)
		}
		outside, err := netip.ParseAddrPort(address[1] + ":" + mapped[1])
		if err != nil {
			return err
		}
		if outside.Port() != 4501 {
			return fmt.Errorf("mapped to %v, want port 4501", outside)
		}
		if err := g.back(g.udp("o1", o1+":0"), outside, game, g.patience); err != nil {
			return err
		}
		if err := g.mappings(1, 0, 600e9); err != nil {
			return err
		}
		if text, err := g.natpmpc("i1", "-a 4501 4500 udp 0"); err != nil || !strings.Contains(text, "time 0") {
			return fmt.Errorf("natpmpc: %w: %s", err, text)
		}
		return g.mappings(0, 0, 0)
	})
}

// RFC 6886 §3.5: refused requests and their result codes.
func TestRFC6886Refusals(t *testing.T) {
	prove(t, "6886-3.5", snat("pcp: true, ports-per-client: 1"), func(g *gateway) error {
		c := g.udp("i1", i1+":0")
		for _, x := range []struct{ what, request, answer string }{
			{"the address", "\x00\x00", `^\x00\x80\x00\x00....\xcb\x00\x71[\x01\x02]$`},
			{"a mapping", "\x00\x01\x00\x00\x11\x94\x00\x00\x00\x00\x02\x58", `^\x00\x81\x00\x00....\x11\x94..\x00\x00\x02\x58$`},
			{"more ports than the host may have", "\x00\x01\x00\x00\x11\x95\x00\x00\x00\x00\x02\x58", `^\x00\x81\x00\x04....\x11\x95\x00{6}$`},
			{"an opcode that is not known", "\x00\x03", `^\x00\x83\x00\x05....$`},
			{"no inside port", "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x02\x58", `^\x00\x82\x00\x02....\x00{8}$`},
			{"another version: PCP's answer, with its own", "\x01\x00", `^\x02\x80\x00\x01`},
		} {
			got, err := g.exchangeWith(c, "10.0.2.1:5351", x.request)
			if err != nil {
				return fmt.Errorf("%s: %w", x.what, err)
			}
			if !regexp.MustCompile(`(?s)` + x.answer).MatchString(latin1(got)) {
				return fmt.Errorf("%s: answered with % x", x.what, got)
			}
		}
		return nil
	})
}

// latin1 has a rune for each byte, so that patterns can name bytes.
func latin1(s string) string {
	r := make([]rune, len(s))
	for i := range len(s) {
		r[i] = rune(s[i])
	}
	return string(r)
}

// exchangeWith repeats a request until an answer arrives.
func (g *gateway) exchangeWith(c net.PacketConn, to, request string) (string, error) {
	for deadline := time.Now().Add(g.patience); time.Now().Before(deadline); {
		if _, err := c.WriteTo([]byte(request), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
			return "", err
		}
		if _, text, err := receive(c, g.again); err == nil {
			return text, nil
		}
	}
	return "", errUnanswered
}
