// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// unheard returns a host without listeners. It drops packets that it sends to itself.
func unheard(t *testing.T) (*lab.Node, netdev.Namespace) {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	node := labtest.New(t, lab.Topology{Name: "unheard", Nodes: []lab.NodeSpec{{Name: "host"}}}).Node("host")
	ns, err := netdev.NamespaceAt(node.Path())
	if err != nil {
		t.Fatal(err)
	}
	return node, ns
}

// sendRaw sends an IPv4 packet from 127.0.0.1 to itself; fragment is the field of flags and offset.
func sendRaw(node *lab.Node, protocol byte, fragment uint16, payload ...byte) error {
	return node.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		b := append([]byte{0x45, 0, 0, 0, 0, 1, byte(fragment >> 8), byte(fragment), 64, protocol, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1}, payload...)
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	})
}

// TestFilteredPorts: the filter compares ports of every protocol with ports, but not the payload bytes at their
// position in a later fragment.
func TestFilteredPorts(t *testing.T) {
	labtest.Require(t, labtest.Nftables, labtest.Tool("nft"))
	node, ns := unheard(t)
	// Before reassembly.
	nft := node.Command(t.Context(), "nft", "add table ip t; add chain ip t c { type filter hook prerouting priority 0; policy drop; }")
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	ports := binary.BigEndian.AppendUint16([]byte{0x14, 0xe9}, 5000) // 5353, 5000
	payload := append(ports, make([]byte, 28)...)
	for _, c := range []struct {
		name, filter string
		protocol     byte
		fragment     uint16
		passes       bool
	}{
		{"SCTP", "sctp port 5000", unix.IPPROTO_SCTP, 0, true},
		{"UDP-Lite", "udplite port 5353", unix.IPPROTO_UDPLITE, 0, true},
		{"another SCTP port", "sctp port 5001", unix.IPPROTO_SCTP, 0, false},
		{"a later fragment", "udp port 5000", unix.IPPROTO_UDP, 1, false},
		{"a later fragment by its addresses", "udp host 127.0.0.1", unix.IPPROTO_UDP, 1, true},
	} {
		filter, err := trace.ParseFilter([]string{c.filter})
		if err != nil {
			t.Fatal(err)
		}
		var probes [2]*trace.Drops // with the filter, and without
		for i, f := range []trace.Filter{filter, {}} {
			if probes[i], err = trace.OpenDrops(trace.DropOptions{Netns: ns.Inode, Filter: f}); err != nil {
				t.Fatal(err)
			}
			defer probes[i].Close()
		}
		if err := sendRaw(node, c.protocol, c.fragment, payload...); err != nil {
			t.Fatal(err)
		}
		dropped := func(p *trace.Drops) (n uint64) {
			counts, err := p.Counts()
			if err != nil {
				t.Error(err)
			}
			for _, k := range counts {
				n += k.Packets
			}
			return n
		}
		labtest.Eventually(t, time.Minute, "the packet's end", func() error {
			if dropped(probes[1]) == 0 {
				return errors.New("nothing was dropped")
			}
			return nil
		})
		if got := dropped(probes[0]) > 0; got != c.passes {
			t.Errorf("%s: %q passes it: %v, want %v", c.name, c.filter, got, c.passes)
		}
	}
}

// TestCapturedLength: the length of a captured packet is the length of its frame, independent of the layer of
// the drop and of the captured bytes.
func TestCapturedLength(t *testing.T) {
	node, ns := unheard(t)
	var file bytes.Buffer
	capture, err := trace.NewCapture(&file)
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan error, 100)
	w := trace.Watcher{
		Namespaces: []netdev.Namespace{ns}, Options: trace.DropOptions{Netns: ns.Inode, SamplesPerSecond: 1000},
		OnSample: func(s *trace.DropSample, c trace.Cause) { seen <- capture.Write(s, c, ns.Name) },
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	const size = 1000
	err = node.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, make([]byte, size), 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 9})
	})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-seen:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("no sample of a packet to a closed port")
	}
	if _, err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	var lengths []string
	for b := file.Bytes(); len(b) >= 28; b = b[binary.LittleEndian.Uint32(b[4:]):] {
		if binary.LittleEndian.Uint32(b) == 6 { // an enhanced packet block
			lengths = append(lengths, fmt.Sprintf("%d of %d", binary.LittleEndian.Uint32(b[20:]), binary.LittleEndian.Uint32(b[24:])))
		}
	}
	if want := fmt.Sprintf("256 of %d", 14+20+8+size); !strings.Contains(strings.Join(lengths, "\n"), want) {
		t.Errorf("packets of %q bytes, want %s", lengths, want)
	}
}
