// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet"
)

// Verdicts of XDP programs, <linux/bpf.h>.
const (
	xdpDrop     = 1
	xdpPass     = 2
	xdpRedirect = 4
)

// runFrame runs an XDP program once over a packet in its text form.
func runFrame(t *testing.T, prog *ebpf.Program, text string) uint32 {
	t.Helper()
	p, err := packet.Text("eth(src=02:00:00:00:00:01,dst=02:00:00:00:00:02)/" + text)
	if err != nil {
		t.Fatal(err)
	}
	frame := p.Build()
	verdict, err := prog.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)})
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return verdict
}

func newSink(t *testing.T, o SinkOptions) *Sink {
	t.Helper()
	s, err := NewSink(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// TestSinkChecksums: the sink verifies whole datagrams of protocols with a known checksum.
func TestSinkChecksums(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	s := newSink(t, SinkOptions{Checksums: true})
	const ip4, ip6 = "ip4(src=198.51.100.1,dst=192.0.2.2)/", "ip6(src=2001:db8::1,dst=2001:db8::2)/"
	const udp, tcp = "udp(sport=1024,dport=53)/data(21)", "tcp(sport=1024,dport=80,flags=S)"
	for text, want := range map[string]Received{
		ip4 + udp:                                               {},
		ip4 + tcp + "/trailer(0x0102030405)":                    {},
		ip6 + udp + "/trailer(0x0102030405)":                    {},
		ip4 + "icmp(type=echo,id=7)/data(9)":                    {},
		ip6 + "icmp6(type=echo,id=7)/data(9)":                   {},
		ip4 + "udp(sport=1024,dport=53,sum=0)/data(21)":         {},
		ip6 + "udp(sport=1024,dport=53,sum=0)/data(21)":         {BadL4Checksum: 1},
		ip4 + "udp(sport=1024,dport=53,sum=7)/data(21)":         {BadL4Checksum: 1},
		"ip4(src=198.51.100.1,dst=192.0.2.2,len=70)/" + udp:     {BadL4Checksum: 1}, // cut short
		ip4 + "ip4(src=10.0.0.1,dst=10.0.0.2)/" + udp:           {Unchecked: 1},
		"ip4(src=198.51.100.1,dst=192.0.2.2,proto=47)/data(40)": {Unchecked: 1},
		ip6 + "hbh()/" + udp:                                    {Unchecked: 1},
		"ip4(src=198.51.100.1,dst=192.0.2.2,mf)/data(40)":       {Fragments: 1},
		ip6 + "frag(id=5,more)/data(40)":                        {Fragments: 1},
		"ip4(src=198.51.100.1,dst=192.0.2.2,sum=7)/" + tcp:      {BadIPChecksum: 1},
	} {
		if err := s.Reset(); err != nil {
			t.Fatal(err)
		}
		verdict := runFrame(t, s.objects.LoadSink, text)
		got, err := s.Read()
		want.Packets, want.Bytes = 1, got.Bytes
		if err != nil || got != want || verdict != xdpDrop {
			t.Errorf("%s: verdict %d, %+v, want %+v, %v", text, verdict, got, want, err)
		}
	}
}

// TestSequenceStartsOver: stamps count in 32 bits, and a sender may live longer.
func TestSequenceStartsOver(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, wire())
	const first = 1<<32 - 50
	sink := newSink(t, SinkOptions{Stamps: true})
	if err := sink.Attach(l.Node("sink"), "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := sink.objects.LoadSequence.Put(uint32(0), sinkSequence{Next: first - 3}); err != nil {
		t.Fatal(err)
	}
	sender, err := NewSender(l.Node("source"), PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "eth0", Limit: 100, Stamp: true,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	if err := sender.objects[0].Progress.Set(packetsProgress{Seq: first}); err != nil {
		t.Fatal(err)
	}
	if err := sender.Run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	got, err := sink.awaitSilence(100, slowest, slowest)
	if err != nil || got.Packets != 100 || got.SequenceLost != 3 || got.SequenceLate != 0 || got.Unstamped != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := sink.Reset(); err != nil {
		t.Fatal(err)
	}
	// The kernels at both ends may speak of themselves at any time.
	if got, err := sink.Read(); err != nil || got != (Received{PassedToKernel: got.PassedToKernel}) {
		t.Errorf("after Reset: %+v, %v", got, err)
	}
}
