// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// docker is a host with a bridge and two containers, as Docker makes it, and a client outside. The program restore loads
// the rules.
//
//	client eth0 ---- wan0 router docker0 [port0 port1] ---- eth0 container, eth0 other
func docker(t *testing.T, restore string) *lab.Lab {
	t.Helper()
	l := labtest.New(t, lab.Topology{
		Name: "accelbr", About: "a host with containers on a bridge",
		Nodes: []lab.NodeSpec{
			{Name: "client"},
			{Name: "router", Forward: true},
			{Name: "container"},
			{Name: "other"},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", GRO: true, Addresses: []string{"10.0.1.2/24"}},
				B: lab.End{Node: "router", Iface: "wan0", GRO: true, Addresses: []string{"10.0.1.1/24"}}},
			{A: lab.End{Node: "router", Iface: "port0"}, B: lab.End{Node: "container", Iface: "eth0", Addresses: []string{"172.17.0.2/16"}}},
			{A: lab.End{Node: "router", Iface: "port1"}, B: lab.End{Node: "other", Iface: "eth0", Addresses: []string{"172.17.0.3/16"}}},
		},
	})
	n := l.Node("router")
	for _, words := range [][]string{
		{"ip", "link", "add", "docker0", "type", "bridge"},
		{"ip", "link", "set", "docker0", "address", "02:42:ac:11:00:01"},
		{"ip", "link", "set", "port0", "master", "docker0"},
		{"ip", "link", "set", "port1", "master", "docker0"},
		{"ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"},
		{"ip", "link", "set", "docker0", "up"},
	} {
		command(t, n, "", words...)
	}
	for _, name := range []string{"container", "other"} {
		command(t, l.Node(name), "", "ip", "route", "add", "default", "via", "172.17.0.1")
	}
	command(t, n, dockerRules, restore)
	return l
}

// dockerRules are the rules of Docker 28 for a container that publishes port 8080 of TCP and UDP.
const dockerRules = `*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER ! -i docker0 -p udp -m udp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p udp -m udp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-ISOLATION-STAGE-1
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
COMMIT
`

// bulk sends data through an echo and compares it.
func (k *talk) bulk(size int) {
	k.t.Helper()
	data := make([]byte, size)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(data)
	_ = k.conn.SetDeadline(time.Now().Add(patience))
	go func() { _, _ = k.conn.Write(data) }()
	back := make([]byte, size)
	if _, err := io.ReadFull(k.conn, back); err != nil {
		k.t.Fatal(err)
	}
	if !bytes.Equal(data, back) {
		k.t.Error("the data that returned differs from the data that was sent")
	}
}

// TestDockerBridge accelerates a published port, with the offloads of containers, and a connection from a container.
func TestDockerBridge(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("iptables-nft-restore"))
	l := docker(t, "iptables-nft-restore")
	echo(t, l.Node("container"), 80)
	echo(t, l.Node("client"), 7)
	r := begin(t, l.Node("router"))
	for _, network := range []string{"tcp", "udp"} {
		k := dial(t, l.Node("client"), network, "10.0.1.1:8080")
		k.fast(r)
		if network == "tcp" {
			k.bulk(16 << 20)
		}
	}
	k := dial(t, l.Node("other"), "tcp", "10.0.1.2:7")
	k.fast(r)
	k.bulk(16 << 20)
	if s := r.status(); s.TC == 0 || s.XDP != 0 {
		t.Errorf("%d packets took the fast path in TC and %d in XDP", s.TC, s.XDP)
	}
}

// TestIdenticalPacketsBehindBridge is TestIdenticalPackets for Docker's chains and a bridge.
func TestIdenticalPacketsBehindBridge(t *testing.T) {
	for _, restore := range []string{"iptables-nft-restore", "iptables-legacy-restore"} {
		t.Run(restore, func(t *testing.T) {
			labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool(restore))
			l := docker(t, restore)
			n := l.Node("router")
			p := &passage{t: t, router: n, client: openWire(t, l.Node("client"), "eth0", macIn(t, n, "wan0")), server: openWire(t, l.Node("container"), "eth0", macIn(t, n, "docker0"))}
			for i := range 6 {
				p.connect([]byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}[i%2], "10.0.1.1:8080")
			}
			p.identicalBy(hookTC)
		})
	}
}
