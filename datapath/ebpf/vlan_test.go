// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// tagging puts the VLAN tag of a client's frames into metadata, as cards that strip tags do.
func tagging(t *testing.T, l *lab.Lab, vlan int32) {
	t.Helper()
	tag, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R2, 0x0081), // 802.1Q, as on the wire
		asm.Mov.Imm(asm.R3, vlan),
		asm.FnSkbVlanPush.Call(),
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tag.Close() })
	out, err := l.Node("client").Interface("eth0")
	if err != nil {
		t.Fatal(err)
	}
	var tagging link.Link
	if err := l.Node("client").Do(func() (err error) {
		tagging, err = link.AttachTCX(link.TCXOptions{Interface: out.Index, Program: tag, Attach: ebpf.AttachTCXEgress})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tagging.Close() })
}

// TestPriorityTag sends a client's frames with a priority-only tag (VLAN 0) in metadata. They belong to the
// interface itself.
func TestPriorityTag(t *testing.T) {
	labtest.Require(t, labtest.Kernel("6.6", "TCX"))
	for _, attach := range []config.Attach{config.AttachTC, config.AttachXDP} {
		t.Run(string(attach), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), attach)
			echo(t, l.Node("s1"), ":5353")
			d := gateway(t, l.Node("gateway"), attach, "services:\n  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, "+
				"backends: [{name: a, address: 10.0.2.2, port: 5353}]}\ntables: {flows: 4096, flows6: 4096}\n")
			tagging(t, l, 6<<13)
			if _, _, err := ask(l.Node("client"), "udp", "192.0.2.10:53"); err != nil {
				t.Errorf("with a priority tag: %v\n%s", err, describeReasons(d))
			}
		})
	}
}

// TestVLANTag sends a client's frames with a VLAN tag in metadata. They are left to the VLAN's interface, and
// create no flow of the lower interface.
func TestVLANTag(t *testing.T) {
	labtest.Require(t, labtest.Kernel("6.6", "TCX"))
	l := labFor(t, lab.Balancer(), config.AttachTC)
	echo(t, l.Node("s1"), ":5353")
	d := gateway(t, l.Node("gateway"), config.AttachTC, "services:\n  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, "+
		"backends: [{name: a, address: 10.0.2.2, port: 5353}]}\ntables: {flows: 4096, flows6: 4096}\n")
	if _, _, err := ask(l.Node("client"), "udp", "192.0.2.10:53"); err != nil {
		t.Fatalf("without a tag: %v\n%s", err, describeReasons(d))
	}
	tagging(t, l, 7)
	before, flows := counted(t, d, "not-ip"), counted(t, d, "new-flow")
	c, err := l.Node("client").Dial(t.Context(), nil, "udp", "192.0.2.10:53")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the frame", func() error {
		if counted(t, d, "not-ip") == before && counted(t, d, "new-flow") == flows {
			return errors.New("no frame has come")
		}
		return nil
	})
	if counted(t, d, "new-flow") != flows {
		t.Errorf("a frame with a tag has made a flow: %s", describeReasons(d))
	}
}
