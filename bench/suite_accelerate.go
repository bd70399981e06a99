// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/sluice-lb/sluice/accelerate"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/load"
)

// accelerateSuite measures rules of other programs with and without 'sluice accelerate'.
func accelerateSuite() Suite {
	s := Suite{
		Name: "accelerate", Title: "Existing rules, with and without sluice accelerate",
		About: "60-byte UDP packets through a router that masquerades by the rules of another program, as fast as one CPU can send them. Both directions of " +
			"each flow are established before, with 23 packets each. The accelerated row has the same rules and packets. It forwards them in XDP.",
		Yardstick: true, MaxReps: 4,
		Points:  []Point{{Name: "1 flow", Value: 1}, {Name: "50,000 flows", Value: 50_000}},
		Metrics: []Metric{mpps},
		NotShown: []string{
			"A network card: the links are veth pairs, so drivers, DMA and interrupts cost nothing here. The fastest path gains most from that.",
			"TCP, short connections and bridges.",
		},
	}
	for _, by := range []struct {
		name string
		set  setup
	}{
		{"iptables-legacy", masqueradeBy("iptables-legacy")},
		{"iptables-nft", masqueradeBy("iptables-nft")},
	} {
		fast := by.name + ", accelerated (xdp)"
		s.Rows = append(s.Rows,
			gatewayRow(by.name, "MASQUERADE in nat POSTROUTING, a FORWARD chain that accepts established connections", 2, by.set, driveMasqueraded(false)),
			gatewayRow(fast, "the same with sluice accelerate", 2, by.set, driveMasqueraded(true)))
		s.Comparisons = append(s.Comparisons, goals("accelerated / "+by.name, fast, by.name, map[string]float64{"1 flow": 4.5, "50,000 flows": 4.2})...)
	}
	return s
}

func masqueradeBy(program string) setup {
	return func(t *Trial, n *network) error {
		return command(t, n.gateway, "*nat\n-A POSTROUTING -o lan0 -j MASQUERADE\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\n"+
			"-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -i wan0 -j ACCEPT\nCOMMIT\n", program+"-restore")
	}
}

// driveMasqueraded establishes the flows in both directions and measures the packets of the clients.
func driveMasqueraded(accelerated bool) func(*Trial, *network) error {
	return func(t *Trial, n *network) error {
		if accelerated {
			if err := n.accelerate(t); err != nil {
				return err
			}
		}
		flows := t.Point.Value
		ports := flow.Ports{First: 1024, Last: uint16(1023 + flows)}
		clients, server := load.Range{First: clients4, Count: 1, Ports: ports}, singleEndpoint(server4, 53)
		there := stream{dest: server, source: &clients, flows: flows, open: true}
		back := stream{dest: load.Range{First: netip.MustParseAddr("10.0.2.1"), Count: 1, Ports: ports}, source: &server, flows: flows, reverse: true}
		for _, each := range []int{1, 2, 20} {
			for _, s := range []stream{there, back} {
				if err := n.send(t, s, each*flows); err != nil {
					return err
				}
			}
			if err := wait(t, 2200); err != nil { // after two seconds the kernel calls UDP assured
				return err
			}
		}
		if accelerated {
			s, err := accelerate.StatusOf(t, n.gateway.StateDir(), 0)
			if err != nil {
				return err
			}
			if s.Fast < 2*flows*99/100 {
				return fmt.Errorf("%d flows of %d are accelerated", s.Fast, 2*flows)
			}
		}
		return reportPackets(t, n, there)
	}
}

// send sends a number of packets of a stream.
func (n *network) send(t *Trial, s stream, packets int) error {
	from, _, spec := n.ends(s)
	spec.Limit = uint64(packets)
	sender, err := load.NewSender(from, spec, []int{t.CPU})
	if err != nil {
		return err
	}
	defer sender.Close()
	return sender.Run(t, nil)
}

// accelerate starts 'sluice accelerate' on the gateway.
func (n *network) accelerate(t *Trial) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	directory := n.gateway.StateDir()
	cmd := n.gateway.Command(context.WithoutCancel(t), self, "accelerate", "--state-dir", directory)
	var said bytes.Buffer // read only after the process has ended
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return err
	}
	t.Cleanup(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(accelerate.Stop(ctx, directory), cmd.Wait()); err != nil {
			return fmt.Errorf("sluice accelerate: %w\n%s", err, said.Bytes())
		}
		return nil
	})
	for {
		if _, err := accelerate.StatusOf(t, directory, 0); err == nil || !errors.Is(err, accelerate.ErrNotRunning) {
			return err
		}
		if err := wait(t, 50); err != nil {
			return err
		}
	}
}
