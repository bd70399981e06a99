// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestLargeWithoutChecksum sends datagrams without a checksum over links with a large MTU, while IPv6 requires
// one. A frame of at most the usual size gets a checksum; a larger one must not get a wrong one.
func TestLargeWithoutChecksum(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	for _, node := range []string{"client", "gateway", "lan", "s1"} {
		if err := l.Node(node).Do(func() error {
			links, err := netlink.LinkList()
			for _, link := range links {
				if link.Attrs().Flags&1 != 0 && link.Attrs().Name != "lo" {
					err = errors.Join(err, netlink.LinkSetMTU(link, 12000))
				}
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	echo(t, l.Node("s1"), "[fd00:2::2]:5353")
	d := gateway(t, l.Node("gateway"), config.AttachTC, "services:\n  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, "+
		"source-pool: [\"fd00:2::100\"], backends: [{name: a, address: \"fd00:2::2\", port: 5353}]}\ntables: {flows: 4096, flows6: 4096}\n")
	c, err := l.Node("client").Dial(t.Context(), nil, "udp", "192.0.2.10:53")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_NO_CHECK, 1) }); errors.Join(e, err) != nil {
		t.Fatal(e, err)
	}
	answered := make(chan struct{}, 64)
	go func() {
		for b := make([]byte, 64); ; answered <- struct{}{} {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	}()
	labtest.Eventually(t, patience, "an answer to 9,000 bytes", func() error {
		if _, err := c.Write(make([]byte, 9000)); err != nil {
			return err
		}
		select {
		case <-answered:
			return nil
		default:
			return fmt.Errorf("none yet: %s", describeReasons(d))
		}
	})
	labtest.Eventually(t, patience, "a refusal of 9,300 bytes", func() error {
		if _, err := c.Write(make([]byte, 9300)); err != nil {
			return err
		}
		if counted(t, d, "untranslatable") == 0 {
			return errors.New(describeReasons(d))
		}
		return nil
	})
}
