// SPDX-License-Identifier: Apache-2.0

// Package faults builds routers with one known fault, and the traffic
// that shows it. The tests of trace and doctor use them to show that the
// fault is found and named, and the healthy one that nothing is named.
package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

// The addresses of the topology: client and server on either side of the router.
const (
	Client     = "192.0.2.2"
	Gateway    = "192.0.2.1" // the router's address on the client's side
	GatewayLAN = "198.51.100.1"
	Server     = "198.51.100.2"
	Unrouted   = "203.0.113.9" // an address of the client that no route leads back to
)

// The same for IPv6; only those cases that need it have these addresses.
const (
	Client6 = "2001:db8:1::2"
	Server6 = "2001:db8:2::2"
)

// Topology is a client and a server with a router between them.
func Topology(name string) lab.Topology {
	return lab.Topology{
		Name: name,
		Nodes: []lab.NodeSpec{
			{Name: "client", Addresses: []string{Unrouted + "/32"}, Routes: []lab.Route{{To: "default", Via: Gateway}},
				Sysctls: map[string]string{"net.ipv4.ip_local_port_range": "1024 65000",
					"net.ipv4.conf.all.arp_announce": "2"}}, // ask for the router in the name of the link's address
			{Name: "gateway", Forward: true},
			{Name: "server", Routes: []lab.Route{{To: "default", Via: GatewayLAN}}},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{Client + "/24"}},
				B: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{Gateway + "/24"}}},
			{A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{GatewayLAN + "/24"}},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{Server + "/24"}}},
		},
	}
}

// Case is one fault.
type Case struct {
	Name string
	// Cause is the ID of the cause that trace finds; empty where the fault
	// drops nothing.
	Cause string
	// Check is the ID of the expected first finding.
	Check string
	// Host are host-wide settings that the fault needs, to be borrowed.
	Host map[string]string
	// Setup makes the fault.
	Setup func(ctx context.Context, l *lab.Lab) error
	// Traffic sends, and returns the number of refused packets. Its sockets stay open until release
	// is called.
	Traffic func(ctx context.Context, l *lab.Lab) (refused int, err error)
}

// Cases lists the faults.
func Cases() []Case {
	return []Case{
		{Name: "table-full", Cause: "table-full", Check: "CT05", Host: map[string]string{"net.netfilter.nf_conntrack_max": "1000"},
			Setup: nft(natRules), Traffic: dialTCP(1200, 100)},
		{Name: "snat-ports", Cause: "snat-ports", Check: "PT01", Setup: nft(`table ip nat { chain post {
			type nat hook postrouting priority srcnat
			oifname "lan0" ip protocol tcp snat to 198.51.100.1:2000-2019
		}
		}`), Traffic: dialTCP(60, 60)},
		{Name: "rp-filter", Cause: "rp-filter", Check: "FW02",
			Setup:   sysctl("net.ipv4.conf.wan0.rp_filter", "1"),
			Traffic: sendUDP(50, Unrouted, Server, 9, 100, false)},
		{Name: "forwarding-off", Cause: "forwarding-off", Check: "FW01",
			Setup:   both(nft(natRules), sysctl("net.ipv4.ip_forward", "0")),
			Traffic: sendUDP(50, Client, Server, 9, 100, false)},
		{Name: "mtu", Cause: "mtu", Check: "FW03", Setup: mtu(1280),
			Traffic: sendUDP(50, Client, Server, 9, 1400, true)},
		{Name: "neighbour-table", Cause: "neighbour-table", Check: "FW06", Host: map[string]string{
			"net.ipv4.neigh.default.gc_thresh1": "8", "net.ipv4.neigh.default.gc_thresh2": "16",
			"net.ipv4.neigh.default.gc_thresh3": "32"},
			Setup: nothing, Traffic: sendRange},
		{Name: "accept-queue", Cause: "accept-queue", Check: "LS01", Setup: nothing, Traffic: overflowListener},
		{Name: "deny-rule", Cause: "nft-rule", Check: "RL15", Setup: nft(`table inet filter { chain forward {
			type filter hook forward priority filter; policy accept
			tcp dport 80 counter accept
			ip daddr 198.51.100.2 udp dport 53 counter drop
		}
		}`), Traffic: sendUDP(50, Client, Server, 53, 100, false)},
		{Name: "notrack", Check: "RL16", Setup: both(nft(natRules), nft(`table inet raw { chain pre {
			type filter hook prerouting priority raw
			iifname "wan0" ip saddr 192.0.2.0/24 notrack
		}
		}`)), Traffic: sendUDP(100, Client, Server, 9, 100, false)},
		{Name: "linear-rules", Check: "RL01", Setup: nft(linearRules(1200)),
			Traffic: dialTCP(20, 0)},
		{Name: "backlog", Cause: "backlog", Check: "RX01", Host: map[string]string{"net.core.netdev_max_backlog": "5"},
			Setup: segmentInSoftware, Traffic: burst},
	}
}

// Healthy is a busy router with nothing wrong: programs of its own have sockets at ports
// that the kernel chose, and a resolver at ports that it chooses at random for each query.
func Healthy() Case {
	return Case{Name: "healthy", Setup: both(nft(natRules), both(listenAnywhere, query(45001))),
		Traffic: func(ctx context.Context, l *lab.Lab) (int, error) {
			if err := query(45002)(ctx, l); err != nil {
				return 0, err
			}
			return busy(ctx, l)
		}}
}

// listenAnywhere has programs on the router wait at ports of the kernel's choice until
// ctx ends.
func listenAnywhere(ctx context.Context, l *lab.Lab) error {
	return l.Node("gateway").Do(func() error {
		tcp, err := net.Listen("tcp", ":0")
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { tcp.Close() })
		udp, err := net.ListenPacket("udp", ":0")
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { udp.Close() })
		return nil
	})
}

// query has a resolver on the router wait for an answer at a port, until ctx ends.
func query(port int) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		return l.Node("gateway").Do(func() error {
			c, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", port))
			if err == nil {
				context.AfterFunc(ctx, func() { c.Close() })
			}
			return err
		})
	}
}

// natRules forward a port and masquerade, with one counter.
const natRules = `table ip nat {
	chain pre {
		type nat hook prerouting priority dstnat
		ip daddr 192.0.2.1 tcp dport 8080 dnat to 198.51.100.2:80
	}
	chain post {
		type nat hook postrouting priority srcnat
		oifname "lan0" masquerade
	}
}`

// linearRules are n rules that match nothing, one after the other.
func linearRules(n int) string {
	var b strings.Builder
	b.WriteString("table inet filter { chain forward {\n type filter hook forward priority filter; policy accept\n")
	for i := range n {
		fmt.Fprintf(&b, " ip saddr 10.%d.%d.7 counter drop\n", i/250, i%250)
	}
	b.WriteString("}\n}")
	return b.String()
}

type setup = func(context.Context, *lab.Lab) error

func nothing(context.Context, *lab.Lab) error { return nil }

func both(a, b setup) setup {
	return func(ctx context.Context, l *lab.Lab) error { return errors.Join(a(ctx, l), b(ctx, l)) }
}

func nft(rules string) setup { return nftOn("gateway", rules) }

func nftOn(node, rules string) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		cmd := l.Node(node).Command(ctx, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules + "\n")
		return output(cmd.CombinedOutput())
	}
}

// countSYNs counts the TCP connections that a node asks for (hook output) or is asked
// for (hook input), every repetition of a SYN anew.
func countSYNs(node, hook string) setup {
	return nftOn(node, `table inet faults {
		counter syns {}
		chain syns {
			type filter hook `+hook+` priority filter
			tcp flags & (syn | ack) == syn counter name syns
		}
	}`)
}

func countedSYNs(ctx context.Context, l *lab.Lab, node string) (packets int, err error) {
	text, err := l.Node(node).Command(ctx, "nft", "list", "counter", "inet", "faults", "syns").Output()
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), "packets ")
	if _, err := fmt.Sscan(after, &packets); err != nil {
		return 0, fmt.Errorf("%s: count of SYNs in %q: %w", node, text, err)
	}
	return packets, nil
}

func command(node, name string, args ...string) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		return output(l.Node(node).Command(ctx, name, args...).CombinedOutput())
	}
}

func output(text []byte, err error) error {
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(text)))
	}
	return nil
}

func sysctl(name, value string) setup {
	return func(_ context.Context, l *lab.Lab) error { return l.Node("gateway").Sysctl(name, value) }
}

// ipv6 gives both links IPv6 addresses and routes.
func ipv6(ctx context.Context, l *lab.Lab) error {
	var errs []error
	for _, line := range []string{
		"gateway ip addr add 2001:db8:1::1/64 dev wan0 nodad", "gateway ip addr add 2001:db8:2::1/64 dev lan0 nodad",
		"client ip addr add " + Client6 + "/64 dev eth0 nodad", "client ip -6 route add default via 2001:db8:1::1",
		"server ip addr add " + Server6 + "/64 dev eth0 nodad", "server ip -6 route add default via 2001:db8:2::1",
	} {
		words := strings.Fields(line)
		errs = append(errs, command(words[0], words[1], words[2:]...)(ctx, l))
	}
	return errors.Join(errs...)
}

// mtu narrows the link to the server.
func mtu(bytes int) setup {
	return both(command("gateway", "ip", "link", "set", "lan0", "mtu", fmt.Sprint(bytes)),
		command("server", "ip", "link", "set", "eth0", "mtu", fmt.Sprint(bytes)))
}

// segmentInSoftware makes the client's kernel cut large sends into packets that
// arrive at the router all at once.
func segmentInSoftware(ctx context.Context, l *lab.Lab) error {
	return command("client", "ethtool", "-K", "eth0", "tx-udp-segmentation", "off")(ctx, l)
}

// dialTCP opens so many connections to the server, keeps them, and counts the SYNs
// that the client sent and the server did not get.
func dialTCP(connections, parallel int) func(context.Context, *lab.Lab) (int, error) {
	return func(ctx context.Context, l *lab.Lab) (int, error) {
		if err := both(countSYNs("client", "output"), countSYNs("server", "input"))(ctx, l); err != nil {
			return 0, err
		}
		server, err := l.Node("server").Listen(Server + ":80")
		if err != nil {
			return 0, err
		}
		defer server.Close()
		go acceptAll(server)
		var mu sync.Mutex
		var wg sync.WaitGroup
		var open []net.Conn
		slots := make(chan struct{}, max(parallel, 10))
		for range connections {
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				c, err := l.Node("client").Dial(ctx, &net.Dialer{Timeout: 700 * time.Millisecond}, "tcp", Server+":80")
				if err != nil {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				open = append(open, c)
			})
		}
		wg.Wait()
		sent, err1 := countedSYNs(ctx, l, "client")
		got, err2 := countedSYNs(ctx, l, "server")
		for _, c := range open {
			c.Close()
		}
		return sent - got, errors.Join(err1, err2)
	}
}

// acceptAll takes connections and reads them until the other side closes.
func acceptAll(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}()
	}
}

// sendUDP sends packets of the same flow. With probe they carry DF and the
// sender does not learn from ICMP, as behind a firewall that drops it.
func sendUDP(n int, from, to string, port uint16, size int, probe bool) func(context.Context, *lab.Lab) (int, error) {
	return func(ctx context.Context, l *lab.Lab) (int, error) {
		return n, l.Node("client").Do(func() error {
			d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
			if probe {
				d.Control = dontFragment
			}
			c, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(netip.MustParseAddr(to), port).String())
			if err != nil {
				return err
			}
			defer c.Close()
			return writeAll(c, n, make([]byte, size))
		})
	}
}

// writeAll sends n packets. A later write reports an ICMP error for an earlier packet, and is then
// repeated.
func writeAll(c net.Conn, n int, payload []byte) error {
	for range n {
		_, err := c.Write(payload)
		for errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) ||
			errors.Is(err, syscall.EMSGSIZE) {
			_, err = c.Write(payload)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func dontFragment(_, _ string, raw syscall.RawConn) (err error) {
	control := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
	})
	return errors.Join(control, err)
}

// sendRange sends one packet to each of many hosts behind the router, so that the router resolves
// many next hops.
func sendRange(ctx context.Context, l *lab.Lab) (int, error) {
	return 0, l.Node("client").Do(func() error {
		c, err := net.ListenPacket("udp4", Client+":0")
		if err != nil {
			return err
		}
		defer c.Close()
		for i := 10; i < 250; i++ {
			to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 9))
			if _, err := c.WriteTo([]byte("x"), to); err != nil && !errors.Is(err, syscall.EHOSTUNREACH) {
				return err
			}
		}
		return nil
	})
}

// overflowListener connects more often to a program on the router than its
// queue has room for; the program never accepts.
func overflowListener(ctx context.Context, l *lab.Lab) (int, error) {
	var listener int
	err := l.Node("gateway").Do(func() (err error) {
		if listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err = unix.Bind(listener, &unix.SockaddrInet4{Port: 8081, Addr: [4]byte{192, 0, 2, 1}}); err != nil {
			return err
		}
		return unix.Listen(listener, 1)
	})
	if err != nil {
		return 0, err
	}
	defer unix.Close(listener)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			if c, err := l.Node("client").Dial(ctx, &net.Dialer{Timeout: 900 * time.Millisecond}, "tcp", Gateway+":8081"); err == nil {
				time.AfterFunc(time.Second, func() { c.Close() })
			}
		})
	}
	wg.Wait()
	return 0, nil
}

// burst sends large blocks that become packets in the router's backlog at one
// stroke (UDP_SEGMENT).
func burst(ctx context.Context, l *lab.Lab) (int, error) {
	return 0, l.Node("client").Do(func() error {
		c, err := net.Dial("udp4", Server+":9")
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return err
		}
		_ = raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000)
		})
		if err != nil {
			return err
		}
		return writeAll(c, 50, make([]byte, 40000))
	})
}

// busy opens connections through the port forward, sends on them and closes them. All succeed.
func busy(ctx context.Context, l *lab.Lab) (int, error) {
	server, err := l.Node("server").Listen(Server + ":80")
	if err != nil {
		return 0, err
	}
	defer server.Close()
	go acceptAll(server)
	var wg sync.WaitGroup
	errs := make(chan error, 20)
	for range 20 {
		wg.Go(func() {
			for range 25 {
				c, err := l.Node("client").Dial(ctx, &net.Dialer{Timeout: 10 * time.Second}, "tcp", Gateway+":8080")
				if err != nil {
					errs <- err
					return
				}
				_, err = c.Write(make([]byte, 20000))
				c.Close()
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return 0, <-errs
}

// DenyAll makes the router drop everything that it should forward, in nftables.
func DenyAll(ctx context.Context, l *lab.Lab) error {
	return nft("table inet filter { chain forward {\n type filter hook forward priority filter; policy drop\n}\n}")(ctx, l)
}

// ManyRules makes the router walk 1,200 rules for each packet.
func ManyRules(ctx context.Context, l *lab.Lab) error { return nft(linearRules(1200))(ctx, l) }
