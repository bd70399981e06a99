// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// subject lets packets arrive on the far ends of a host's interfaces, and reads the leaving packets there. It
// does not know actions and reasons.
type subject struct {
	t        testing.TB
	thread   chan func() // runs functions in the subject's namespace, on one CPU
	d        *Datapath
	snapshot *datapath.Snapshot
	host     model.Host
	names    map[int]string // of the host's interfaces
	peers    map[string]int // interface indexes of the far ends, by the name of the interface
	far      netns.NsHandle
	send     int // packet sockets
	watch    int
}

var _ golden.Subject = (*subject)(nil)

func newSubject(t testing.TB) *subject {
	s := &subject{t: t}
	t.Cleanup(s.drop)
	return s
}

// Name implements golden.Subject.
func (s *subject) Name() string { return "nftables" }

func (s *subject) drop() {
	if s.thread == nil {
		return
	}
	if s.d != nil {
		if err := s.d.Close(); err != nil {
			s.t.Error(err)
		}
		s.d = nil
	}
	unix.Close(s.send)
	unix.Close(s.watch)
	close(s.thread)
	s.thread = nil
}

// inside runs f in the subject's namespace.
func (s *subject) inside(f func() error) error {
	done := make(chan error)
	s.thread <- func() { done <- f() }
	return <-done
}

// enter starts a thread in a network namespace of its own, which ends with the thread. The thread stays on one
// CPU, which processes the packets of a veth pair in order.
func (s *subject) enter() error {
	thread, made := make(chan func()), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		made <- s.unshare()
		for f := range thread {
			f()
		}
		s.far.Close()
	}()
	s.thread = thread
	return <-made
}

// unshare moves the thread to a new namespace, and creates another one for the far ends. Packets are sent there,
// and it has no rules.
func (s *subject) unshare() (err error) {
	if _, _, err := kernel.OneCPU(); err != nil {
		return err
	}
	if s.far, err = netns.New(); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0o644); err != nil {
		return err
	}
	if s.send, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(s.send, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		return err
	}
	home, err := netns.New()
	if err != nil {
		return err
	}
	return home.Close() // the thread is in it
}

// Reset implements golden.Subject.
func (s *subject) Reset(c *config.Config, h model.Host) error {
	s.drop()
	if err := s.enter(); err != nil {
		return err
	}
	s.host = h
	return s.inside(func() error {
		if err := s.build(h); err != nil {
			return fmt.Errorf("host: %w", err)
		}
		var err error
		if s.d, err = Open(); err != nil {
			return err
		}
		s.snapshot = golden.Snapshot(c)
		return s.apply()
	})
}

func (s *subject) build(h model.Host) error {
	ifaces, peers, err := labtest.CaseHost(h, s.far)
	if err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/auto_flowlabels", []byte("0"), 0o644); err != nil {
		return err
	}
	s.names, s.peers = map[int]string{}, peers
	for name, index := range ifaces {
		s.names[index] = name
	}
	every := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	if s.watch, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(every)); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(int64(10 * time.Second))
	return unix.SetsockoptTimeval(s.watch, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
}

func (s *subject) apply() error {
	s.snapshot.Revision++
	_, err := s.d.Apply(context.Background(), s.snapshot)
	return err
}

// marker is the EtherType of a frame that follows a packet. When it arrives, the packet has been processed.
const marker = 0x88b5

// Step implements golden.Subject.
func (s *subject) Step(in model.Arrival) (out model.Outcome, err error) {
	err = s.inside(func() error {
		mark := packet.Packet{&packet.Ethernet{Type: packet.Force(marker)}, &packet.Data{Bytes: make([]byte, 46)}}.Build()
		for _, frame := range [][]byte{in.Frame, mark} {
			if err := unix.Sendto(s.send, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.peers[in.Interface]}); err != nil {
				return err
			}
		}
		out.Out, err = s.departures()
		return err
	})
	return out, err
}

// departures reads the leaving packets until the marker arrives.
func (s *subject) departures() (out []model.Departure, err error) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(s.watch, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("await the marker: %w", err)
		}
		l, ok := from.(*unix.SockaddrLinklayer)
		if !ok || n < 14 {
			continue
		}
		name, ours := s.names[l.Ifindex]
		switch own := buf[0] == 0x33; { // multicast of the host's own IPv6
		case !ours || own:
		case l.Pkttype == unix.PACKET_OUTGOING:
			out = append(out, model.Departure{Interface: name, Frame: plain(packet.Parse(buf[:n]))})
		case binary.BigEndian.Uint16(buf[12:]) == marker:
			return out, nil
		}
	}
}

// plain encodes a packet. It clears the identification of ICMP errors that the kernel itself creates.
func plain(p packet.Packet) []byte {
	if ip, ok := packet.Find[*packet.IPv4](p); ok && ip.TTL == 64 {
		if m, ok := packet.Find[*packet.ICMP](p); ok && !m.IsQuery() {
			ip.ID, ip.Checksum = 0, packet.Forced{}
		}
	}
	return p.Build()
}

// Advance implements golden.Subject: the kernel's clock cannot be changed.
func (s *subject) Advance(time.Duration) error { return errors.ErrUnsupported }

// Apply implements golden.Subject.
func (s *subject) Apply(c *config.Config) error {
	revision := s.snapshot.Revision
	s.snapshot = golden.Snapshot(c)
	s.snapshot.Revision = revision
	return s.inside(s.apply)
}

// SetHost implements golden.Subject.
func (s *subject) SetHost(h model.Host) error {
	return s.inside(func() error {
		if _, err := labtest.ChangeHost(s.host, h); err != nil {
			return err
		}
		s.host = h
		return s.apply()
	})
}

// SetState implements golden.Subject.
func (s *subject) SetState(service, backend string, state datapath.State) error {
	next := *s.snapshot // the one in force is never modified
	next.Services = slices.Clone(next.Services)
	for i := range next.Services {
		next.Services[i].State = slices.Clone(next.Services[i].State)
	}
	s.snapshot = &next
	golden.SetState(s.snapshot, service, backend, state)
	return s.inside(s.apply)
}

// Map implements golden.Subject.
func (s *subject) Map(datapath.Mapping) error { return errors.ErrUnsupported }

// Unmap implements golden.Subject.
func (s *subject) Unmap(datapath.Mapping) error { return errors.ErrUnsupported }

// Flows implements golden.Subject.
func (s *subject) Flows() (out []flow.Flow, err error) {
	err = s.d.Flows(context.Background(), func(f flow.Flow) bool { out = append(out, f); return true })
	return out, err
}

// Counters implements golden.Subject.
func (s *subject) Counters() (*datapath.Counters, error) { return s.d.Counters(context.Background()) }
