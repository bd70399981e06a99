// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// left returns the remaining timeout and the state of the connection to an address; of several, the one with the
// longest timeout.
func (b *bench) left(p flow.Protocol, to netip.Addr) (left time.Duration, state string) {
	b.Helper()
	d := b.open() // a socket of its own
	defer d.Close()
	state = "none"
	err := d.tracking.Dump(context.Background(), nil, func(e *conntrack.Entry) error {
		if t := time.Duration(e.Timeout) * time.Second; e.Protocol == p && e.Original.Dest.Netip() == to && t >= left {
			left, state = t, e.StateName()
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return left, state
}

// lasts waits until the connection has the wanted timeout, with a tolerance for the time of the test. It returns
// false after a reset.
func (b *bench) lasts(what string, p flow.Protocol, to string, want time.Duration, keep func()) (lasts bool) {
	b.Helper()
	labtest.Eventually(b, time.Minute, fmt.Sprintf("%s to %s to be kept for %v", what, to, want), func() error {
		if keep != nil {
			keep()
		}
		left, state := b.left(p, addr(to))
		lasts = left <= want && left >= want-30*time.Second
		if !lasts && state != "CLOSE" {
			return fmt.Errorf("it is kept for %v in state %q", left, state)
		}
		return nil
	})
	return lasts
}

// closes opens a connection to a server and closes it.
func (b *bench) closes(vip, to string) bool {
	b.Helper()
	conn, err := b.dialFor(trafficTimeout, "tcp", "client", "", vip)
	if err != nil {
		b.Fatal(err)
	}
	b.lasts("an established TCP connection", flow.TCP, to, 3000*time.Second, nil)
	if _, err := conn.Read(make([]byte, 100)); err != nil { // without reading, close would send a reset
		b.Fatal(err)
	}
	conn.Close()
	return b.lasts("a closed TCP connection", flow.TCP, to, 700*time.Second, nil)
}

// TestTimeouts reads the timeouts of real connections from connection tracking. They differ from the kernel's
// defaults.
func TestTimeouts(t *testing.T) {
	b := newBench(t, lab.Balancer())
	if !b.d.timeouts {
		if text := strings.Join(b.d.Warnings(), "\n"); !strings.Contains(text, "CONFIG_NF_CONNTRACK_TIMEOUT") {
			t.Errorf("warnings %q do not say that timeouts are missing", text)
		}
		t.Skip("this kernel has no timeouts of single connections (CONFIG_NF_CONNTRACK_TIMEOUT)")
	}
	b.tcpServers(8080, "s1", "s2", "s3")
	b.udpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	udp := web(config.ModeDNAT, config.SchedulerRR)
	udp.Name, udp.Protocol = "dns", flow.UDP
	udp.Listen = append(udp.Listen, listen("192.0.2.11", "80"))
	c.Services = append(c.Services, udp)
	c.Flowtable = config.SwitchOff // connection tracking has no timeout for offloaded connections
	c.NAT = []config.NATRule{{Name: "out", Type: config.NATMasquerade, Source: []prefixT{prefix("10.0.1.0/24")}, Out: "lan0"}}
	c.Timeouts = config.Timeouts{
		TCPEstablished: config.Duration(3000 * time.Second), TCPTransitory: config.Duration(700 * time.Second),
		UDP: config.Duration(900 * time.Second), ICMP: config.Duration(200 * time.Second), Other: config.Duration(1100 * time.Second),
	}
	b.apply(c)
	if change := b.applySnapshot(b.snapshot(c)); !change.Empty() {
		t.Errorf("the same again changed %+v", change)
	}
	for _, vip := range virtual {
		to := netip.MustParseAddrPort(vip).Addr().String()
		// A stalled machine sends a FIN twice, and the second ACK causes a reset because the server's socket is
		// gone. The kernel's timeout of ten seconds then applies.
		for tries := 5; !b.closes(vip, to); tries-- {
			if tries == 0 {
				t.Fatal("every connection was reset")
			}
			t.Logf("a connection to %s was reset when it closed: once more", to)
		}
		if _, err := b.udp("client", "", vip); err != nil {
			t.Fatal(err)
		}
		b.lasts("an exchange of datagrams", flow.UDP, to, 900*time.Second, nil)
	}
	if err := b.ping("client", "10.0.2.2"); err != nil {
		t.Fatal(err)
	}
	b.lasts("a ping by way of masquerade", flow.ICMP, "10.0.2.2", 200*time.Second, nil)

	// Changed timeouts apply to new connections.
	c.Timeouts.TCPEstablished, c.Timeouts.UDP = config.Duration(4000*time.Second), config.Duration(5*time.Minute)
	change := b.applySnapshot(b.snapshot(c))
	if change.Objects.Added != 4 || change.Rules.Added > 8 {
		t.Errorf("new timeouts of TCP and UDP changed %+v", change)
	}
	if _, err := b.dialFor(trafficTimeout, "tcp", "client", "", virtual["ipv4"]); err != nil {
		t.Fatal(err)
	}
	b.lasts("a connection after the change", flow.TCP, "192.0.2.10", 4000*time.Second, nil)
	conn, err := b.dial("udp", "client", "", "192.0.2.11:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	ask := func() {
		_ = conn.SetDeadline(time.Now().Add(trafficTimeout))
		if _, err := conn.Write([]byte("x\n")); err != nil {
			t.Fatal(err)
		}
		if _, err := r.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	if left, _ := b.left(flow.UDP, addr("192.0.2.11")); left > time.Minute {
		t.Errorf("with the default a single exchange is kept for %v, want the kernel's 30s", left)
	}
	b.lasts("a stream of datagrams", flow.UDP, "192.0.2.11", 300*time.Second, ask)
	b.d = b.open()
	if change := b.applySnapshot(b.snapshot(c)); !change.Empty() {
		t.Errorf("a new process changed %+v", change)
	}
}
