// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

const testFrames = 0x88b5 // ethertype for experiments (IEEE 802)

// redirector sends frames of testFrames to an interface, and passes others. With index 0 it aborts.
func redirector(t *testing.T, to int) *ebpf.Program {
	t.Helper()
	act := asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
	if to != 0 {
		act = asm.Instructions{asm.Mov.Imm(asm.R1, int32(to)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return()}
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "redirector", Type: ebpf.XDP, License: "GPL", Instructions: append(asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2), asm.Add.Imm(asm.R4, 14),
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R5, asm.R2, 12, asm.Half),
		asm.JEq.Imm(asm.R5, int32(networkOrder(testFrames)), "act"),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), asm.Return(),
	}, append(asm.Instructions{act[0].WithSymbol("act")}, act[1:]...)...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// TestLosses lets one XDP program redirect frames to a veth with a peer that does not accept them, and another
// one abort. Each frame must be counted with its destination and cause.
func TestLosses(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Kernel("6.3", "XDP features"))
	l := labtest.New(t, lab.Topology{
		Name:  "losses",
		Nodes: []lab.NodeSpec{{Name: "client"}, {Name: "gateway"}, {Name: "server"}},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0"}, B: lab.End{Node: "gateway", Iface: "in0"}},
			{A: lab.End{Node: "gateway", Iface: "out0"}, B: lab.End{Node: "server", Iface: "eth0"}},
		},
	})
	gw := l.Node("gateway")
	in, err := gw.Interface("in0")
	if err != nil {
		t.Fatal(err)
	}
	out, err := gw.Interface("out0")
	if err != nil {
		t.Fatal(err)
	}
	const frames = 200 // the link's ring holds 255, and its CPU may be delayed
	for _, c := range []struct {
		name  string
		to    int
		cause Cause
		told  []string
	}{
		{"redirect", out.Index, CauseXDPRedirect, []string{"in0 to out0", "program redirector", "not supported"}},
		{"abort", 0, CauseXDPAborted, []string{"in0", "program redirector"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var at link.Link
			if err := gw.Do(func() (err error) {
				at, err = link.AttachXDP(link.XDPOptions{Program: redirector(t, c.to), Interface: in.Index, Flags: link.XDPDriverMode})
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer at.Close()
			ns, err := netdev.NamespaceAt(gw.Path())
			if err != nil {
				t.Fatal(err)
			}
			w := Watcher{Namespaces: []netdev.Namespace{ns}}
			if err := w.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			before := taken(t, gw)
			if err := sendFrames(l.Node("client"), frames); err != nil {
				t.Fatal(err)
			}
			labtest.Eventually(t, time.Minute, "the frames' end", func() error {
				if n := taken(t, gw) - before; n < frames {
					return fmt.Errorf("%d of %d were taken from the link", n, frames)
				}
				return nil
			})
			r, err := w.Stop(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var got *DropGroup
			for i, g := range r.Groups {
				if g.Cause.ID == c.cause.ID {
					got = &r.Groups[i]
				}
			}
			if got == nil || got.Packets != frames || len(got.Places) != 1 {
				t.Fatalf("%+v, limits %q", r.Groups, r.Limits)
			}
			for _, word := range c.told {
				if p := got.Places[0]; !strings.Contains(p.Interface+" "+p.Reason, word) {
					t.Errorf("%+v does not tell of %q", p, word)
				}
			}
		})
	}
}

// taken returns the number of frames that in0 has processed.
func taken(t *testing.T, gw *lab.Node) int {
	t.Helper()
	h, err := gw.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	in, err := h.LinkByName("in0")
	if err != nil {
		t.Fatal(err)
	}
	return int(in.Attrs().Statistics.RxPackets)
}

// sendFrames sends frames from a node without a delay.
func sendFrames(n *lab.Node, frames int) error {
	eth0, err := n.Interface("eth0")
	if err != nil {
		return err
	}
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		frame := append(bytes.Repeat([]byte{0xff}, 6), []byte{2, 0, 0, 0, 0, 1}...)
		frame = append(binary.BigEndian.AppendUint16(frame, testFrames), make([]byte, 46)...)
		for range frames {
			if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Index}); err != nil {
				return err
			}
		}
		return nil
	})
}
