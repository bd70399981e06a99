// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

const ethernet = "eth(src=02:00:00:00:00:01,dst=02:00:00:00:00:02)/"

// texts in the canonical form: Parse(Build(text)) prints the same text.
var texts = []string{
	ethernet + "arp(sha=02:00:00:00:00:01,spa=192.0.2.1,tpa=192.0.2.2)" + "",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7,df)/tcp(sport=1024,dport=80,flags=S,seq=1,opts=[mss:1460;sackok;ts:1:2;nop;ws:7])/data(100)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7,ttl=1,tos=0x10,id=7)/udp(sport=9,dport=9)/data(\"hello, (world)\")",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/udp(sport=9,dport=9,sum=0x0)/data(3)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7,opts=0x01010100)/udp(sport=9,dport=9)/data(3)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7,sum=0x1234)/udp(sport=9,dport=9,len=9)/data(3)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/icmp(type=echo,id=7,seq=1)/data(56)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7,id=9,mf,off=1480,proto=17)/data(1480)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/icmp(type=unreachable,code=4,mtu=1400)/ip4(src=198.51.100.7,dst=192.0.2.1,df,len=1500)/tcp(sport=80,dport=1024,seq=5,cut=8)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/icmp(type=time-exceeded)/ip4(src=198.51.100.7,dst=192.0.2.1,ttl=1)/udp(sport=80,dport=1024)/data(4)/ext(0x0008010100000001)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/ip4(src=192.0.2.1,dst=198.51.100.7)/udp(sport=1,dport=2)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/udp(sport=1,dport=6080,sum=0x0)/gue()/ip6(src=2001:db8::1,dst=2001:db8::2)/udp(sport=1,dport=2)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/sctp(sport=1,dport=2,tag=9)/data(16)",
	ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/udp(sport=1,dport=2)/data(0x0000)/trailer(0x0000000000000000000000000000)",
	ethernet + "vlan(id=7,prio=3)/ip6(src=2001:db8::1,dst=2001:db8::2,hl=1,tc=0x20,flow=0x12345)/tcp(sport=1,dport=2,flags=SA,ack=7,win=100,opts=[toa:192.0.2.1:1024])",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/hbh()/dstopts(opts=0x010a00000000000000000000000000)/routing(left=1,data=0x0000000020010db8000000000000000000000009)/udp(sport=1,dport=2)/data(8)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/frag(more,id=77)/udp(sport=1,dport=2,len=2000,sum=0xbeef)/data(1232)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/frag(off=1240,id=77,next=17)/data(760)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/icmp6(type=too-big,mtu=1280)/ip6(src=2001:db8::2,dst=2001:db8::1)/udp(sport=2,dport=1)/data(64)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/icmp6(type=param,ptr=6)/ip6(src=2001:db8::2,dst=2001:db8::1)/udp(sport=2,dport=1)/data(64)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/icmp6(type=unreachable,code=1)/ip6(src=2001:db8::2,dst=2001:db8::1)/udp(sport=2,dport=1)/data(64)/ext(0x0008010100000001)",
	ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/icmp6(type=ns)/data(16)",
	"eth(src=02:00:00:00:00:01,dst=ff:ff:ff:ff:ff:ff,type=0x88cc)/data(9)",
}

func TestTextRoundTrip(t *testing.T) {
	for _, text := range texts {
		p, err := Text(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		want := text
		if strings.Contains(text, "0x010a0000") || strings.Contains(text, "data=0x00000000") {
			want = Parse(p.Build()).String() // padding becomes part of the options
		}
		if got := Parse(p.Build()).String(); got != want {
			t.Errorf("built and parsed\nwant %s\ngot  %s", want, got)
		}
	}
}

// TestBuildAgainstGopacket compares Build with an independent implementation.
func TestBuildAgainstGopacket(t *testing.T) {
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	for _, text := range texts {
		if strings.Contains(text, "sum=") || strings.Contains(text, "len=") || strings.Contains(text, "off=") ||
			strings.Contains(text, "routing") { // gopacket takes the pseudo header's address from it
			continue
		}
		frame := MustText(text).Build()
		g := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
		if e := g.ErrorLayer(); e != nil && !strings.Contains(text, "icmp") && !strings.Contains(text, "88cc") && !strings.Contains(text, "sctp") {
			t.Errorf("%s: gopacket cannot read it: %v", text, e.Error())
		}
		var stack []gopacket.SerializableLayer
		for _, l := range g.Layers() {
			s, ok := l.(gopacket.SerializableLayer)
			if !ok {
				stack = nil
				break
			}
			if c, ok := l.(interface {
				SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
			}); ok {
				if err := c.SetNetworkLayerForChecksum(g.NetworkLayer()); err != nil {
					t.Fatal(err)
				}
			}
			stack = append(stack, s)
		}
		if stack == nil || strings.Contains(text, "icmp6") || strings.Contains(text, "/ip4(src=192.0.2.1,dst=198.51.100.7)/ip4") {
			continue
		}
		buf := gopacket.NewSerializeBuffer()
		if err := gopacket.SerializeLayers(buf, opts, stack...); err != nil {
			continue
		}
		if want := buf.Bytes(); !bytes.Equal(frame, want) && !bytes.HasPrefix(want, frame) {
			t.Errorf("%s\n%s", text, Diff(want, frame))
		}
	}
}

func TestVerify(t *testing.T) {
	for _, text := range texts {
		if strings.Contains(text, "sum=0x1234") {
			if Verify(MustText(text).Build()) == nil {
				t.Errorf("%s: accepted", text)
			}
			continue
		}
		if err := Verify(MustText(text).Build()); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	inner := ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/icmp(type=unreachable,code=3)/ip4(src=198.51.100.7,dst=192.0.2.1%s)/udp(sport=80,dport=1024%s)/data(4)"
	if err := Verify(MustText(fmt.Sprintf(inner, ",sum=0x1", "")).Build()); err == nil {
		t.Error("a wrong header checksum inside an ICMP error was accepted")
	}
	if err := Verify(MustText(fmt.Sprintf(inner, "", ",sum=0x1")).Build()); err == nil {
		t.Error("a wrong UDP checksum inside an ICMP error was accepted")
	}
}

// TestEveryCorruptionIsSeen flips every single bit after the Ethernet header of correct packets. Verify or Diff must
// report it.
func TestEveryCorruptionIsSeen(t *testing.T) {
	frame := MustText(texts[1]).Build()
	for bit := 14 * 8; bit < len(frame)*8; bit++ {
		bad := bytes.Clone(frame)
		bad[bit/8] ^= 1 << (bit % 8)
		if Verify(bad) == nil {
			t.Errorf("bit %d: corruption passes", bit)
		}
		if Diff(frame, bad) == "" {
			t.Errorf("bit %d: no difference shown", bit)
		}
	}
}

func TestDiff(t *testing.T) {
	want := MustText(texts[2]).Build()
	p := MustText(texts[2])
	p[1].(*IPv4).TTL = 9
	p[2].(*UDP).Checksum = Force(1)
	got := Diff(want, p.Build())
	expect := "ip4: want ttl=1, got ttl=9\nudp: want right sum, got sum=0x1 (not what the packet calls for)"
	if got != expect {
		t.Errorf("want\n%s\ngot\n%s", expect, got)
	}
	if d := Diff(want, MustText(texts[1]).Build()); !strings.Contains(d, "layers from 3 on") {
		t.Errorf("layers: %s", d)
	}
}

func TestEdit(t *testing.T) {
	p := MustText(texts[8])
	q, err := p.Edit("ip4(dst=10.0.0.1)/ip4(src=10.0.0.2)/tcp(sport=9)")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer("dst=198.51.100.7", "dst=10.0.0.1", "src=198.51.100.7", "src=10.0.0.2", "sport=80", "sport=9").Replace(texts[8])
	if q.String() != want {
		t.Errorf("want %s\ngot  %s", want, q)
	}
	if p.String() != texts[8] {
		t.Error("Edit changed its receiver")
	}
	if _, err := p.Edit("udp(sport=1)"); err == nil {
		t.Error("a layer that is not there was edited")
	}
}

func TestTextErrors(t *testing.T) {
	for _, s := range []string{"", "eth", "foo()", "ip4(src=1)", "ip4(nosuch=1)", "tcp(sport=70000)", "data(-1)", "eth(src=1)", "ip4(df=1)",
		"tcp(opts=mss:1)", "tcp(opts=[mss:x])", "icmp(type=x)", "ip4(src=192.0.2.1", "data(\"x)", "trailer(zz)"} {
		if p, err := Text(s); err == nil && s != "eth" {
			t.Errorf("%q: accepted as %s", s, p)
		}
	}
}

func TestUpdateChecksum(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		b := make([]byte, 40)
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		before := Checksum(b)
		was := bytes.Clone(b[8:16])
		for i := 8; i < 16; i++ {
			b[i] = byte(rnd.Uint32())
		}
		if got, want := UpdateChecksum(before, was, b[8:16]), Checksum(b); got != want {
			t.Fatalf("incremental %#x, full %#x", got, want)
		}
	}
}

func TestFragments(t *testing.T) {
	for _, text := range []string{
		ethernet + "ip4(src=192.0.2.1,dst=198.51.100.7)/udp(sport=1,dport=2)/data(3000)",
		ethernet + "ip6(src=2001:db8::1,dst=2001:db8::2)/udp(sport=1,dport=2)/data(3000)",
	} {
		frame := MustText(text).Build()
		pieces, err := Fragments(frame, 1232, 99)
		if err != nil || len(pieces) != 3 {
			t.Fatalf("%d pieces, %v", len(pieces), err)
		}
		n := 0
		for _, p := range pieces {
			if err := Verify(p); err != nil {
				t.Error(err)
			}
			n += len(p) - 14 - 20
			if strings.Contains(text, "ip6") {
				n -= 28
			}
		}
		if n != 3008 {
			t.Errorf("%d bytes of payload in all pieces, want 3008", n)
		}
	}
}

func TestPcapngReadByGopacket(t *testing.T) {
	var file bytes.Buffer
	w, err := NewCaptureWriter(&file)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1_700_000_000, 123456789)
	for i, text := range texts {
		if err := w.Write(Frame{Interface: fmt.Sprintf("eth%d", i%2), Time: at, Bytes: MustText(text).Build(), Comment: "no-port"}); err != nil {
			t.Fatal(err)
		}
	}
	r, err := pcapgo.NewNgReader(&file, pcapgo.DefaultNgReaderOptions)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range texts {
		b, info, err := r.ReadPacketData()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, MustText(text).Build()) || !info.Timestamp.Equal(at) {
			t.Errorf("%s: read back %s at %v", text, Parse(b), info.Timestamp)
		}
	}
}

func TestAddressBytes(t *testing.T) {
	if got := address4(netip.MustParseAddr("2001:db8::1")); !bytes.Equal(got, make([]byte, 4)) {
		t.Errorf("an IPv6 address in an IPv4 header gives %x", got)
	}
}

// FuzzParse holds the promise of the package: for every frame, the text form
// builds the same bytes again, and nothing panics.
func FuzzParse(f *testing.F) {
	for _, text := range texts {
		f.Add(MustText(text).Build())
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		p := Parse(frame)
		if got := p.Build(); !bytes.Equal(got, frame) {
			t.Fatalf("%s\nwas   %x\nbuilt %x", p, frame, got)
		}
		again, err := Text(p.String())
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		if got := again.Build(); !bytes.Equal(got, frame) {
			t.Fatalf("%s\nwas   %x\nbuilt %x", p, frame, got)
		}
		_ = Verify(frame)
		_ = Diff(frame, f1(frame))
	})
}

func f1(b []byte) []byte {
	c := bytes.Clone(b)
	if len(c) > 0 {
		c[len(c)/2] ^= 1
	}
	return c
}

// TestMutatedFrames is the fuzz test on a fixed set of mutations.
func TestMutatedFrames(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for i := range 20000 {
		frame := MustText(texts[i%len(texts)]).Build()
		for range rnd.IntN(4) {
			frame[rnd.IntN(len(frame))] ^= 1 << rnd.IntN(8)
		}
		if rnd.IntN(4) == 0 {
			frame = frame[:rnd.IntN(len(frame))]
		}
		p := Parse(frame)
		if got := p.Build(); !bytes.Equal(got, frame) {
			t.Fatalf("%s\nwas   %x\nbuilt %x", p, frame, got)
		}
	}
}

// TestFragmentsOfFragments fragments a datagram twice. Reassembly returns the datagram.
func TestFragmentsOfFragments(t *testing.T) {
	for text, header := range map[string]int{"ip4(src=192.0.2.1,dst=198.51.100.7)": 34, "ip6(src=2001:db8::1,dst=2001:db8::2)": 54} {
		whole := MustText(ethernet + text + "/udp(sport=2,dport=1)/data(1000)").Build()
		pieces, err := Fragments(append(slices.Clone(whole), 0, 0), 400, 7) // and a trailer
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(whole)-header)
		last := 0
		for _, p := range pieces {
			smaller, err := Fragments(append(p, 0, 0), 72, 9)
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range smaller {
				off, id, more, data := fragmentOf(t, b)
				if id != 7 {
					t.Fatalf("want fragment 7: %s", Parse(b))
				}
				if !more {
					last++
				}
				copy(got[off:], data)
			}
		}
		if !bytes.Equal(got, whole[header:]) || last != 1 {
			t.Errorf("%s: put together %x with %d ends, want %x", text, got, last, whole[header:])
		}
	}
}

// fragmentOf returns the offset of a fragment in bytes, and its payload.
func fragmentOf(t *testing.T, b []byte) (off int, id uint32, more bool, data []byte) {
	t.Helper()
	parsed := Parse(b)
	if f, ok := Find[*Fragment](parsed); ok {
		return int(f.Offset), f.ID, f.More, b[62:]
	}
	if f, ok := Find[*IPv4](parsed); ok {
		return int(f.Offset), uint32(f.ID), f.MF, b[34:]
	}
	t.Fatalf("no fragment: %s", parsed)
	return 0, 0, false, nil
}
