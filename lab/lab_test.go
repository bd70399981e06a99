// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func TestNamedTopologiesAreValid(t *testing.T) {
	for _, topology := range lab.All() {
		if err := topology.Validate(); err != nil {
			t.Errorf("%s: %v", topology.Name, err)
		}
	}
}

func TestValidateNamesTheFault(t *testing.T) {
	pair := func(a, b lab.End) lab.Topology {
		return lab.Topology{
			Name:  "t",
			Nodes: []lab.NodeSpec{{Name: "a"}, {Name: "b"}},
			Links: []lab.LinkSpec{{A: a, B: b}},
		}
	}
	for _, tc := range []struct {
		name     string
		topology lab.Topology
		want     string
	}{
		{"name", lab.Topology{Name: "Big Name"}, "name must be"},
		{"twice", lab.Topology{Name: "t", Nodes: []lab.NodeSpec{{Name: "a"}, {Name: "a"}}}, "node a: name used twice"},
		{"no node", pair(lab.End{Node: "a", Iface: "x"}, lab.End{Node: "c", Iface: "x"}), "link c/x: no node"},
		{"long", pair(lab.End{Node: "a", Iface: "sixteen-letters-"}, lab.End{Node: "b", Iface: "x"}), "1 to 15 characters"},
		{"same interface", pair(lab.End{Node: "a", Iface: "x"}, lab.End{Node: "a", Iface: "x"}), "link a/x: interface used twice"},
		{"address", pair(lab.End{Node: "a", Iface: "x", Addresses: []string{"10.0.0.1"}}, lab.End{Node: "b", Iface: "x"}), `address "10.0.0.1": not a CIDR`},
		{"route", lab.Topology{Name: "t", Nodes: []lab.NodeSpec{{Name: "a", Routes: []lab.Route{{To: "default"}}}}}, "needs a next hop"},
		{"switch", lab.Topology{Name: "t", Nodes: []lab.NodeSpec{{Name: "a", Switch: true, Forward: true}}}, "a switch has no"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.topology.Validate()
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

// traces lists everything on the host that a lab could leave behind: namespaces, links of the
// host's own namespace, records and mounts.
func traces(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, pattern := range []string{"/run/netns/sluice-*", "/run/sluice/lab/*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, names...)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		found = append(found, "link "+l.Attrs().Name)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 4 {
			found = append(found, "mount "+f[4])
		}
	}
	sort.Strings(found)
	return found
}

// tracesOf keeps those that carry the lab's id.
func tracesOf(t *testing.T, id string) []string {
	t.Helper()
	var found []string
	for _, s := range traces(t) {
		if strings.Contains(s, id) {
			found = append(found, s)
		}
	}
	return found
}

func up(t *testing.T, topology lab.Topology) *lab.Lab {
	t.Helper()
	labtest.Require(t, labtest.Root)
	l, err := lab.Up(t.Context(), topology)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestDownLeavesNothing(t *testing.T) {
	l := up(t, lab.Balancer())
	if len(tracesOf(t, l.ID())) == 0 {
		t.Error("the lab is up and leaves no trace: the test looks in the wrong places")
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string(nil), tracesOf(t, l.ID())); diff != "" {
		t.Errorf("left behind after down (-want +got):\n%s", diff)
	}
	if err := l.Down(); err != nil {
		t.Errorf("down a second time: %v", err)
	}
}

func TestHostNamespaceIsNotTouched(t *testing.T) {
	labtest.Require(t, labtest.Root)
	links := func() (names []string) {
		list, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range list {
			names = append(names, l.Attrs().Name)
		}
		return names
	}
	forwarding := func() string {
		data, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	wantLinks, wantForwarding := links(), forwarding()
	labtest.New(t, lab.TwoGateways())
	if diff := cmp.Diff(wantLinks, links()); diff != "" {
		t.Errorf("links of the host (-before +while the lab is up):\n%s", diff)
	}
	if got := forwarding(); got != wantForwarding {
		t.Errorf("ip_forward of the host: %q, was %q", got, wantForwarding)
	}
}

func TestUpCancelledLeavesNothing(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before, err := lab.List()
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, r := range before {
		known[r.ID] = true
	}
	ctx, cancel := context.WithCancel(t.Context())
	topology := lab.Balancer()
	topology.Name = "cancelled"
	go func() {
		// Cancel as soon as the first namespace is there.
		for ctx.Err() == nil {
			if names, _ := filepath.Glob("/run/netns/sluice-cancelled-*"); len(names) > 0 {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	l, err := lab.Up(ctx, topology)
	cancel()
	if err == nil {
		l.Down()
		t.Fatal("up succeeded although it was cancelled")
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	for _, s := range traces(t) {
		if strings.Contains(s, "sluice-cancelled-") {
			t.Errorf("left behind: %s", s)
		}
	}
}

func TestUniqueNamesInParallel(t *testing.T) {
	labtest.Require(t, labtest.Root)
	topology := lab.Topology{Name: "parallel", Nodes: []lab.NodeSpec{{Name: "a"}, {Name: "b"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "a", Iface: "eth0", Addresses: []string{"192.0.2.1/24"}},
		B: lab.End{Node: "b", Iface: "eth0", Addresses: []string{"192.0.2.2/24"}},
	}}}
	const n = 8
	labs := make([]*lab.Lab, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { labs[i], errs[i] = lab.Up(t.Context(), topology) })
	}
	wg.Wait()
	seen := make(map[string]bool)
	for i, l := range labs {
		if errs[i] != nil {
			t.Error(errs[i])
			continue
		}
		defer func() {
			if err := l.Down(); err != nil {
				t.Error(err)
			}
		}()
		if seen[l.ID()] {
			t.Errorf("id %s used twice", l.ID())
		}
		seen[l.ID()] = true
	}
}

func TestAddressesOfEveryTopologyAnswer(t *testing.T) {
	for _, topology := range lab.All() {
		t.Run(topology.Name, func(t *testing.T) {
			l := labtest.New(t, topology)
			for _, pair := range reach[topology.Name] {
				if err := ping(t, l.Node(pair[0]), netip.Addr{}, pair[1]); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestAddressesAreLocal checks, as soon as a lab is up, that the kernel accepts packets to its IPv6 addresses. The
// kernel adds the local routes after the addresses, and much later while other labs start.
func TestAddressesAreLocal(t *testing.T) {
	labtest.Require(t, labtest.Root)
	end := lab.End{Node: "a", Iface: "eth0"}
	for i := range 20 {
		end.Addresses = append(end.Addresses, fmt.Sprintf("2001:db8::%x/64", i+1))
	}
	topology := lab.Topology{Name: "local", Nodes: []lab.NodeSpec{{Name: "b"}, {Name: "a"}},
		Links: []lab.LinkSpec{{A: end, B: lab.End{Node: "b", Iface: "eth0"}}}}
	local := func(l *lab.Lab) error {
		return l.Node("a").Do(func() error {
			for _, a := range slices.Backward(end.Addresses) {
				routes, err := netlink.RouteGet(net.IP(netip.MustParsePrefix(a).Addr().AsSlice()))
				if err != nil {
					return fmt.Errorf("%s: %w", a, err)
				}
				if routes[0].Type != unix.RTN_LOCAL {
					return fmt.Errorf("the route to its own %s is %v", a, routes[0])
				}
			}
			return nil
		})
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 4 {
				l, err := lab.Up(t.Context(), topology)
				if err == nil {
					err = errors.Join(local(l), l.Down())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// reach lists the reachable addresses by node in a topology without a gateway program.
var reach = map[string][][2]string{
	"balancer": {
		{"client", "10.0.1.1"}, {"client", "fd00:1::1"},
		{"client", "10.0.2.2"}, {"client", "10.0.2.3"}, {"client", "10.0.2.4"}, {"client", "10.0.2.9"},
		{"client", "fd00:2::2"}, {"client", "fd00:2::9"},
		{"s1", "10.0.1.2"}, {"s1", "fd00:1::2"}, {"s1", "10.64.200.7"}, {"s1", "fd00:64::1234"},
		{"s1", "10.0.2.100"}, {"s1", "fd00:2::100"},
		{"bypass", "10.0.1.2"}, {"bypass", "10.64.0.1"}, {"bypass", "fd00:1::2"}, {"bypass", "fd00:64::1"},
	},
	"office": {
		{"pc", "10.1.10.2"}, {"pc", "10.1.10.1"}, {"pc", "211.155.226.121"},
		{"outside", "211.155.226.121"}, {"gateway", "203.0.113.10"}, {"gateway", "203.0.113.77"},
		{"pc", "2001:db8:f::10"}, {"outside", "2001:db8:10::20"}, {"pc", "2001:db8:bad::10"},
	},
	"twogateways": {
		{"client", "10.0.1.1"}, {"client", "10.0.1.12"}, {"client", "fd00:1::12"},
		{"client", "10.0.2.4"}, {"client", "fd00:2::4"}, {"s1", "10.0.2.12"}, {"s1", "fd00:2::12"},
	},
	"ipv6only": {
		{"client", "2001:db8:1::1"}, {"client", "2001:db8:f::2"}, {"gateway", "192.0.2.2"},
		{"dmz", "192.0.2.1"}, {"old", "fd00:a::1"}, {"outside", "2001:db8:1::2"},
	},
}

func TestDirectServerReturnBypassesTheGateway(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	// A socket bound to ret0 receives only packets from that interface.
	onReturn := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		ctrlErr := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "ret0") })
		return errors.Join(ctrlErr, err)
	}}
	for _, pair := range [][2]string{{"192.0.2.30:80", "10.64.3.4:8000"}, {"[2001:db8::30]:80", "[fd00:64::9]:8000"}} {
		var in net.PacketConn
		err := l.Node("client").Do(func() (err error) {
			in, err = onReturn.ListenPacket(t.Context(), "udp", pair[1])
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		out, err := l.Node("s1").ListenPacket(pair[0])
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		if _, err := out.WriteTo([]byte("reply"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(pair[1]))); err != nil {
			t.Fatal(err)
		}
		if err := in.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		n, from, err := in.ReadFrom(buf)
		if err != nil {
			t.Fatalf("a server's packet from %s did not come in at the client's ret0: %v", pair[0], err)
		}
		if string(buf[:n]) != "reply" || from.String() != pair[0] {
			t.Errorf("got %q from %s, want the reply from %s", buf[:n], from, pair[0])
		}
	}
}

func ping(t *testing.T, from *lab.Node, source netip.Addr, to string) error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return from.Ping(ctx, source, netip.MustParseAddr(to))
}
