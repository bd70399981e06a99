// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

const bulkYAML = `
services:
  - {name: d4, listen: [{address: 192.0.2.20, ports: [4]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: d6, listen: [{address: "2001:db8::20", ports: [6]}], protocol: tcp, mode: dnat, backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: m44, listen: [{address: 192.0.2.20, ports: [44]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: m66, listen: [{address: "2001:db8::20", ports: [66]}], protocol: tcp, mode: fullnat, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: m64, listen: [{address: "2001:db8::20", ports: [64]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: m46, listen: [{address: 192.0.2.20, ports: [46]}], protocol: tcp, mode: fullnat, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::2", port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`

// bulk is the number of bytes in each direction.
const bulk = 16 << 20

// TestBulk sends much data over TCP, with segmentation and checksums left to the device (GSO, CHECKSUM_PARTIAL),
// as local stacks on veth do. Every byte must return, in packets larger than the MTU; otherwise the test proves
// nothing. If the gateway's links offload neither, the kernel segments the rewritten packets and computes the
// checksums, and the hosts verify them.
func TestBulk(t *testing.T) {
	for _, cut := range []bool{false, true} {
		t.Run(map[bool]string{false: "whole", true: "cut"}[cut], func(t *testing.T) {
			topology := lab.Balancer()
			for i := range topology.Links {
				for _, e := range []*lab.End{&topology.Links[i].A, &topology.Links[i].B} {
					e.NoTxChecksum = cut && e.Node == "gateway"
				}
			}
			testBulk(t, labFor(t, topology, config.AttachTC))
		})
	}
}

func testBulk(t *testing.T, l *lab.Lab) {
	mirror(t, l.Node("s1"), ":8080")
	d := gateway(t, l.Node("gateway"), config.AttachTC, bulkYAML)
	for _, addr := range []string{"192.0.2.20:4", "[2001:db8::20]:6", "192.0.2.20:44", "[2001:db8::20]:66", "[2001:db8::20]:64", "192.0.2.20:46"} {
		t.Run(addr, func(t *testing.T) {
			c := transfer(t, l.Node("client"), addr)
			if err := sendMuch(c); err != nil {
				t.Fatalf("%v\n%s", err, describeReasons(d))
			}
			for _, f := range flowsOf(t, d) {
				if f.Original.Dest.String() != addr {
					continue
				}
				for way, packets := range f.Packets {
					if mean := f.Bytes[way] / max(packets, 1); mean < 2000 {
						t.Errorf("way %d: %d packets of %d bytes in the mean: no segmentation offload passed the gateway", way, packets, mean)
					}
				}
				t.Logf("packets %v, bytes %v", f.Packets, f.Bytes)
				return
			}
			t.Error("the connection is not among the flows")
		})
	}
}

// TestBulkBeyond64K is TestBulk on links with BIG TCP packets. Their IP headers cannot hold their length.
func TestBulkBeyond64K(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	for _, node := range l.Nodes() {
		if err := node.Do(func() error { return raiseSegments(180_000) }); err != nil {
			t.Skipf("links take no packets above 64 KiB: %v", err)
		}
	}
	testBulk(t, l)
}

// raiseSegments sets the maximum size of packets that the links of this namespace segment or join.
func raiseSegments(bytes int) error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, link := range links {
		if link.Type() != "veth" {
			continue
		}
		for _, set := range []func(netlink.Link, int) error{netlink.LinkSetGSOMaxSize, netlink.LinkSetGROMaxSize, netlink.LinkSetGSOIPv4MaxSize, netlink.LinkSetGROIPv4MaxSize} {
			if err := set(link, bytes); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestUnstatedLength sends packets that are segmented later and have no length in their IP header (BIG TCP).
// Without the mark of BIG TCP, such packets are malformed.
func TestUnstatedLength(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("gso", []byte("services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}\n"+
		"  - {name: web6, listen: [{address: \"2001:db8::10\", ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: \"fd00:2::2\"}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, "tc")
	for _, header := range []string{"ip4(src=203.0.113.5,dst=192.0.2.10,df%s)/", "ip6(src=2001:db8:5::5,dst=2001:db8::10%s)/", "ip6(src=2001:db8:5::5,dst=2001:db8::10%s)/hbh(opts=0xc20400000b40)/"} {
		if err := s.Reset(c, golden.StandardHost()); err != nil {
			t.Fatal(err)
		}
		send(t, s, "wan0", fmt.Sprintf(header, "")+"tcp(sport=4000,dport=80,flags=S,seq=1)")
		for _, segments := range []uint32{0, 2} {
			frame := s.frame("wan0", fmt.Sprintf(header, ",len=0")+"tcp(sport=4000,dport=80,flags=A,seq=2,ack=2)/data(2880)")
			o := s.options(model.Arrival{Interface: "wan0", Frame: frame})
			meta := o.Context.(skbMeta)
			meta.GSOSegs, meta.GSOSize = segments, segments*700
			o.Context = meta
			var ret uint32
			if err := s.inside(func() (err error) { ret, err = s.program().Run(o); return err }); err != nil {
				t.Fatal(err)
			}
			if sent := ret == tcRedirect; sent != (segments > 0) {
				t.Errorf("%s: %d segments: verdict %d", header, segments, ret)
			}
		}
		if n := counted(t, s.d, "flow"); n != 1 {
			t.Errorf("%s: %d packets of the flow, want 1", header, n)
		}
	}
}

// TestSegmentsTooBig sends packets with GSO towards a link with a smaller MTU. Their segments have the packet's
// options, and must fit with them.
func TestSegmentsTooBig(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("gso", []byte("services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	h := golden.StandardHost()
	h.Interfaces[1].MTU = 1492
	const ends = "ip4(src=203.0.113.5,dst=192.0.2.10,df)/tcp(sport=4000,dport=80,"
	for _, full := range []bool{false, true} { // the straight path leaves packets that are too large to the full path
		s := newSubject(t, "tc")
		s.full = full
		if err := s.Reset(c, h); err != nil {
			t.Fatal(err)
		}
		send(t, s, "wan0", ends+"flags=S,seq=1)")
		send(t, s, "lan0", "ip4(src=10.0.2.2,dst=203.0.113.5)/tcp(sport=80,dport=4000,flags=SA,seq=1,ack=2)")
		send(t, s, "wan0", ends+"flags=A,seq=2,ack=2)")
		for payload, fits := range map[int]bool{1440: true, 1441: false} {
			frame := s.frame("wan0", ends+fmt.Sprintf("flags=A,seq=2,ack=2,opts=[nop;nop;ts:1:2])/data(%d)", 2*payload))
			o := s.options(model.Arrival{Interface: "wan0", Frame: frame})
			meta := o.Context.(skbMeta)
			meta.GSOSegs, meta.GSOSize = 2, uint32(payload)
			o.Context = meta
			var ret uint32
			if err := s.inside(func() (err error) { ret, err = s.program().Run(o); return err }); err != nil {
				t.Fatal(err)
			}
			if sent := ret == tcRedirect; sent != fits {
				t.Errorf("segments of %d bytes: verdict %d", 20+32+payload, ret)
			}
		}
		if n := counted(t, s.d, "too-big"); n != 1 {
			t.Errorf("%d packets were too big, want 1", n)
		}
	}
}

// sendMuch writes random bytes to a mirror and compares the returned bytes.
func sendMuch(c net.Conn) error {
	c.SetDeadline(time.Now().Add(60 * time.Second))
	sent, got := sha256.New(), sha256.New()
	failed := make(chan error, 1)
	go func() {
		_, err := io.CopyN(io.MultiWriter(c, sent), rand.NewChaCha8([32]byte{1}), bulk)
		failed <- err
	}()
	if n, err := io.CopyN(got, c, bulk); err != nil {
		return fmt.Errorf("%d of %d bytes came back: %w", n, bulk, err)
	}
	if err := <-failed; err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if string(got.Sum(nil)) != string(sent.Sum(nil)) {
		return fmt.Errorf("other bytes came back")
	}
	return nil
}
