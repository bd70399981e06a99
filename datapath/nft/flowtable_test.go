// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// flowtableBench returns a bench on a kernel with flowtables. A counter of another program is on the gateway's
// forward hook, which offloaded packets bypass.
func flowtableBench(t *testing.T) *bench {
	b := newBench(t, lab.Balancer())
	labtest.Require(t, labtest.Tool("nft"))
	if !b.d.flowtables {
		t.Skip("this kernel has no flowtables (CONFIG_NF_FLOW_TABLE); e2e/vm runs this test on one that has")
	}
	b.nft("table inet watch { counter seen { }; chain forward { type filter hook forward priority 200; counter name seen; }; }")
	return b
}

// forwarded returns the number of packets at the forward hook.
func (b *bench) forwarded() (packets int) {
	b.Helper()
	out, err := b.gateway.Command(context.Background(), "nft", "list", "counter", "inet", "watch", "seen").CombinedOutput()
	_, rest, _ := strings.Cut(string(out), "packets ")
	if _, scanErr := fmt.Sscan(rest, &packets); err != nil || scanErr != nil {
		b.Fatalf("nft list counter: %v\n%s", err, out)
	}
	return packets
}

// offloaded counts the offloaded connections to an address.
func (b *bench) offloaded(to netip.AddrPort) (n int) {
	b.Helper()
	err := b.d.Flows(context.Background(), func(f flow.Flow) bool {
		if f.Original.Dest == to && f.Offloaded {
			n++
		}
		return true
	})
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// exchange sends a line n times over a connection to an echoing server.
func exchange(c net.Conn, r *bufio.Reader, n int) error {
	for range n {
		if err := c.SetDeadline(time.Now().Add(trafficTimeout)); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(c, "hello"); err != nil {
			return err
		}
		if line, err := r.ReadString('\n'); err != nil || !strings.HasSuffix(line, "hello\n") {
			return fmt.Errorf("answer %q, %w", line, err)
		}
	}
	return nil
}

// TestFlowtable opens connections and finds them in the flowtable. Their packets bypass the forward hook, and
// reloads do not affect them.
func TestFlowtable(t *testing.T) {
	b := flowtableBench(t)
	b.tcpServers(8080, "s1", "s2", "s3")
	b.udpServers(8080, "s1", "s2", "s3")
	var services []config.Service
	for _, k := range []struct {
		mode     config.Mode
		protocol flow.Protocol
	}{{config.ModeDNAT, flow.TCP}, {config.ModeFullNAT, flow.UDP}} {
		for _, family := range []string{"ipv4", "ipv6"} {
			s := web(k.mode, config.SchedulerMaglev)
			s.Name, s.Protocol = fmt.Sprintf("%s-%s-%s", k.mode, k.protocol, family), k.protocol
			oneFamily(&s, family)
			services = append(services, s)
		}
	}
	c := &config.Config{Services: services, Flowtable: config.SwitchAuto}
	b.apply(c)
	if text := b.ruleset(); !strings.Contains(text, "flow add @fast") {
		t.Fatalf("no flowtable in\n%s", text)
	}
	for _, s := range services {
		vip := netip.AddrPortFrom(s.Listen[0].Address, 80)
		t.Run(s.Name, func(t *testing.T) {
			conn, err := b.dial(s.Protocol.String(), "client", "", vip.String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r := bufio.NewReader(conn)
			if s.Protocol == flow.TCP {
				_, _ = r.ReadString('\n') // the greeting
			}
			b.eventually("the connection to be offloaded", func() bool {
				if err := exchange(conn, r, 1); err != nil {
					t.Fatal(err)
				}
				return b.offloaded(vip) == 1
			})
			if err := exchange(conn, r, 2); err != nil { // the offload may have missed the last packets
				t.Fatal(err)
			}
			// The counter excludes the previous connection: its end may be reported twice.
			b.nft(fmt.Sprintf("flush chain inet watch forward\nadd rule inet watch forward meta nfproto %s meta l4proto %s counter name seen",
				map[bool]string{true: "ipv4", false: "ipv6"}[vip.Addr().Is4()], s.Protocol))
			before := b.forwarded()
			if err := exchange(conn, r, 20); err != nil {
				t.Fatal(err)
			}
			if n := b.forwarded() - before; n > 0 {
				t.Errorf("%d packets of an offloaded connection met the forward hook", n)
			}
			more := *c
			more.Services = append(slices.Clone(services), config.Service{
				Name: "more", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
				Listen: []config.Listen{listen("192.0.2.99", "80")}, Backends: []config.Backend{backend("a", "10.0.2.2", 8080)},
			})
			b.apply(&more)
			if err := exchange(conn, r, 3); err != nil {
				t.Errorf("after a reload: %v", err)
			}
			if n := b.offloaded(vip); n != 1 {
				t.Errorf("after a reload %d connections are offloaded, want 1", n)
			}
			b.apply(c)
			if tcp, ok := conn.(*net.TCPConn); ok { // packets of its end must not count for the next connection
				_ = tcp.CloseWrite()
				_, _ = io.Copy(io.Discard, r)
			}
		})
	}
	b.nft("delete table inet watch")
	if err := b.d.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	if text := b.ruleset(); strings.TrimSpace(text) != "" {
		t.Errorf("after the end there is\n%s", text)
	}
}

// TestFlowtableLetsGoOfABackend removes the backend of an offloaded connection. The connection must not bypass
// the rules any longer.
func TestFlowtableLetsGoOfABackend(t *testing.T) {
	b := flowtableBench(t)
	b.udpServers(8080, "s1", "s2")
	s := web(config.ModeDNAT, config.SchedulerRR)
	oneFamily(&s, "ipv4")
	s.Protocol, s.Backends = flow.UDP, s.Backends[:2]
	c := one(s)
	c.Flowtable = config.SwitchOn
	b.apply(c)
	conn, err := b.dial("udp", "client", "", virtual["ipv4"])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask := func() string {
		buf := make([]byte, 100)
		_ = conn.SetDeadline(time.Now().Add(trafficTimeout))
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		server, _, _ := strings.Cut(string(buf[:n]), " ")
		return server
	}
	first := ask()
	b.eventually("the flow to be offloaded", func() bool {
		ask()
		return b.offloaded(netip.MustParseAddrPort(virtual["ipv4"])) == 1
	})
	down := b.snapshot(c)
	down.Services[0].State[strings.Index("s1s2", first)/2] = datapath.Down
	b.applySnapshot(down)
	if warnings := b.d.Warnings(); len(warnings) > 0 {
		t.Errorf("warnings %q", warnings)
	}
	b.eventually("the flow to move to the other backend", func() bool { return ask() != first })
}

// TestFlowtableStandsBackForRulesThatSeeEveryPacket compiles rules that need all packets, which a flowtable
// would hide.
func TestFlowtableStandsBackForRulesThatSeeEveryPacket(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.d.flowtables = true // pretend support; the test applies nothing that needs it
	for want, change := range map[string]func(*config.Config){
		"the mark of service web":   func(c *config.Config) { c.Services[0].Mark = 7 },
		"strict-tcp of service web": func(c *config.Config) { c.Services[0].Limits.StrictTCP = true },
		"firewall rule audit": func(c *config.Config) {
			c.Firewall.Rules = []config.FirewallRule{{Name: "audit", Action: config.ActionLog}}
		},
		"the mark of nat rule office": func(c *config.Config) {
			c.NAT = []config.NATRule{{Name: "office", Type: config.NATMasquerade, Out: "wan0", Mark: 3}}
		},
		"the mark of service web (of a backend's)": func(c *config.Config) { c.Services[0].Backends[1].Mark = 7 },
	} {
		c := one(web(config.ModeDNAT, config.SchedulerRR))
		c.Flowtable = config.SwitchAuto
		change(c)
		s := b.apply(c)
		if b.d.useFlowtable(s) {
			t.Errorf("%s: a flowtable is used all the same", want)
		}
		what, _, _ := strings.Cut(want, " (")
		if text := strings.Join(b.d.Warnings(), "\n"); !strings.Contains(text, "because "+what+" must see every packet") {
			t.Errorf("warnings %q do not name %q", text, what)
		}
	}
}
