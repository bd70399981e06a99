// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
)

// slowTransmit is the eBPF datapath without fast transmit: it queries the routing table for the next hop of every
// packet.
const slowTransmit = "ebpf without fast transmit"

// openers open Sluice's datapaths in the namespace of the calling thread.
var openers = map[string]func(t *Trial, n *network) (datapath.Datapath, error){
	"nftables": func(*Trial, *network) (datapath.Datapath, error) { return nft.Open() },
	"ebpf":     func(t *Trial, n *network) (datapath.Datapath, error) { return openEBPF(t, n, ebpf.Options{}) },
	slowTransmit: func(t *Trial, n *network) (datapath.Datapath, error) {
		return openEBPF(t, n, ebpf.Options{RouteEveryPacket: true})
	},
}

// openEBPF opens the eBPF datapath with its pins on the gateway's own bpffs.
func openEBPF(t *Trial, n *network, o ebpf.Options) (datapath.Datapath, error) {
	state, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() error { return os.RemoveAll(state) })
	o.StateDir, o.Log = state, slog.New(slog.DiscardHandler)
	if dir := n.gateway.BPFFS(); dir != "" {
		o.Dir = filepath.Join(dir, "sluice")
	}
	return ebpf.Open(o)
}

// pool is the source pool of fullnat and snat rows: 32 addresses, room for two
// million flows to one backend.
const (
	pool4 = "10.0.2.96-10.0.2.127"
	pool6 = "fd00:2::100-fd00:2::11f"
)

// sluiceRow returns a row for one of Sluice's datapaths. conf returns its configuration at a point; drive sends the
// load and reports.
func sluiceRow(name, about, path string, conf func(Point) string, drive func(*Trial, *network) error) Row {
	tracked := 0
	if path == "nftables" {
		tracked = 2
	}
	set := func(t *Trial, n *network) error { return applySluice(t, n, path, conf(t.Point)) }
	return absentRow(gatewayRow(name, about, tracked, set, drive), path)
}

// pairRow returns a row of the eBPF datapath on a host with a bridge that is up. TC then follows XDP for packets that
// may leave by the bridge.
func pairRow(name, about string, conf func(Point) string, drive func(*Trial, *network) error) Row {
	set := func(t *Trial, n *network) error {
		for _, words := range [][]string{{"ip", "link", "add", "docker0", "type", "bridge"}, {"ip", "link", "set", "docker0", "up"}} {
			if err := command(t, n.gateway, "", words...); err != nil {
				return err
			}
		}
		return applySluice(t, n, "ebpf", conf(t.Point))
	}
	return absentRow(gatewayRow(name, about, 0, set, drive), "ebpf")
}

// applySluice parses a configuration and applies it to a datapath.
func applySluice(t *Trial, n *network, path, yaml string) error {
	c, err := config.Decode("bench", []byte(yaml))
	if err != nil {
		return err
	}
	_, _, err = applyConfig(t, n, path, c)
	return err
}

// applyConfig opens a datapath on the gateway and applies the configuration. The trial's cleanup removes it.
func applyConfig(t *Trial, n *network, path string, c *config.Config) (datapath.Datapath, *datapath.Change, error) {
	var d datapath.Datapath
	err := n.gateway.Do(func() (err error) {
		d, err = openers[path](t, n)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("datapath %s: %w", path, err)
	}
	t.Cleanup(func() error {
		// The removal must also run after the trial's context has ended.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t), 30*time.Second)
		defer cancel()
		err := n.gateway.Do(func() error { return d.Remove(ctx) })
		d.Close()
		return err
	})
	s, err := snapshotOf(c, d)
	if err != nil {
		return nil, nil, err
	}
	var change *datapath.Change
	err = n.gateway.Do(func() (err error) {
		change, err = d.Apply(t, s)
		return err
	})
	return d, change, err
}

// snapshotOf assigns the whole configuration to one datapath, with all backends up. If the datapath does not support
// a part, snapshotOf fails: the row must not measure something else.
func snapshotOf(c *config.Config, d datapath.Datapath) (*datapath.Snapshot, error) {
	s := &datapath.Snapshot{Revision: 1, Config: c}
	for i := range c.Services {
		svc := &c.Services[i]
		if err := d.CarriesService(svc); err != nil {
			return nil, fmt.Errorf("%s does not carry service %s: %w", d.Name(), svc.Name, err)
		}
		s.Services = append(s.Services, datapath.Service{Service: svc, State: make([]datapath.State, len(svc.Backends))})
	}
	for i := range c.NAT {
		if err := d.CarriesNAT(&c.NAT[i]); err != nil {
			return nil, fmt.Errorf("%s does not carry NAT rule %s: %w", d.Name(), c.NAT[i].Name, err)
		}
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	for i := range c.Firewall.Rules {
		if err := d.CarriesRule(&c.Firewall.Rules[i]); err != nil {
			return nil, fmt.Errorf("%s does not carry firewall rule %d: %w", d.Name(), i+1, err)
		}
		s.Rules = append(s.Rules, &c.Firewall.Rules[i])
	}
	return s, nil
}

// service is the configuration of a row with one service.
type service struct {
	mode, protocol, attach string
	port                   uint16
	vip, backend           netip.Addr
	room                   int // minimum number of flows in tables
}

// yaml renders the configuration. Tables have a twentieth more room than the flows of the point, and at least 65,536
// entries.
func (s service) yaml(p Point) string {
	pool := ""
	if s.mode == "fullnat" {
		pool = "    source-pool: [" + pool4 + "]\n"
		if s.backend.Is6() {
			pool = "    source-pool: [\"" + pool6 + "\"]\n"
		}
	}
	backendPort := fmt.Sprintf(", port: %d", s.port)
	if s.mode == "dsr" || s.mode == "tunnel" {
		backendPort = ""
	}
	return s.configHead(p) + fmt.Sprintf(`services:
  - name: bench
    listen: [{address: "%s", ports: [%d]}]
    protocol: %s
    mode: %s
    scheduler: maglev
%s    backends: [{name: a, address: "%s"%s}]
`, s.vip, s.port, s.protocol, s.mode, pool, s.backend, backendPort)
}

func (s service) configHead(p Point) string {
	head := "interfaces: [wan0, lan0]\n"
	if s.attach != "" {
		size := max(p.Value*21/20, 65536, s.room)
		head += fmt.Sprintf("attach: %s\ntables: {flows: %d, flows6: %d}\n", s.attach, size, size)
	}
	return head
}

// snatYAML is a source NAT rule for all traffic that leaves by lan0.
func snatYAML(attach string) func(Point) string {
	return func(p Point) string {
		return service{attach: attach}.configHead(p) + "nat:\n  - {name: out, type: snat, source: [10.64.0.0/12], out: lan0, to: [" + pool4 + "]}\n"
	}
}

// packetDrive sends 60-byte UDP packets to an address.
func packetDrive(dest netip.Addr) func(*Trial, *network) error {
	return func(t *Trial, n *network) error {
		s := streamTo(dest, t.Point.Value)
		s.v6 = dest.Is6()
		return reportPackets(t, n, s)
	}
}

func datapathPacketRows() []Row {
	udp := func(mode, attach string) func(Point) string {
		return service{mode: mode, protocol: "udp", attach: attach, port: 53, vip: vip4, backend: server4}.yaml
	}
	toVIP := packetDrive(vip4)
	rows := []Row{
		sluiceRow("sluice nftables dnat", "one service in mode dnat", "nftables", udp("dnat", ""), toVIP),
		sluiceRow("sluice nftables fullnat", "one service in mode fullnat", "nftables", udp("fullnat", ""), toVIP),
		sluiceRow("sluice nftables dsr", "one service in mode dsr", "nftables", udp("dsr", ""), toVIP),
		sluiceRow("sluice nftables stateless", "one service in mode stateless", "nftables", udp("stateless", ""), toVIP),
		sluiceRow("sluice nftables snat", "one snat rule, 32 addresses", "nftables", snatYAML(""), packetDrive(outside)),
	}
	roomy := service{mode: "dnat", protocol: "udp", attach: "xdp", port: 53, vip: vip4, backend: server4, room: 1 << 20}
	rows = append(rows, sluiceRow("sluice ebpf dnat (xdp), large tables", "one service in mode dnat, by xdp; tables for 1,048,576 flows, where the others' are for 65,536", "ebpf", roomy.yaml, toVIP))
	rows = append(rows, pairRow("sluice ebpf dnat (xdp before tc)", "one service in mode dnat, by xdp, with tc behind because a bridge is up", udp("dnat", "xdp"), toVIP))
	for _, attach := range []string{"xdp", "tc"} {
		for _, mode := range []string{"dnat", "fullnat", "dsr", "tunnel", "stateless"} {
			rows = append(rows, sluiceRow("sluice ebpf "+mode+" ("+attach+")", "one service in mode "+mode+", by "+attach, "ebpf", udp(mode, attach), toVIP))
		}
		rows = append(rows, sluiceRow("sluice ebpf snat ("+attach+")", "one snat rule, 32 addresses, by "+attach, "ebpf", snatYAML(attach), packetDrive(outside)))
	}
	return rows
}

func datapathFlowRows() []Row {
	tcp := func(mode, attach string) func(Point) string {
		return service{mode: mode, protocol: "tcp", attach: attach, port: 80, vip: vip4, backend: server4}.yaml
	}
	drive := func(mode string) func(*Trial, *network) error {
		c := clientLoad{dest: addrPort(vip4, 80), bypass: mode == "dsr" || mode == "tunnel"}
		return func(t *Trial, n *network) error { return reportFlows(t, n, c) }
	}
	toServer := func(t *Trial, n *network) error { return reportFlows(t, n, clientLoad{dest: addrPort(server4, 80)}) }
	var rows []Row
	for _, mode := range []string{"dnat", "fullnat", "dsr", "stateless"} {
		rows = append(rows, sluiceRow("sluice nftables "+mode, "one service in mode "+mode, "nftables", tcp(mode, ""), drive(mode)))
	}
	rows = append(rows, sluiceRow("sluice nftables snat", "one snat rule, 32 addresses", "nftables", snatYAML(""), toServer),
		pairRow("sluice ebpf dnat (xdp before tc)", "one service in mode dnat, by xdp, with tc behind because a bridge is up", tcp("dnat", "xdp"), drive("dnat")))
	for _, attach := range []string{"xdp", "tc"} {
		for _, mode := range []string{"dnat", "fullnat", "dsr", "tunnel", "stateless"} {
			rows = append(rows, sluiceRow("sluice ebpf "+mode+" ("+attach+")", "one service in mode "+mode+", by "+attach, "ebpf", tcp(mode, attach), drive(mode)))
		}
		rows = append(rows, sluiceRow("sluice ebpf snat ("+attach+")", "one snat rule, 32 addresses, by "+attach, "ebpf", snatYAML(attach), toServer))
	}
	for _, mode := range []string{"dnat", "fullnat"} {
		conf := service{mode: mode, protocol: "tcp", attach: "xdp", port: 80, vip: vip4, backend: server4, room: 1 << 20}.yaml
		rows = append(rows, sluiceRow("sluice ebpf "+mode+" (xdp), tuples used once", "one service in mode "+mode+", by xdp; tables for 1,048,576 flows", "ebpf",
			conf, func(t *Trial, n *network) error {
				return reportFlows(t, n, clientLoad{dest: addrPort(vip4, 80), source: clientsOf(false, 1_000_000), once: true})
			}))
	}
	return rows
}
