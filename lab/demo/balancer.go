// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
)

// playFullNAT shows both families, at the clients and at the servers, and DNS.
func playFullNAT(ctx context.Context, s *stage) error {
	var all servers
	defer func() { all.stop() }()
	for _, b := range []struct{ node, name, addr string }{
		{"s1", "a", "10.0.2.2:8000"}, {"s1", "b", "[fd00:2::2]:8000"}, {"s9", "spare", "10.0.2.9:8000"},
	} {
		server, err := host.ServeWeb(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return err
		}
		all = append(all, server)
	}
	for _, b := range []struct{ node, name, addr string }{{"s1", "a", "10.0.2.2:53"}, {"s3", "c", "10.0.2.4:53"}} {
		server, err := host.ServeDNS(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return err
		}
		all = append(all, server)
	}
	gw, err := s.start(ctx, "gateway", "lb-fullnat.yaml", byFamily)
	if err != nil || gw == nil {
		return err
	}
	s.askAPI(ctx)
	t := s.run(ctx, host.Load{
		From: s.lab.Node("client"), Target: netip.MustParseAddrPort("192.0.2.20:53"),
		Ask: host.AskDNS, Sources: manyClients, Count: 3000,
	})
	s.recordPromise(len(t.Failures) == 0, "every DNS question is answered", "%d of %d%s", t.Good(), t.Sent(), causes(t.Failures))
	s.recordPromise(isClose(share(t, "a"), 0.5, 0.02), "round robin is even", "%s", t.Spread())
	return gw.Stop()
}

// byFamily splits services over both families into one per family. Hosts without the eBPF datapath need this, because
// only that datapath translates between IPv4 and IPv6.
func byFamily(text []byte) ([]byte, error) {
	cfg, err := config.Decode("lb-fullnat.yaml", text)
	if err != nil {
		return nil, err
	}
	var split []config.Service
	for _, service := range cfg.Services {
		if !slices.ContainsFunc(service.Listen, func(l config.Listen) bool { return !l.Address.Is4() }) {
			split = append(split, service)
			continue
		}
		for _, is4 := range []bool{true, false} {
			one := service
			one.Name += map[bool]string{true: "4", false: "6"}[is4]
			one.Listen = slices.DeleteFunc(slices.Clone(one.Listen), func(l config.Listen) bool { return l.Address.Is4() != is4 })
			one.Backends = slices.DeleteFunc(slices.Clone(one.Backends), func(b config.Backend) bool { return b.Address.Is4() != is4 })
			one.SourcePool = slices.DeleteFunc(slices.Clone(one.SourcePool), func(r config.AddressRange) bool { return r.Is4() != is4 })
			if len(one.Listen) > 0 && len(one.Backends) > 0 {
				split = append(split, one)
			}
		}
	}
	cfg.Services = split
	return config.Marshal(cfg)
}

// askAPI sends requests to both virtual addresses. Its rate is below the service's limit of 1,000 new connections per
// second.
func (s *stage) askAPI(ctx context.Context) {
	pool := map[string]bool{
		"10.0.2.100": true, "10.0.2.101": true, "10.0.2.102": true, "10.0.2.103": true, "fd00:2::100": true,
	}
	for _, family := range []struct {
		name, target string
		sources      netip.Prefix
	}{{"IPv4", "192.0.2.20:8000", manyClients}, {"IPv6", "[2001:db8::20]:8000", manyClients6}} {
		load := host.Load{
			From: s.lab.Node("client"), Target: netip.MustParseAddrPort(family.target),
			Ask: host.AskWeb, Sources: family.sources, Count: 1500, Rate: 750,
		}
		t := s.run(ctx, load)
		promise, kept := family.name+" clients reach IPv4 and IPv6 servers, 3:1", len(t.Failures) == 0 && isClose(share(t, "a"), 0.75, 0.04)
		if s.reduced {
			promise, kept = family.name+" clients reach "+family.name+" servers", len(t.Failures) == 0
		}
		s.recordPromise(kept, promise, "%d of %d answered%s: %s", t.Good(), t.Sent(), causes(t.Failures), t.Spread())
		others := 0
		for client, n := range t.Clients() {
			if !pool[client] {
				others += n
			}
		}
		s.recordPromise(others == 0 && t.Good() > 0, "servers see only the source pool ("+family.name+")", "%d addresses of the pool, %d requests from elsewhere",
			len(t.Clients()), others)
	}
	// A small set of clients sends repeatedly: each must keep its server.
	load := host.Load{
		From: s.lab.Node("client"), Target: netip.MustParseAddrPort("192.0.2.20:8000"),
		Ask: host.AskWeb, Sources: netip.MustParsePrefix("10.64.99.0/27"), Count: 300, Rate: 750,
	}
	t := s.run(ctx, load)
	s.recordPromise(t.Wanderers() == 0 && len(t.Failures) == 0, "a client keeps its server", "%d of 30 clients met two servers in %d requests", t.Wanderers(), t.Sent())
}

// playDirect shows direct server return: replies bypass the gateway.
func playDirect(ctx context.Context, s *stage) error {
	var all servers
	defer func() { all.stop() }()
	for _, b := range []struct{ node, name string }{{"s1", "a"}, {"s2", "b"}} {
		server, err := host.ServeWeb(s.lab.Node(b.node), b.name, "192.0.2.30:80")
		if err != nil {
			return err
		}
		all = append(all, server)
	}
	gw, err := s.start(ctx, "gateway", "lb-dsr.yaml", nil)
	if err != nil || gw == nil {
		return err
	}
	client, gateway := s.lab.Node("client"), s.lab.Node("gateway")
	replies, passed, err := packetsBetween(client, "ret0", gateway, "wan0")
	if err != nil {
		return err
	}
	t := s.run(ctx, host.Load{
		From: client, Target: netip.MustParseAddrPort("192.0.2.30:80"), Ask: host.AskWeb, Sources: manyClients, Count: 3000,
	})
	replies2, passed2, err := packetsBetween(client, "ret0", gateway, "wan0")
	if err != nil {
		return err
	}
	replies, passed = replies2-replies, passed2-passed
	s.recordPromise(len(t.Failures) == 0, "every request is answered", "%d of %d%s: %s", t.Good(), t.Sent(), causes(t.Failures), t.Spread())
	// Neighbour discovery may send a few packets.
	s.recordPromise(replies >= uint64(t.Good()) && passed < uint64(t.Sent())/100, "replies bypass the gateway",
		"%d packets bypassed it, it sent %d to the client", replies, passed)
	return gw.Stop()
}

// packetsBetween returns the number of packets that rx received on one interface, and that tx sent on another.
func packetsBetween(rx *lab.Node, rxIface string, tx *lab.Node, txIface string) (in, out uint64, err error) {
	h, err := rx.Handle()
	if err != nil {
		return 0, 0, err
	}
	defer h.Close()
	link, err := h.LinkByName(rxIface)
	if err != nil {
		return 0, 0, err
	}
	h2, err := tx.Handle()
	if err != nil {
		return 0, 0, err
	}
	defer h2.Close()
	link2, err := h2.LinkByName(txIface)
	if err != nil {
		return 0, 0, err
	}
	return link.Attrs().Statistics.RxPackets, link2.Attrs().Statistics.TxPackets, nil
}

// playStateless shows balancing without state.
func playStateless(ctx context.Context, s *stage) error {
	var all servers
	defer func() { all.stop() }()
	for _, b := range []struct{ node, name, addr string }{{"s1", "a", "10.0.2.2:514"}, {"s2", "b", "10.0.2.3:514"}} {
		server, err := host.ServeDatagrams(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return err
		}
		all = append(all, server)
	}
	gw, err := s.start(ctx, "gateway", "stateless.yaml", nil)
	if err != nil || gw == nil {
		return err
	}
	before, err := trackedConnections(s.lab.Node("gateway"))
	if err != nil {
		return err
	}
	load := host.Load{
		From: s.lab.Node("client"), Target: netip.MustParseAddrPort("192.0.2.40:514"),
		Ask: host.AskDatagram, Sources: netip.MustParsePrefix("10.64.8.0/23"), Count: 4000,
	}
	t := s.run(ctx, load)
	after, err := trackedConnections(s.lab.Node("gateway"))
	if err != nil {
		return err
	}
	s.recordPromise(len(t.Failures) == 0, "every datagram is answered from the virtual address", "%d of %d%s: %s",
		t.Good(), t.Sent(), causes(t.Failures), t.Spread())
	s.recordPromise(t.Wanderers() == 0 && len(t.Servers()) == 2, "the source address alone picks the server", "%d of %d clients met two servers",
		t.Wanderers(), len(t.Clients()))
	s.recordPromise(after <= before, "no flow is tracked", "connection tracking grew by %d entries", max(0, after-before))
	return gw.Stop()
}

// trackedConnections returns the number of connections that the node's kernel tracks.
func trackedConnections(n *lab.Node) (count int, err error) {
	err = n.Do(func() error {
		data, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if os.IsNotExist(err) {
			return nil // connection tracking is not loaded on this machine
		}
		if err != nil {
			return err
		}
		if count, err = strconv.Atoi(strings.TrimSpace(string(data))); err != nil {
			return fmt.Errorf("nf_conntrack_count: %w", err)
		}
		return nil
	})
	return count, err
}
