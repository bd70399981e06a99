// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"net"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// Drops lists drop causes in addition to the doctor's.
func Drops() []Case {
	return []Case{
		{Name: "table-full-local", Cause: "table-full", Host: map[string]string{tableMax: "1000"}, Setup: nft(natRules), Traffic: sendLocally(1200)},
		{Name: "long-chain", Cause: "long-chain", Host: map[string]string{tableMax: "262144", tableBuckets: "512"}, Setup: nft(natRules), Traffic: uncounted(spray("client", flow.UDP, 0, 20_000, Client, 0, Server, 9))},
		{Name: "no-route", Cause: "no-route", Setup: nothing, Traffic: sendUDP(30, Client, "203.0.113.200", 9, 100, false)},
		{Name: "no-route-ipv6", Cause: "no-route", Setup: ipv6, Traffic: sendUDP(30, Client6, "2001:db8:ffff::1", 9, 100, false)},
		{Name: "nft-rule-ipv6", Cause: "nft-rule", Setup: both(ipv6, nft(`table ip6 filter { chain forward {
			type filter hook forward priority filter; policy accept
			udp dport 9 drop
		}
		}`)), Traffic: sendUDP(30, Client6, Server6, 9, 100, false)},
		{Name: "nft-rule-ingress", Cause: "nft-rule", Setup: nft(`table netdev filter { chain wan {
			type filter hook ingress device "wan0" priority 0; policy accept
			udp dport 9 counter drop
		}
		}`), Traffic: sendUDP(30, Client, Server, 9, 100, false)},
		{Name: "closed-port", Cause: "closed-port", Setup: nothing, Traffic: sendUDP(30, Client, Gateway, 9, 100, false)},
		{Name: "legacy-rule", Cause: "legacy-rule", Setup: command("gateway", "iptables-legacy", "-A", "FORWARD", "-p", "udp",
			"--dport", "53", "-j", "DROP"), Traffic: sendUDP(30, Client, Server, 53, 100, false)},
		{Name: "legacy-raw-rule", Cause: "legacy-rule", Setup: command("gateway", "iptables-legacy", "-t", "raw", "-A", "PREROUTING",
			"-p", "udp", "--dport", "53", "-j", "DROP"), Traffic: sendUDP(30, Client, Server, 53, 100, false)},
		{Name: "legacy-rule-ipv6", Cause: "legacy-rule", Setup: both(ipv6, command("gateway", "ip6tables-legacy", "-A", "FORWARD", "-p", "udp", "-j", "DROP")),
			Traffic: sendUDP(30, Client6, Server6, 53, 100, false)},
		{Name: "blackhole", Cause: "blackhole-route", Setup: command("gateway", "ip", "route", "add", "blackhole", "203.0.113.128/25"),
			Traffic: sendUDP(30, Client, "203.0.113.200", 9, 100, false)},
		{Name: "ttl", Cause: "ttl", Setup: command("client", "sysctl", "-qw", "net.ipv4.ip_default_ttl=1"),
			Traffic: sendUDP(30, Client, Server, 9, 100, false)},
		{Name: "next-hop-dead", Cause: "neighbour-failed", Setup: nothing, Traffic: untilGivenUp},
		{Name: "qdisc", Cause: "qdisc", Setup: command("gateway", "tc", "qdisc", "add", "dev", "lan0", "root", "tbf", "rate", "8kbit", "burst", "1600", "limit", "1600"),
			Traffic: uncounted(sending(sendUDP(60, Client, Server, 53, 1000, false)))},
		{Name: "invalid", Cause: "nft-rule", Setup: nft(`table inet filter { chain forward {
			type filter hook forward priority filter; policy accept
			ct state invalid drop
		}
		}`), Traffic: sendInvalid(30)},
	}
}

// uncounted wraps traffic with an unknown number of refused packets.
func uncounted(traffic setup) func(context.Context, *lab.Lab) (int, error) {
	return func(ctx context.Context, l *lab.Lab) (int, error) { return 0, traffic(ctx, l) }
}

// sendLocally sends from the router to n ports of the server, and counts the packets that the
// router's kernel refuses.
func sendLocally(n int) func(context.Context, *lab.Lab) (int, error) {
	return func(_ context.Context, l *lab.Lab) (refused int, err error) {
		err = l.Node("gateway").Do(func() error {
			c, err := net.ListenPacket("udp4", GatewayLAN+":0")
			if err != nil {
				return err
			}
			defer c.Close()
			for i := range n {
				_, err := c.WriteTo([]byte("x"), &net.UDPAddr{IP: net.ParseIP(Server), Port: 10_000 + i})
				switch {
				case errors.Is(err, unix.EPERM):
					refused++
				case err != nil:
					return err
				}
			}
			return nil
		})
		return refused, err
	}
}

// untilGivenUp sends to a host that is not there until the router has given it up.
func untilGivenUp(ctx context.Context, l *lab.Lab) (int, error) {
	const absent = "198.51.100.77"
	if _, err := sendUDP(1, Client, absent, 9, 100, false)(ctx, l); err != nil {
		return 0, err
	}
	for ctx.Err() == nil {
		out, err := l.Node("gateway").Command(ctx, "ip", "neigh", "show", absent).Output()
		if err != nil {
			return 0, err
		}
		if strings.Contains(string(out), "FAILED") {
			time.Sleep(100 * time.Millisecond) // the kernel drops the packet after it changes the state
			return 1, nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return 0, ctx.Err()
}

// sendInvalid sends TCP segments without a flag, which belong to no connection.
func sendInvalid(n int) func(context.Context, *lab.Lab) (int, error) {
	return func(ctx context.Context, l *lab.Lab) (int, error) {
		return n, l.Node("client").Do(func() error {
			d := net.Dialer{LocalAddr: &net.IPAddr{IP: net.ParseIP(Client)}}
			c, err := d.DialContext(ctx, "ip4:tcp", Server)
			if err != nil {
				return err
			}
			defer c.Close()
			header := make([]byte, 20)
			header[1], header[3], header[12] = 7, 80, 5<<4 // ports, length of the header in words
			return writeAll(c, n, header)
		})
	}
}
