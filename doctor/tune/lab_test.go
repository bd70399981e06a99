// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestNamespace tunes a real network namespace. Its own settings change and are restored; host-wide settings
// stay unchanged with the reason.
func TestNamespace(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	l := labtest.New(t, lab.Topology{Name: "tune", Nodes: []lab.NodeSpec{{Name: "gw", Forward: true}}})
	ns, err := netdev.NamespaceAt(l.Node("gw").Path())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := &System{Namespace: ns, Dir: dir + "/journal", Etc: dir + "/etc"}
	const key = timeoutPrefix + "udp_timeout_stream"
	before, err := s.Get(key)
	if err != nil {
		t.Fatal(err)
	}
	p := router(t, s, Options{})
	for _, c := range []string{conntrackMax, "net.core.netdev_max_backlog"} {
		if got := find(t, p, c); !strings.Contains(got.Skipped, "whole host") && got.Skipped != "larger already" && got.Skipped != "set already" {
			t.Errorf("%s would be written from a namespace: %+v", c, got)
		}
	}
	r, err := Apply(context.Background(), s, p, Watch{})
	if err != nil || r.RolledBack != "" {
		t.Fatalf("%+v, %v", r, err)
	}
	wantValues(t, s, map[string]string{key: "300", timeoutPrefix + "tcp_timeout_established": "86400"})
	if _, err := os.Stat(s.file()); err == nil {
		t.Error("a namespace's values were written for the host's next boot")
	}
	if other, err := (&System{Dir: s.Dir}).Journal(false); err != nil || len(other) != 0 {
		t.Errorf("the host sees the namespace's journal: %+v, %v", other, err)
	}
	if _, _, err := Rollback(s, true); err != nil {
		t.Fatal(err)
	}
	wantValues(t, s, map[string]string{key: before})
}

// TestReservesServices wants the ports of services reserved, and not those that the kernel
// chose for clients.
func TestReservesServices(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, lab.Topology{Name: "reserve", Nodes: []lab.NodeSpec{{Name: "host"}}})
	ns, err := netdev.NamespaceAt(l.Node("host").Path())
	if err != nil {
		t.Fatal(err)
	}
	var open []io.Closer
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	err = l.Node("host").Do(func() error {
		for _, address := range []string{":51820", ":0", "127.0.0.1:0"} {
			c, err := net.ListenPacket("udp", address)
			if err != nil {
				return err
			}
			open = append(open, c)
		}
		for _, address := range []string{":40000", ":0"} {
			c, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			open = append(open, c)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// A resolver's sockets, each at a port that it chose itself, for one query.
	resolver := func(address string) (c net.PacketConn) {
		err := l.Node("host").Do(func() (err error) {
			if err := syscall.Setfsuid(65534); err != nil {
				return err
			}
			defer syscall.Setfsuid(0)
			c, err = net.ListenPacket("udp", address)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
		return c
	}
	query, _ := resolver(":45001"), resolver(":45002") // the second is not answered yet
	s := &System{Namespace: ns, between: func() {
		query.Close()
		resolver(":45003")
	}}
	if ports, err := s.listening(); err != nil || s.reserve(ports) != "40000,51820" {
		t.Errorf("reserved %s, %v; want the ports that were asked for", s.reserve(ports), err)
	}
}

// TestRealDropsTakeBack tunes a real router without free SNAT ports. The kernel's drop counter rises during the
// trial, so the values are restored.
func TestRealDropsTakeBack(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack, labtest.Nftables, labtest.Tool("nft"))
	cases := faults.Cases()
	c := cases[slices.IndexFunc(cases, func(c faults.Case) bool { return c.Name == "snat-ports" })]
	l := labtest.New(t, faults.Topology("tunedrops"))
	if err := c.Setup(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := &System{Namespace: ns, Dir: dir + "/journal", Etc: dir + "/etc"}
	const key = timeoutPrefix + "udp_timeout_stream"
	before, err := s.Get(key)
	if err != nil {
		t.Fatal(err)
	}
	var trial sync.Once
	var traffic sync.WaitGroup
	defer traffic.Wait()
	changed := ""
	r, err := Apply(t.Context(), s, router(t, s, Options{}), Watch{Window: time.Minute, Every: 100 * time.Millisecond,
		Drops: Drops([]netdev.Namespace{ns}),
		Tell: func(string) {
			trial.Do(func() {
				changed, _ = s.Get(key)
				traffic.Go(func() {
					if _, err := c.Traffic(t.Context(), l); err != nil {
						t.Error(err)
					}
				})
			})
		}})
	if err != nil || !strings.Contains(r.RolledBack, "drops rose from") || r.Entry.State != RolledBack {
		t.Errorf("%+v, %v", r, err)
	}
	if changed == before {
		t.Errorf("%s was %s in the trial, as before it", key, changed)
	}
	wantValues(t, s, map[string]string{key: before})
}

// TestHostLimit raises the real nf_conntrack_max and buckets and takes both back.
func TestHostLimit(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	labtest.ChangeHostSettings(t)
	dir := t.TempDir()
	s := &System{Dir: dir + "/journal", Etc: dir + "/etc"}
	if s.writable(conntrackMax) != nil {
		labtest.Lacks(t, "nf_conntrack_max can be written only in the host's first network namespace")
	}
	limit, buckets := s.number(conntrackMax), s.number(conntrackBuckets)
	restore := func() {
		_ = s.Set(conntrackMax, strconv.FormatUint(limit, 10))
		_ = s.Set(conntrackBuckets, strconv.FormatUint(buckets, 10))
	}
	defer restore() // whatever happens; a rollback that worked leaves nothing to do
	wantBuckets := buckets + 512 + 100
	p, err := propose(s, "test", []Setting{
		{Key: conntrackMax, Value: strconv.FormatUint(limit+12345, 10)},
		{Key: conntrackBuckets, Value: strconv.FormatUint(wantBuckets, 10)},
	}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Apply(context.Background(), s, p, Watch{})
	if err != nil || r.RolledBack != "" {
		t.Fatalf("%+v, %v", r, err)
	}
	if got := s.number(conntrackMax); got != limit+12345 {
		t.Errorf("limit %d, want %d", got, limit+12345)
	}
	if got := s.number(conntrackBuckets); got < wantBuckets || got >= wantBuckets+bucketRounding {
		t.Errorf("buckets %d, want %d rounded up to a page", got, wantBuckets)
	}
	if text, err := os.ReadFile(s.file()); err != nil || !strings.Contains(string(text), conntrackMax) {
		t.Errorf("file for the next boot: %v\n%s", err, text)
	}
	if _, notes, err := Rollback(s, false); err != nil || len(notes) != 0 {
		t.Fatal(notes, err)
	}
	if l, b := s.number(conntrackMax), s.number(conntrackBuckets); l != limit || b != buckets {
		t.Errorf("after rollback limit %d and buckets %d, want %d and %d", l, b, limit, buckets)
	}
}
