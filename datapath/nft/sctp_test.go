// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"hash/crc32"
	"net"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// sctpInit is an INIT packet (RFC 9260 section 3.3.2) with its CRC32c.
func sctpInit(from, to uint16) []byte {
	p := make([]byte, 12+20)
	binary.BigEndian.PutUint16(p[0:], from)
	binary.BigEndian.PutUint16(p[2:], to)
	p[12] = 1                                      // INIT
	binary.BigEndian.PutUint16(p[14:], 20)         // length of the chunk
	binary.BigEndian.PutUint32(p[16:], 0x1234)     // initiate tag
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

// TestSCTP sends INITs by raw sockets, for the kernel of the test need not speak
// SCTP itself, and looks at the port and the checksum that arrive.
func TestSCTP(t *testing.T) {
	b := newBench(t, lab.Balancer())
	for _, mode := range []config.Mode{config.ModeDNAT, config.ModeStateless} {
		t.Run(string(mode), func(t *testing.T) {
			b.apply(one(config.Service{
				Name: "signalling", Protocol: flow.SCTP, Mode: mode, Scheduler: config.SchedulerSourceHash,
				Listen:   []config.Listen{listen("192.0.2.60", "2905")},
				Backends: []config.Backend{backend("a", "10.0.2.2", 3905)},
			}))
			var server, client net.PacketConn
			open := func(node string, c *net.PacketConn) {
				err := b.lab.Node(node).Do(func() (err error) {
					*c, err = net.ListenPacket("ip4:132", "0.0.0.0")
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { (*c).Close() })
			}
			open("s1", &server)
			open("client", &client)
			if _, err := client.WriteTo(sctpInit(40000, 2905), &net.IPAddr{IP: addr("192.0.2.60").AsSlice()}); err != nil {
				t.Fatal(err)
			}
			if err := server.SetReadDeadline(time.Now().Add(trafficTimeout)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 100)
			n, _, err := server.ReadFrom(buf)
			if err != nil {
				t.Fatalf("nothing arrived: %v\n%s", err, b.ruleset())
			}
			p := buf[:n]
			if port := binary.BigEndian.Uint16(p[2:]); port != 3905 {
				t.Errorf("port %d, want 3905", port)
			}
			if sum := binary.LittleEndian.Uint32(p[8:]); sum != castagnoli(p) {
				t.Errorf("checksum %08x, want %08x", sum, castagnoli(p))
			}
		})
	}
}
