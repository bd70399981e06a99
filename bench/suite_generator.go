// SPDX-License-Identifier: Apache-2.0

package bench

import "github.com/sluice-lb/sluice/load"

const bareLoop = "limit: the bare loop"

// generatorSuite measures the sender of packets itself.
func generatorSuite() Suite {
	s := Suite{
		Name: "generator", Title: "What one CPU sends, without a gateway",
		About: "The sender of the other suites, over one link to a far end that counts and drops, beside the shortest loop that can fill a link: " +
			"a program that writes one header from a template and redirects. The share is what flows, checksums and stamps leave of it.",
		Yardstick: true,
		Points:    []Point{{Name: "60 bytes", Value: 1}},
		Metrics:   []Metric{mpps},
		Limit:     bareLoop,
		NotShown:  []string{"Connections: the limit row of the suite flows is what client and server end reach through a wire."},
	}
	add := func(name, about string, spec load.PacketSpec, bare bool) {
		s.Rows = append(s.Rows, Row{Name: name, About: about, Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			sink, err := load.NewSink(load.SinkOptions{})
			if err != nil {
				return err
			}
			t.closeLater(sink)
			if err := sink.Attach(n.gateway, "wan0"); err != nil {
				return err
			}
			spec.Source, spec.Dest = clientsOf(false, max(spec.Flows, 1)), singleEndpoint(vip4, 53)
			spec.Interface, spec.DestMAC = "eth0", wanMAC
			sender, err := load.NewSender(n.client, spec, []int{t.CPU})
			if err != nil {
				return err
			}
			t.closeLater(sender)
			if bare {
				sender.BareLoop()
			}
			r, err := observeBest(t, stream{flows: spec.Flows}, sender, sink)
			if err != nil {
				return err
			}
			t.Report(mpps.Name, r.pps/1e6)
			return nil
		}})
	}
	add(bareLoop, "one header from a template, every packet the same", load.PacketSpec{Flows: 1}, true)
	add("1 flow", "the sender", load.PacketSpec{Flows: 1}, false)
	add("50,000 flows", "the sender; each packet is the next flow's", load.PacketSpec{Flows: 50_000}, false)
	add("1,000,000 flows, shuffled", "the sender; far from each other", load.PacketSpec{Flows: 1_000_000, Shuffled: true}, false)
	add("stamped", "the sender; sequence number and time in each packet", load.PacketSpec{Flows: 1, Stamp: true}, false)
	s.Comparisons = goals("the sender / the bare loop", "1 flow", bareLoop, map[string]float64{"60 bytes": 0.95})
	return s
}
