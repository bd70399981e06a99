// SPDX-License-Identifier: Apache-2.0

package sick

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// kind is what the examined host is for.
type kind int

const (
	router   kind = iota // masquerades a LAN
	docker               // a bridge with containers, rules of iptables-nft
	gateway              // VPN clients and a LAN
	balancer             // two servers behind a published port
	kinds
)

var kindNames = [...]string{"router", "docker", "vpn gateway", "balancer"}

// host is one examined host g between c, the inside, and s, the Internet, with its traffic.
type host struct {
	t       *testing.T
	kind    kind
	lab     *lab.Lab
	names   map[string]string // variables of scripts
	flows   map[string]*flow
	end     context.CancelFunc
	running sync.WaitGroup
	closers []io.Closer
}

// flow is a repeated exchange. It counts those that began in the present period.
type flow struct{ period, tried, answered atomic.Int64 }

// Addresses that all hosts have.
const (
	outside = "203.0.113.1" // g on the uplink
	far     = "203.0.113.2" // s on the uplink
)

var remote = [...]string{"198.51.100.7", "198.51.100.8", "198.51.100.9"} // on s

// names of interfaces and the inside network, by kind.
var inside = [...]map[string]string{
	{"IN": "lan0", "OUT": "wan0", "C": "10.0.0.2", "GIN": "10.0.0.1", "NET": "10.0.0.0/24"},
	{"IN": "docker0", "OUT": "ens3", "C": "172.17.0.2", "GIN": "172.17.0.1", "NET": "172.17.0.0/16"},
	{"IN": "wg0", "OUT": "ens3", "C": "10.8.0.2", "GIN": "10.8.0.1", "NET": "10.8.0.0/24"},
	{"IN": "lan0", "OUT": "wan0", "C": "10.0.0.2", "GIN": "10.0.0.1", "NET": "10.0.0.0/24"},
}

func newHost(t *testing.T, k kind) *host {
	n := inside[k]
	bits := n["NET"][strings.Index(n["NET"], "/"):]
	port := n["IN"]
	inner := []string{n["GIN"] + bits, "2001:db8:1::1/64"}
	if k == docker {
		port, inner = "veth1", nil
	}
	topology := lab.Topology{Name: "sick",
		Nodes: []lab.NodeSpec{
			{Name: "c", Routes: []lab.Route{{To: "default", Via: n["GIN"]}, {To: "default6", Via: "2001:db8:1::1"}}},
			{Name: "d", Routes: []lab.Route{{To: "default", Via: "10.0.1.1"}}},
			{Name: "g", Forward: true},
			{Name: "s", Addresses: []string{remote[0] + "/32", remote[1] + "/32", remote[2] + "/32", "2001:db8:9::7/128"}, Routes: []lab.Route{{To: "2001:db8:1::/64", Via: "2001:db8:0:1::1"}}},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "c", Iface: "eth0", Addresses: []string{n["C"] + bits, "2001:db8:1::2/64"}}, B: lab.End{Node: "g", Iface: port, Addresses: inner}},
			{A: lab.End{Node: "d", Iface: "eth0", Addresses: []string{"10.0.1.2/24"}}, B: lab.End{Node: "g", Iface: "lan9", Addresses: []string{"10.0.1.1/24"}}},
			{A: lab.End{Node: "s", Iface: "eth0", Addresses: []string{far + "/24", "203.0.113.66/24", "2001:db8:0:1::2/64"}}, B: lab.End{Node: "g", Iface: n["OUT"], Addresses: []string{outside + "/24", "2001:db8:0:1::1/64"}}},
		}}
	h := &host{t: t, kind: k, lab: labtest.New(t, topology), names: map[string]string{"G": outside, "S": far}, flows: map[string]*flow{}}
	for name, value := range n {
		h.names[name] = value
	}
	h.sh("g", `ip route add default via 203.0.113.2; ip -6 route add default via 2001:db8:0:1::2
		sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.$OUT.rp_filter=0`)
	h.sh("g", "sysctl -qw net.ipv4.conf."+port+".rp_filter=0")
	switch k {
	case docker:
		h.sh("g", `ip link add docker0 address 02:42:ac:11:00:01 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip -6 addr add 2001:db8:1::1/64 dev docker0 nodad; ip link set docker0 up; ip link set veth1 master docker0
			sysctl -qw net.ipv4.conf.docker0.rp_filter=0
			iptables-nft -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
			iptables-nft -t nat -A PREROUTING -m addrtype --dst-type LOCAL -p tcp --dport 8080 -j DNAT --to 172.17.0.2:80
			iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; iptables-nft -A FORWARD -i docker0 -j ACCEPT
			iptables-nft -A FORWARD -d 172.17.0.2 ! -i docker0 -o docker0 -p tcp --dport 80 -j ACCEPT`)
	default:
		to := "$C:80"
		if k == balancer {
			to = "numgen inc mod 2 map { 0 : $C, 1 : 10.0.1.2 } : 80"
		}
		h.sh("g", `nft -f - <<R
table ip nat { chain pre { type nat hook prerouting priority dstnat; iifname "$OUT" tcp dport 8080 dnat to `+to+`; }
 chain post { type nat hook postrouting priority srcnat; oifname "$OUT" masquerade; }; }
table inet filter { chain forward { type filter hook forward priority filter; policy drop; ct state established,related accept; iifname "$IN" accept; iifname "lan9" accept; ct status dnat accept; meta l4proto ipv6-icmp accept; }
 chain input { type filter hook input priority filter; policy drop; ct state established,related accept; iifname "lo" accept; meta l4proto { icmp, ipv6-icmp } accept; udp dport 1194 accept; tcp dport { 22, 8443 } accept; }
 chain output { type filter hook output priority filter; policy accept; }; }
R`)
	}
	return h
}

// sh runs a script in a node.
func (h *host) sh(node, script string) {
	h.t.Helper()
	if out, err := h.run(node, script); err != nil {
		h.t.Fatalf("%s: %s: %v: %s", node, script, err, out)
	}
}

func (h *host) run(node, script string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := h.lab.Node(node).Command(ctx, "sh", "-ec", script)
	cmd.Env = os.Environ()
	for name, value := range h.names {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// begin starts the servers and the exchanges.
func (h *host) begin() {
	ctx, end := context.WithCancel(context.Background())
	h.end = end
	for _, l := range []struct{ node, address string }{{"s", "0.0.0.0:443"}, {"s", "[::]:443"}, {"c", "0.0.0.0:80"}, {"d", "0.0.0.0:80"}, {"g", outside + ":8443"}} {
		h.serve(l.node, l.address)
	}
	h.echo("s", remote[0]+":53")
	h.echo("g", outside+":1194")
	h.exchange(ctx, "out", "c", "tcp", func(r *rand.Rand) string { return remote[r.IntN(len(remote))] + ":443" })
	h.exchange(ctx, "dns", "c", "udp", func(*rand.Rand) string { return remote[0] + ":53" })
	h.exchange(ctx, "published", "s", "tcp", func(*rand.Rand) string { return outside + ":8080" })
	h.exchange(ctx, "six", "c", "tcp", func(*rand.Rand) string { return "[2001:db8:9::7]:443" })
	h.exchange(ctx, "own", "g", "tcp", func(*rand.Rand) string { return remote[1] + ":443" })
	h.exchange(ctx, "service", "s", "udp", func(*rand.Rand) string { return outside + ":1194" })
	h.exchange(ctx, "web", "s", "tcp", func(*rand.Rand) string { return outside + ":8443" })
}

func (h *host) stop() {
	h.end()
	for _, c := range h.closers {
		c.Close()
	}
	h.running.Wait()
}

// serve answers the first bytes of each connection.
func (h *host) serve(node, address string) {
	var l net.Listener
	network := "tcp4"
	if strings.HasPrefix(address, "[") {
		network = "tcp6"
	}
	if err := h.lab.Node(node).Do(func() (err error) { l, err = net.Listen(network, address); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.closers = append(h.closers, l)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(5 * time.Second))
				b := make([]byte, 64<<10)
				for {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					if b[n-1] == '\n' { // the end of the request
						_, _ = c.Write([]byte("ok"))
					}
				}
			}()
		}
	}()
}

// echo answers datagrams, swell answers them by datagrams that do not fit into one packet.
func (h *host) echo(node, address string)  { h.answer(node, address, 0) }
func (h *host) swell(node, address string) { h.answer(node, address, 2500) }

// answer answers datagrams by datagrams of a length, or by their own.
func (h *host) answer(node, address string, length int) {
	c, err := h.lab.Node(node).ListenPacket(address)
	if err != nil {
		h.t.Fatal(err)
	}
	h.closers = append(h.closers, c)
	go func() {
		b := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(b[:2048])
			if err == nil {
				_, _ = c.WriteTo(b[:max(n, length)], from)
			} else if strings.Contains(err.Error(), "closed") {
				return
			}
		}
	}()
}

// Rates of exchanges: one each gap, with an answer within patience.
const (
	gap      = 100 * time.Millisecond
	patience = 700 * time.Millisecond
)

// exchange asks a server over and over.
func (h *host) exchange(ctx context.Context, name, node, network string, to func(*rand.Rand) string) {
	h.repeat(ctx, name, func(r *rand.Rand) func() bool {
		address := to(r)
		return func() bool { return h.ask(ctx, node, network, address) }
	})
}

// repeat makes exchanges over and over.
func (h *host) repeat(ctx context.Context, name string, next func(*rand.Rand) func() bool) {
	f := &flow{}
	h.flows[name] = f
	r := rand.New(rand.NewPCG(uint64(len(name)), 1))
	h.running.Go(func() {
		for tick := time.NewTicker(gap); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			ask := next(r)
			h.running.Go(func() {
				period := f.period.Load()
				f.tried.Add(1)
				if ask() && f.period.Load() == period {
					f.answered.Add(1)
				}
			})
		}
	})
}

// ask makes one exchange: a request that fills two segments, and its answer.
func (h *host) ask(ctx context.Context, node, network, address string) bool {
	c, err := h.lab.Node(node).Dial(ctx, &net.Dialer{Timeout: patience}, network, address)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	request := []byte("hello\n")
	if network == "tcp" {
		request = append(make([]byte, 2500), '\n')
	}
	if _, err := c.Write(request); err != nil {
		return false
	}
	_, err = c.Read(make([]byte, 2048))
	return err == nil
}

// askTwice sends two queries of DNS at once from one socket of c, which differ by their first bytes.
func (h *host) askTwice(ctx context.Context, address string) bool {
	c, err := h.lab.Node("c").Dial(ctx, &net.Dialer{}, "udp", address)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	for id := range byte(2) {
		if _, err := c.Write(append([]byte{0, id + 1}, make([]byte, 20)...)); err != nil {
			return false
		}
	}
	for range 2 {
		if _, err = c.Read(make([]byte, 64)); err != nil {
			return false
		}
	}
	return true
}

// answered is the share of the exchanges of a flow that begin from now on and are answered.
func (h *host) answered(name string, during time.Duration) float64 {
	f := h.flows[name]
	f.period.Add(1)
	f.tried.Store(0)
	f.answered.Store(0)
	time.Sleep(during + patience)
	n := f.tried.Load() - int64(patience/gap) // those begun last may still wait
	return float64(f.answered.Load()) / float64(max(n, 1))
}

// noise sends healthy traffic. Many of its packets get no answer.
func (h *host) noise(ctx context.Context, r *rand.Rand) (names []string) {
	every := func(gap time.Duration, do func()) {
		h.running.Go(func() {
			for ctx.Err() == nil {
				do()
				select {
				case <-ctx.Done():
				case <-time.After(gap):
				}
			}
		})
	}
	send := func(node, from, to string) {
		_ = h.lab.Node(node).Do(func() error {
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(from)}, udpAddress(to))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("discover"))
			return err
		})
	}
	for _, n := range []struct {
		name  string
		start func()
	}{
		{"broadcasts", func() {
			every(60*time.Millisecond, func() { send("c", h.names["C"], "255.255.255.255:137") })
			every(90*time.Millisecond, func() { send("c", h.names["C"], "239.255.255.250:1900") })
		}},
		{"port scan", func() {
			every(120*time.Millisecond, func() {
				d := net.Dialer{Timeout: 30 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP("203.0.113.66")}}
				if c, err := h.lab.Node("s").Dial(ctx, &d, "tcp", fmt.Sprintf("%s:%d", outside, 2000+rand.IntN(60000))); err == nil {
					c.Close()
				}
			})
		}},
		{"address sweep", func() {
			every(150*time.Millisecond, func() { send("c", h.names["C"], fmt.Sprintf("198.51.100.%d:161", 10+rand.IntN(240))) })
		}},
		{"stray sources", func() {
			every(100*time.Millisecond, func() { send("s", "203.0.113.66", outside+":161") })
		}},
		{"probes", func() {
			every(200*time.Millisecond, func() {
				if c, err := h.lab.Node("s").Dial(ctx, &net.Dialer{Timeout: patience}, "tcp", outside+":8443"); err == nil {
					_ = c.(*net.TCPConn).SetLinger(0)
					c.Close()
				}
			})
		}},
		{"rule changes", func() {
			every(700*time.Millisecond, func() { _, _ = h.run("g", "nft 'add table inet job; add chain inet job x'; nft delete table inet job") })
		}},
	} {
		if r.IntN(3) == 0 {
			names = append(names, n.name)
			n.start()
		}
	}
	return names
}

func udpAddress(s string) *net.UDPAddr {
	a, err := net.ResolveUDPAddr("udp4", s)
	if err != nil {
		return &net.UDPAddr{}
	}
	return a
}
