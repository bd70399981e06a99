// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// openTun creates an interface with frames read by this test.
func openTun(t *testing.T, n *lab.Node, kind uint16, name string) *os.File {
	t.Helper()
	var file *os.File
	err := n.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		ifreq, err := unix.NewIfreq(name)
		if err == nil {
			ifreq.SetUint16(kind | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifreq)
		}
		file = os.NewFile(uintptr(fd), name) // can be waited for from now on
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	h, err := n.Handle()
	if err != nil {
		t.Fatal(err)
	}
	link, err := h.LinkByName(name)
	if err == nil {
		err = h.LinkSetUp(link)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// TestPacketsIntoTap: every kind of interface that accepts frames works, here one with a program as its far end. An
// interface without Ethernet headers is refused.
func TestPacketsIntoTap(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	n := labtest.New(t, lab.Topology{Name: "tap", Nodes: []lab.NodeSpec{{Name: "source"}}}).Node("source")
	const count = 100
	spec := PacketSpec{
		Source: mustRange(t, "192.0.2.1:1024"), Dest: mustRange(t, "192.0.2.2:53"), Interface: "tap0", Limit: count,
		DestMAC: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}
	tap := openTun(t, n, unix.IFF_TAP, "tap0")
	s, err := NewSender(n, spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), slowest)
	defer cancel()
	if err := s.Run(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := tap.SetReadDeadline(time.Now().Add(slowest)); err != nil {
		t.Fatal(err)
	}
	frame := make([]byte, 2048)
	for got := 0; got < count; { // in addition to the kernel's own packets
		length, err := tap.Read(frame)
		if err != nil {
			t.Fatalf("%d of %d frames: %v", got, count, err)
		}
		if bytes.HasPrefix(frame[:length], spec.DestMAC) && length == 60 {
			got++
		}
	}
	openTun(t, n, unix.IFF_TUN, "tun0")
	spec.Interface = "tun0"
	if _, err := NewSender(n, spec, nil); err == nil {
		t.Error("frames with Ethernet headers are sent to an interface that has none")
	}
}
