// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// observed runs an action while the packets of the gateway are observed.
func observed(t *testing.T, l *lab.Lab, action func(ctx context.Context)) (packets []trace.Packet) {
	t.Helper()
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	p, err := trace.OpenPackets(ns.Inode)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	reading, stop := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	readers.Go(func() {
		if err := p.Read(reading, func(packet *trace.Packet) { packets = append(packets, *packet) }); err != nil {
			t.Error(err)
		}
	})
	action(t.Context())
	time.Sleep(300 * time.Millisecond) // the rest of the exchange
	stop()
	readers.Wait()
	if lost := p.Lost(); lost != (trace.PacketLoss{}) {
		t.Errorf("packets were lost: %+v", lost)
	}
	return packets
}

// TestPackets forwards a connection through masquerade and expects each step: receive, transmit with the tuples
// before and after translation, the reply, and a packet that a rule drops.
func TestPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, faults.Topology("packets"))
	gw := l.Node("gateway")
	rules := `table ip nat { chain post { type nat hook postrouting priority srcnat; oifname "lan0" masquerade; }; }
		table ip filter { chain forward { type filter hook forward priority 0; tcp dport 81 drop; }; }`
	if out, err := gw.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	listener, err := l.Node("server").Listen(faults.Server + ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
	packets := observed(t, l, func(ctx context.Context) {
		dialer := &net.Dialer{Timeout: 300 * time.Millisecond}
		c, err := l.Node("client").Dial(ctx, dialer, "tcp", faults.Server+":80")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(make([]byte, 1200))
		_, _ = io.ReadFull(c, make([]byte, 1200))
		c.Close()
		if c, err := l.Node("client").Dial(ctx, dialer, "tcp", faults.Server+":81"); err == nil {
			c.Close()
			t.Error("the rule did not drop")
		}
		if c, err := l.Node("client").Dial(ctx, dialer, "tcp", faults.Server+":82"); err == nil {
			c.Close()
			t.Error("a port without a listener accepts")
		}
	})
	for _, p := range packets {
		t.Logf("%s %s in %d %s flags %#x payload %d %s original %s reply %s %s %s", p.Point, p.Interface, p.InIfIndex, p.Tuple, p.TCPFlags, p.Payload,
			p.Tracked, p.Original, p.Reply, p.Direction, p.Cause.ID)
	}
	client, server, gateway := netip.MustParseAddr(faults.Client), netip.MustParseAddr(faults.Server), netip.MustParseAddr(faults.GatewayLAN)
	want := func(what string, fits func(p *trace.Packet) bool) {
		t.Helper()
		if !slices.ContainsFunc(packets, func(p trace.Packet) bool { return fits(&p) }) {
			t.Errorf("not observed: %s", what)
		}
	}
	tcp := func(p *trace.Packet, at trace.Point, iface string, from, to netip.Addr, port uint16) bool {
		return p.Point == at && p.Interface == iface && p.Tuple.Protocol == flow.TCP && p.Tuple.Source.Addr() == from && p.Tuple.Dest.Addr() == to &&
			(p.Tuple.Dest.Port() == port || p.Tuple.Source.Port() == port)
	}
	want("the SYN as it arrives", func(p *trace.Packet) bool {
		return tcp(p, trace.Received, "wan0", client, server, 80) && p.Opening() && p.HasMACs
	})
	want("the SYN as it leaves, translated", func(p *trace.Packet) bool {
		return tcp(p, trace.Transmitted, "lan0", gateway, server, 80) && p.Opening() && p.Original.Source.Addr() == client &&
			p.Reply.Dest.Addr() == gateway && p.InIfIndex != 0 && p.HasMACs && p.DestMAC != [6]byte{}
	})
	want("the answer as it arrives", func(p *trace.Packet) bool {
		return tcp(p, trace.Received, "lan0", server, gateway, 80) && p.TCPFlags&trace.TCPSyn != 0
	})
	want("the answer as it leaves", func(p *trace.Packet) bool {
		return tcp(p, trace.Transmitted, "wan0", server, client, 80) && p.Direction == flow.Reply && p.SeenReply
	})
	want("a reset, which has no options", func(p *trace.Packet) bool {
		return tcp(p, trace.Received, "lan0", server, gateway, 82) && p.TCPFlags&trace.TCPRst != 0
	})
	want("a large segment", func(p *trace.Packet) bool {
		return tcp(p, trace.Transmitted, "lan0", gateway, server, 80) && p.Payload == 1200
	})
	want("the dropped SYN with its cause", func(p *trace.Packet) bool {
		return p.Point == trace.Dropped && p.Tuple.Dest.Port() == 81 && (p.Cause.ID == trace.CauseNftRule.ID || p.Cause.ID == trace.CauseHookRule.ID)
	})
}
