// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/packet"
)

// PathConditions lists faults on the path of packets: at rules for one packet, in entries older
// than the rules, at fragments, bridges and virtual cables.
func PathConditions() []Condition {
	one := spray("client", flow.UDP, 0, 1, Client, 5000, Gateway, 53)
	return []Condition{
		{Name: "published-port-dead", Wants: []Want{{"RL15", "critical", "every new connection to " + Server + ":53"}},
			Fault:   all(nft(forwardTo(Server)), nft("table inet filter { chain forward {\n type filter hook forward priority filter; policy drop\n}\n}")),
			Traffic: spray("client", flow.UDP, 0, 20, Client, 0, Gateway, 53), Do: `nft insert rule inet filter forward ct status dnat accept`},
		{Name: "too-big-dropped", Wants: []Want{{"RL15", "warn", "type 3 code 4"}},
			Fault:   nft("table inet filter { chain forward {\n type filter hook forward priority filter\n icmp type destination-unreachable drop\n}\n}"),
			Traffic: raw("server", tooBig()), Cure: gateway("nft delete rule inet filter forward handle 2")},
		{Name: "ftp-without-helper", Wants: []Want{{"RL07", "warn", "FTP between " + Client + " and " + Server}},
			Fault:   all(nft("table inet filter { chain forward {\n type filter hook forward priority filter; policy drop\n ct state established,related accept\n tcp dport 21 accept\n}\n}"), announce(1)),
			Traffic: spray("client", flow.TCP, tcpSYN, 3, Client, 0, Server, 50_000), Do: `nft 'add table inet ftp.*'`},
		{Name: "older-than-port-forward", Wants: []Want{{"ST12", "warn", "port 53"}}, Fault: all(nft(tracked), one, nft(forwardTo(Server))), Traffic: one, Do: `^sluice conns delete .*--port 53 `},
		{Name: "older-than-address", Wants: []Want{{"ST12", "warn", "the source 198.51.100.9"}},
			Fault: all(gateway("ip addr add 198.51.100.9/24 dev lan0"), nft(snatFrom("198.51.100.9")), spray("client", flow.UDP, 0, 1, Client, 5000, Server, 5060),
				gateway("nft flush ruleset; ip addr del 198.51.100.9/24 dev lan0"), nft(snatFrom(GatewayLAN))),
			Do: `^sluice conns delete .*--nat-src 198.51.100.9 `},
		{Name: "hairpin", Wants: []Want{{"FW16", "warn", "hairpin"}}, Fault: all(command("client", "ip", "addr", "add", "192.0.2.77/24", "dev", "eth0"), nft(forwardTo("192.0.2.77"))),
			Traffic: spray("client", flow.UDP, 0, 10, Client, 0, Gateway, 53), Do: `nft 'add table ip hairpin.*'`, Cure: gateway("conntrack -F")},
		{Name: "answers-by-another-uplink", Wants: []Want{{"FW17", "warn", "come in by up1 leave by wan0"}},
			Fault:   all(nft(natRules), secondUplink, listening(8090, 100), nftOn("client", "table inet noreply { chain in {\n type filter hook input priority filter\n iifname \"eth0\" meta l4proto tcp drop\n}\n}")),
			Traffic: spray("client", flow.TCP, tcpSYN, 10, Unrouted, 0, "10.8.0.1", 8090), Do: `(?s)ip route add default via 10.8.0.2 dev up1 .*meta mark set ct mark'`},
		{Name: "fragment-memory", Wants: []Want{{"FW14", "critical", "net.ipv4.ipfrag_high_thresh 20000"}},
			Fault:   all(nft(natRules), sysctl("net.ipv4.ipfrag_low_thresh", "10000"), sysctl("net.ipv4.ipfrag_high_thresh", "20000")),
			Traffic: raw("client", fragments(60, 1000)...), After: raw("client", fragments(60, 2000)...), Do: `sysctl -w net.ipv4.ipfrag_high_thresh=\d+`},
		{Name: "checksums", Wants: []Want{{"FW15", "critical", "wrong checksum"}}, Traffic: raw("client", spoiled(50)...), After: spray("client", flow.UDP, 0, 50, Client, 0, Gateway, 9)},
		{Name: "bridge-port-listens", Wants: []Want{{"RX11", "warn", "v0 of bridge br0"}},
			Fault: gateway("ip link add br0 type bridge stp_state 1 forward_delay 1500; ip link add v0 type veth peer name v1; ip link set v0 master br0; ip link set br0 up; ip link set v1 up; ip link set v0 up"),
			Do:    `(?s)ip link set br0 type bridge stp_state 0\nip link set v0 type bridge_slave state 3`},
		{Name: "far-end-mtu", Wants: []Want{{"RX12", "critical", "1280 instead of 1500"}}, Fault: command("server", "ip", "link", "set", "eth0", "mtu", "1280"),
			Traffic: sending(sendUDP(30, Client, Server, 9, 1400, false)), Do: `ip link set dev lan0 mtu 1280`},
		{Name: "unanswered-address", Wants: []Want{{"FW18", "critical", "198.51.100.50"}}, Fault: nft(snatFrom("198.51.100.50")),
			Traffic: spray("client", flow.UDP, 0, 10, Client, 0, Server, 9), Do: `^ip addr add 198.51.100.50/32 dev lan0$`},
	}
}

// HealthyConditions lists routers that look faulty to simple rules and are not.
func HealthyConditions() []Condition {
	return []Condition{
		{Name: "address-of-another-host", Fault: all(nft(snatFrom("198.51.100.50")), command("server", "ip", "addr", "add", "198.51.100.50/24", "dev", "eth0"))},
		{Name: "asymmetric-edge", Fault: all(nft("table inet filter { chain input {\n type filter hook input priority filter\n ct state established,related accept\n}\n}"), otherWayBack),
			Traffic: all(spray("client", flow.TCP, tcpSYN, 60, Client, 4000, Server, 9), spray("client", flow.TCP, tcpACK, 60, Client, 4000, Server, 9))},
		{Name: "routed-bridge", Fault: all(nft(natRules), gateway("ip link add virbr0 type bridge; ip addr add 192.168.122.1/24 dev virbr0; ip link set virbr0 up; sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1")),
			Traffic: sending(dialTCP(20, 10))},
		{Name: "scan-of-a-published-port", Fault: all(nft(natRules), nft("table inet filter { chain forward {\n type filter hook forward priority filter\n iifname \"wan0\" ip saddr != 192.0.2.0/24 drop\n}\n}")),
			Traffic: all(spray("client", flow.TCP, tcpSYN, 3, Unrouted, 0, Gateway, 8080), sending(dialTCP(20, 10)))},
	}
}

// secondUplink adds another link between client and router. The route to Unrouted uses the first
// link.
func secondUplink(ctx context.Context, l *lab.Lab) error {
	return all(command("client", "ip", "link", "add", "up1", "type", "veth", "peer", "name", "up1", "netns", l.Node("gateway").Name()),
		command("client", "sh", "-ec", "ip addr add 10.8.0.2/24 dev up1; ip link set up1 up"),
		gateway("ip addr add 10.8.0.1/24 dev up1; ip link set up1 up; ip route add "+Unrouted+" via "+Client),
		sending(sendUDP(1, "10.8.0.2", "10.8.0.1", 9, 10, false)))(ctx, l)
}

// snatFrom translates to one address.
func snatFrom(address string) string {
	return "table ip nat { chain post {\n type nat hook postrouting priority srcnat\n oifname lan0 snat to " + address + "\n}\n}"
}

// raw sends IPv4 packets as they are, but for what the kernel fills in.
func raw(node string, packets ...[]byte) setup {
	return func(_ context.Context, l *lab.Lab) error {
		return l.Node(node).Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			for i, p := range packets {
				if err := unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:20])}); err != nil {
					return fmt.Errorf("packet %d of %d: %w", i, len(packets), err)
				}
			}
			time.Sleep(50 * time.Millisecond) // samples of a probe are read with a delay
			return nil
		})
	}
}

// tooBig is the ICMP error (type 3 code 4) by which the client learns that the path takes
// 1280 bytes.
func tooBig() []byte {
	quoted := segment(flow.UDP, 0, netip.MustParseAddrPort(Client+":5000"), netip.MustParseAddrPort(Server+":9"))
	b := make([]byte, 28, 28+len(quoted))
	b[0], b[8], b[9] = 0x45, 64, byte(flow.ICMP)
	copy(b[12:], netip.MustParseAddr(Server).AsSlice())
	copy(b[16:], netip.MustParseAddr(Client).AsSlice())
	b[20], b[21] = 3, 4
	binary.BigEndian.PutUint16(b[26:], 1280)
	b = append(b, quoted...)
	binary.BigEndian.PutUint16(b[22:], packet.Checksum(b[20:]))
	return b
}

// fragments returns the fragments of n datagrams of 2000 bytes: first all first fragments, then the
// others. id is the identification of the first datagram.
func fragments(n, id int) (packets [][]byte) {
	for _, part := range []struct{ flags, offset, length uint16 }{{0x2000, 0, 1400}, {0, 1400, 608}} {
		for i := range n {
			b := segment(flow.UDP, 0, netip.AddrPortFrom(netip.MustParseAddr(Client), uint16(6000+i)), netip.MustParseAddrPort(Server+":9"))
			binary.BigEndian.PutUint16(b[24:], 2008)
			if part.offset > 0 {
				b = b[:20]
			}
			b = append(b, make([]byte, 20+int(part.length)-len(b))...)
			binary.BigEndian.PutUint16(b[4:], uint16(id+i))
			binary.BigEndian.PutUint16(b[6:], part.flags|part.offset/8)
			packets = append(packets, b)
		}
	}
	return packets
}

// spoiled returns n datagrams to the router with a wrong checksum.
func spoiled(n int) (packets [][]byte) {
	for i := range n {
		b := segment(flow.UDP, 0, netip.AddrPortFrom(netip.MustParseAddr(Client), uint16(6000+i)), netip.MustParseAddrPort(Gateway+":9"))
		binary.BigEndian.PutUint16(b[26:], 0x1234)
		packets = append(packets, b)
	}
	return packets
}
