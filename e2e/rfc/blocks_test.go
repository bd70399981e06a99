// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// blockOf opens flows from ports of a host and returns the block of the given size that contains all of their
// outside ports.
func (g *gateway) blockOf(host, address string, out net.PacketConn, flows, size int) (block int, err error) {
	for n := range flows {
		from, err := g.exchange(g.udp(host, fmt.Sprintf("%s:%d", address, 4000+n)), o1+":9", out, "x")
		if err != nil {
			return 0, err
		}
		at := (int(from.Port()) - 1024) / size
		if n > 0 && at != block {
			return 0, fmt.Errorf("port %d of %s is in block %d, the one before in %d", from.Port(), host, at, block)
		}
		block = at
	}
	return block, nil
}

// RFC 6888 REQ-14: one log line for all flows of a subscriber; their ports are in the subscriber's block.
func TestRFC6888REQ14Blocks(t *testing.T) {
	prove(t, "6888-14", snat("port-block: 512"), func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		one, err := g.blockOf("i1", i1, out, 20, 512)
		if err != nil {
			return err
		}
		two, err := g.blockOf("i2", i2, out, 20, 512)
		if err != nil {
			return err
		}
		if one == two {
			return fmt.Errorf("both hosts have block %d", one)
		}
		first := 1024 + one*512
		want := fmt.Sprintf("%d-%d", first, first+511)
		for deadline := time.Now().Add(g.patience); ; time.Sleep(20 * time.Millisecond) {
			lines := 0
			for line := range strings.Lines(g.d.Log()) {
				if strings.Contains(line, i1) && strings.Contains(line, want) && strings.Contains(line, pool1) {
					lines++
				}
			}
			if lines == 1 {
				return nil
			}
			if lines > 1 || time.Now().After(deadline) {
				return fmt.Errorf("%d lines of the log tell of block %s of %s, want 1:\n%s", lines, want, i1, g.d.Log())
			}
		}
	})
}

// RFC 7422: the block is a function of the address, and nothing is logged. i1 and i2 are the third and fourth
// address of their network.
func TestRFC7422Deterministic(t *testing.T) {
	prove(t, "7422", snat("port-block: 512, deterministic: true"), func(g *gateway) error {
		out := g.udp("o1", o1+":9")
		for n, host := range []string{"i1", "i2"} {
			block, err := g.blockOf(host, []string{i1, i2}[n], out, 20, 512)
			if err != nil {
				return err
			}
			last := netip.MustParseAddr([]string{i1, i2}[n]).As4()[3]
			if block != int(last) {
				return fmt.Errorf("%s has block %d, want %d", host, block, last)
			}
		}
		if strings.Contains(g.d.Log(), "ports given") {
			return fmt.Errorf("the log tells what can be computed:\n%s", g.d.Log())
		}
		return nil
	})
}
