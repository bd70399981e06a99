// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/load"
)

type loadPacketsFlags struct {
	loadBounds
	spec         load.PacketSpec
	from, to     string
	source, dest string
	protocol     string
	checksums    bool
}

// packetsReport is the output of load packets.
type packetsReport struct {
	Spec     load.PacketSpec `json:"spec"`
	Took     time.Duration   `json:"took_ns"`
	Sent     uint64          `json:"sent"`
	SentRate float64         `json:"sent_per_second"`
	Unsent   uint64          `json:"unsent"` // packets that were due at the rate but not sent
	Received *load.Received  `json:"received,omitempty"`
	Rate     float64         `json:"received_per_second,omitempty"`
	Lost     uint64          `json:"lost,omitempty"`
	Latency  *load.Latency   `json:"latency,omitempty"`
}

func newLoadPackets(a *app) *cobra.Command {
	var f loadPacketsFlags
	cmd := &cobra.Command{
		Use:   "packets --from PLACE --source RANGE --dest RANGE [--to PLACE]",
		Short: "Send packets as fast as they go or at a rate, and count them",
		Long: "packets writes whole frames in XDP and redirects them to an interface: UDP, TCP or ICMP, IPv4 or IPv6.\n" +
			"A range is ADDRESS, ADDRESS+COUNT or a CIDR, with :PORT or :FIRST-LAST. With --to the far end counts, and\n" +
			"with --stamp measures latency and looks for gaps in the sequence; it drops what it counts. An interface\n" +
			"that spreads flows over CPUs makes the sequence look late: packets of one sender should arrive at one CPU.",
		Example: "  sluice lab up balancer\n  sluice load packets --from client/eth0 --source 10.64.0.0/24:1024-2047 \\\n      --dest 10.0.2.2:53 --to s1/eth0 --stamp",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runLoadPackets(cmd, a, &f) },
	}
	f.flags(cmd, "packets")
	fl := cmd.Flags()
	fl.StringVar(&f.from, "from", "", "where to send: [[LAB/]NODE/]INTERFACE")
	fl.StringVar(&f.to, "to", "", "where to count")
	fl.StringVar(&f.source, "source", "", "source addresses and ports (ICMP: identifiers)")
	fl.StringVar(&f.dest, "dest", "", "destination addresses and ports")
	fl.StringVar(&f.protocol, "protocol", "udp", "udp, tcp, icmp or icmpv6")
	completeFlag(cmd, "protocol", "udp", "tcp", "icmp", "icmpv6")
	fl.IntVar(&f.spec.Flows, "flows", 0, "distinct tuples; 0: all of both ranges")
	fl.BoolVar(&f.spec.Shuffled, "shuffled", false, "take the tuples in an order that defeats prefetching")
	fl.IntVar(&f.spec.Size, "size", 0, "bytes of a frame without FCS; 0: 60 or what the headers need")
	fl.StringVar(&f.spec.Flags, "tcp-flags", "", "TCP flags, as syn,ack (default ack)")
	fl.IntVar(&f.spec.TTL, "ttl", 64, "TTL or hop limit")
	fl.IntVar(&f.spec.Fragments, "fragments", 1, "send each datagram in so many fragments")
	fl.BoolVar(&f.spec.Stamp, "stamp", false, "put sequence number and time into the payload")
	fl.Float64Var(&f.spec.Rate, "rate", 0, "packets a second, open-loop; 0: as fast as it goes")
	fl.BoolVar(&f.checksums, "checksums", false, "have the far end verify the checksums of IPv4, TCP, UDP and ICMP")
	offerFrom(cmd, "from", listInterfaces)
	offerFrom(cmd, "to", listInterfaces)
	for _, name := range []string{"from", "source", "dest"} {
		_ = cmd.MarkFlagRequired(name) // MarkFlagRequired fails for unknown names only
	}
	return cmd
}

func runLoadPackets(cmd *cobra.Command, a *app, f *loadPacketsFlags) error {
	places, err := f.parse()
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	cpus, err := f.list()
	if err = cmp.Or(err, f.check(), f.spec.Validate()); err != nil {
		return usageError(cmd, "%w", err)
	}
	if err := mayLoad(f.own, places...); err != nil {
		return err
	}
	from := places[0]
	if err := from.prepare(); err != nil {
		return err
	}
	var sink *load.Sink
	if len(places) > 1 {
		if sink, err = openSink(places[1], load.SinkOptions{Checksums: f.checksums, Stamps: f.spec.Stamp}); err != nil {
			return err
		}
		defer sink.Close()
	}
	sender, err := load.NewSender(from, f.spec, cpus)
	if err != nil {
		return err
	}
	defer sender.Close()
	ctx, cancel := f.context(cmd.Context())
	defer cancel()
	var last uint64
	err = runWithProgress(ctx, sender.Run, func(second int) {
		sent := sender.Sent()
		line := fmt.Sprintf("%3d s  %s packets/s sent", second, load.Count(sent-last))
		last = sent
		if sink != nil {
			if r, err := sink.Read(); err == nil {
				line += fmt.Sprintf(", %s received in all", load.Count(r.Packets))
			}
		}
		a.progress("%s", line)
	})
	if err != nil {
		return err
	}
	return f.report(a, sender, sink)
}

// parse fills in the spec and returns the sending interface, and the counting one if configured.
func (f *loadPacketsFlags) parse() (places []loadPlace, err error) {
	texts := []string{f.from}
	if f.to != "" {
		texts = append(texts, f.to)
	}
	if places, err = parseLoadPlaces(texts...); err != nil {
		return nil, err
	}
	if f.spec.Source, err = load.ParseRange(f.source); err != nil {
		return nil, err
	}
	if f.spec.Dest, err = load.ParseRange(f.dest); err != nil {
		return nil, err
	}
	if f.spec.Protocol, err = flow.ParseProtocol(f.protocol); err != nil {
		return nil, err
	}
	switch {
	case f.checksums && f.to == "":
		return nil, errors.New("--checksums has the far end verify them: name it with --to")
	case f.svg != "" && (f.to == "" || !f.spec.Stamp):
		return nil, errors.New("--histogram draws latency: measure it with --to and --stamp")
	}
	f.spec.Interface, f.spec.Limit = places[0].iface, f.count
	return places, nil
}

func openSink(to loadPlace, o load.SinkOptions) (*load.Sink, error) {
	sink, err := load.NewSink(o)
	if err != nil {
		return nil, err
	}
	if err := sink.Attach(to, to.iface); err != nil {
		sink.Close()
		return nil, err
	}
	return sink, nil
}

func (f *loadPacketsFlags) report(a *app, sender *load.Sender, sink *load.Sink) error {
	r := packetsReport{Spec: sender.Spec(), Took: sender.Took(), Sent: sender.Sent(), Unsent: sender.Unsent()}
	r.SentRate = perSecond(r.Sent, r.Took)
	if sink != nil {
		got, err := sink.Await(r.Sent)
		if err != nil {
			return err
		}
		r.Received, r.Rate = &got, perSecond(got.Packets, r.Took)
		if got.Packets < r.Sent {
			r.Lost = r.Sent - got.Packets
		}
		if f.spec.Stamp {
			h, err := sink.Latency()
			if err != nil {
				return err
			}
			l := h.Latency()
			r.Latency = &l
			if err := f.saveHistogram(h, "time on the way, "+load.Count(h.Count())+" packets"); err != nil {
				return err
			}
		}
	}
	if err := a.print(r, func(w io.Writer) error { return r.write(w, f.checksums) }); err != nil {
		return err
	}
	if r.Received != nil && r.Received.Packets == 0 && r.Sent > 0 {
		return noSuccessError("no packet arrived at the far end")
	}
	return nil
}

func (r *packetsReport) write(w io.Writer, checksums bool) error {
	fmt.Fprintf(w, "sent      %s packets of %d bytes in %s: %s a second\n", load.Count(r.Sent), r.Spec.Size, r.Took.Round(time.Millisecond), rate(r.SentRate))
	writeBehind(w, "behind    %s packets were due and not sent", r.Unsent, r.Sent)
	if r.Received == nil {
		return nil
	}
	fmt.Fprintf(w, "received  %s packets: %s a second, %s lost on the way\n", load.Count(r.Received.Packets), rate(r.Rate), load.Count(r.Lost))
	if checksums {
		fmt.Fprintf(w, "checksums %s wrong in IPv4 headers, %s in transports; not checked: %s fragments, %s of other protocols\n",
			load.Count(r.Received.BadIPChecksum), load.Count(r.Received.BadL4Checksum), load.Count(r.Received.Fragments), load.Count(r.Received.Unchecked))
	}
	if r.Latency != nil {
		fmt.Fprintf(w, "sequence  %s missing, %s late, %s without a stamp\n", load.Count(r.Received.SequenceLost), load.Count(r.Received.SequenceLate), load.Count(r.Received.Unstamped))
		fmt.Fprintf(w, "latency   %s\n", latencyLine(*r.Latency))
	}
	return nil
}
