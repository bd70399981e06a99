// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// Chunk types of RFC 9260 section 3.2, and the tag of the tests' associations.
const (
	sctpINIT    = 1
	sctpINITACK = 2
	sctpTag     = 0x1234
)

// sctpPacket returns an SCTP packet with CRC32c and one INIT or INIT ACK chunk (RFC 9260 sections 3.3.2 and
// 3.3.3), without the mandatory cookie. An INIT has the verification tag 0, its answer has the tag from the
// INIT.
func sctpPacket(from, to uint16, chunk byte) []byte {
	p := make([]byte, 12+20)
	binary.BigEndian.PutUint16(p[0:], from)
	binary.BigEndian.PutUint16(p[2:], to)
	if chunk == sctpINITACK {
		binary.BigEndian.PutUint32(p[4:], sctpTag)
	}
	p[12] = chunk
	binary.BigEndian.PutUint16(p[14:], 20)         // length of the chunk
	binary.BigEndian.PutUint32(p[16:], sctpTag)    // initiate tag
	binary.BigEndian.PutUint32(p[20:], 65536)      // receiver window
	binary.BigEndian.PutUint32(p[24:], 0x00010001) // streams
	binary.LittleEndian.PutUint32(p[8:], castagnoli(p))
	return p
}

func castagnoli(p []byte) uint32 {
	clean := append([]byte(nil), p...)
	copy(clean[8:12], []byte{0, 0, 0, 0})
	return crc32.Checksum(clean, crc32.MakeTable(crc32.Castagnoli))
}

// rawSocket opens a raw socket of an IP protocol in a node. For both families it reads and writes the payload of
// the IP packet.
func (b *bench) rawSocket(node, network, local string) net.PacketConn {
	b.Helper()
	var c net.PacketConn
	err := b.lab.Node(node).Do(func() (err error) {
		c, err = net.ListenPacket(network, local)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return c
}

// TestSCTP sends an INIT and its answer by raw sockets, because the kernel may not support SCTP. It checks the
// endpoints and checksums at the receiver.
func TestSCTP(t *testing.T) {
	b := newBench(t, lab.Balancer())
	for _, f := range []struct{ name, network, client, vip, server, pool string }{
		{"ipv4", "ip4:132", "10.0.1.2", "192.0.2.60", "10.0.2.2", "10.0.2.100"},
		{"ipv6", "ip6:132", "fd00:1::2", "2001:db8::60", "fd00:2::2", "fd00:2::100"},
	} {
		client, server := b.rawSocket("client", f.network, f.client), b.rawSocket("s1", f.network, f.server)
		for i, mode := range []config.Mode{config.ModeDNAT, config.ModeFullNAT, config.ModeStateless} {
			t.Run(f.name+" "+string(mode), func(t *testing.T) {
				s := config.Service{
					Name: "signalling", Protocol: flow.SCTP, Mode: mode, Scheduler: config.SchedulerSourceHash,
					Listen:   []config.Listen{listen(f.vip, "2905")},
					Backends: []config.Backend{backend("a", f.server, 3905)},
				}
				seen := f.client
				if mode == config.ModeFullNAT {
					s.SourcePool, seen = []config.AddressRange{pool(f.pool, f.pool)}, f.pool
				}
				b.apply(one(s))
				port := uint16(40000 + i) // not used by a connection of a previous mode
				from := b.sctp(t, client, server, sctpPacket(port, 2905, sctpINIT), netip.AddrPortFrom(addr(f.vip), 2905), 3905)
				if from.Addr() != addr(seen) {
					t.Errorf("the server saw %s, want %s", from.Addr(), seen)
				}
				answer := b.sctp(t, server, client, sctpPacket(3905, from.Port(), sctpINITACK), from, port)
				if answer != netip.AddrPortFrom(addr(f.vip), 2905) {
					t.Errorf("the client was answered by %s, want %s port 2905", answer, f.vip)
				}
			})
		}
	}
}

// sctp sends a packet to the address of an endpoint and returns the source that the receiver saw. The packet
// must arrive at the port with a valid checksum.
func (b *bench) sctp(t *testing.T, from, at net.PacketConn, p []byte, to netip.AddrPort, port uint16) netip.AddrPort {
	t.Helper()
	if _, err := from.WriteTo(p, &net.IPAddr{IP: to.Addr().AsSlice()}); err != nil {
		t.Fatal(err)
	}
	if err := at.SetReadDeadline(time.Now().Add(trafficTimeout)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1500)
	for {
		n, sender, err := at.ReadFrom(buf)
		if err != nil {
			t.Fatalf("nothing arrived: %v\n%s", err, b.ruleset())
		}
		got := buf[:n]
		if n != len(p) || got[12] != p[12] {
			continue // an ABORT of a kernel that supports SCTP
		}
		if p := binary.BigEndian.Uint16(got[2:]); p != port {
			t.Errorf("arrived at port %d, want %d", p, port)
		}
		if sum := binary.LittleEndian.Uint32(got[8:]); sum != castagnoli(got) {
			t.Errorf("arrived with checksum %08x, want %08x", sum, castagnoli(got))
		}
		a, _ := netip.AddrFromSlice(sender.(*net.IPAddr).IP)
		return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(got[0:]))
	}
}
