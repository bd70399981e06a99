// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// recorder collects events.
type recorder struct {
	mu     sync.Mutex
	events []Event
}

func (r *recorder) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) drain() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.events
	r.events = nil
	return e
}

// watched starts a watcher on the gateway of a fresh lab.
func watched(t *testing.T) (*lab.Node, *recorder) {
	t.Helper()
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Balancer())
	gw := l.Node("gateway")
	var w *Watcher
	if err := gw.Do(func() (err error) { w, err = Open(); return }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &recorder{}
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, r.add) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return gw, r
}

// TestWithoutSysAdmin: a container with CAP_NET_ADMIN alone follows its network all the same.
func TestWithoutSysAdmin(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Balancer())
	do(t, l.Node("gateway"), func() error {
		head := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all [2]unix.CapUserData // of this thread
		if err := unix.Capget(head, &all[0]); err != nil {
			return err
		}
		few := all
		few[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
		if err := unix.Capset(head, &few[0]); err != nil {
			return err
		}
		defer func() {
			if err := unix.Capset(head, &all[0]); err != nil {
				t.Error(err)
			}
		}()
		here, err := netns.Get()
		if err != nil {
			return err
		}
		defer here.Close()
		if err := EnterNamespace(here); err != nil {
			t.Errorf("the namespace where it is: %v", err)
		}
		w, err := Open()
		if err == nil {
			w.close()
		}
		return err
	})
}

// sawKind waits until an event of the kind was seen.
func sawKind(t *testing.T, r *recorder, k Kind) {
	t.Helper()
	labtest.Eventually(t, time.Minute, "an event of kind "+k.String(), func() error {
		if !slices.ContainsFunc(r.drain(), func(e Event) bool { return e.Kind == k }) {
			return fmt.Errorf("none yet")
		}
		return nil
	})
}

func do(t *testing.T, n *lab.Node, f func() error) {
	t.Helper()
	if err := n.Do(f); err != nil {
		t.Fatal(err)
	}
}

func TestChangesOfNextHopsAreTold(t *testing.T) {
	gw, r := watched(t)
	index := 0
	do(t, gw, func() error {
		link, err := netlink.LinkByName("lan0")
		if err == nil {
			index = link.Attrs().Index
		}
		return err
	})
	_, dst, _ := net.ParseCIDR("203.0.113.0/24")
	route := &netlink.Route{LinkIndex: index, Dst: dst, Gw: net.ParseIP("10.0.2.2")}
	do(t, gw, func() error { return netlink.RouteAdd(route) })
	sawKind(t, r, Route)
	do(t, gw, func() error { return netlink.RouteDel(route) })
	sawKind(t, r, Route)

	mac := func(last byte) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: index, IP: net.ParseIP("10.0.2.77").To4(), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, last}}
	}
	do(t, gw, func() error { return netlink.NeighSet(mac(1)) })
	do(t, gw, func() error { return netlink.NeighSet(mac(2)) })
	sawKind(t, r, Neighbour)
	do(t, gw, func() error { return netlink.NeighDel(mac(2)) })
	sawKind(t, r, Neighbour)

	do(t, gw, func() error {
		link, err := netlink.LinkByName("lan0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, 1400)
	})
	sawKind(t, r, Link)

	do(t, gw, func() error {
		return netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: dst, Dst: dst, Dir: netlink.XFRM_DIR_FWD, Action: netlink.XFRM_POLICY_BLOCK})
	})
	sawKind(t, r, Policy)
}

// Neighbours change between STALE and REACHABLE in every network. That must not cause a route lookup for every flow.
func TestStatesOfANeighbourAreNoChange(t *testing.T) {
	w := &Watcher{macs: map[neighbour]string{}}
	n := func(state int, last byte) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: 3, IP: net.ParseIP("192.0.2.1"), State: state, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, last}}
	}
	for _, step := range []struct {
		n    *netlink.Neigh
		want bool
	}{
		{n(netlink.NUD_REACHABLE, 1), false}, // becomes known
		{n(netlink.NUD_STALE, 1), false},
		{n(netlink.NUD_DELAY, 1), false},
		{n(netlink.NUD_REACHABLE, 1), false},
		{n(netlink.NUD_REACHABLE, 2), true}, // another MAC
		{n(netlink.NUD_FAILED, 2), true},    // no longer known
		{n(netlink.NUD_INCOMPLETE, 0), false},
		{n(netlink.NUD_REACHABLE, 2), false},
	} {
		if _, got := w.learn(step.n); got != step.want {
			t.Errorf("state %#x, MAC %s: told %v, want %v", step.n.State, step.n.HardwareAddr, got, step.want)
		}
	}
}

func TestResolveFindsTheNeighbourWithoutTraffic(t *testing.T) {
	gw, _ := watched(t)
	for _, to := range []string{"10.0.2.2", "fd00:2::2"} {
		address := netip.MustParseAddr(to)
		neighbour := Hop{Addr: address}
		managed := func() (is bool) {
			do(t, gw, func() error {
				kept, err := Kept()
				is = kept[neighbour]
				return err
			})
			return is
		}
		do(t, gw, func() (err error) {
			neighbour.Ifindex, _, err = NextHop(address)
			return errors.Join(err, Resolve(neighbour))
		})
		if !managed() {
			t.Errorf("%s is not kept", to)
		}
		labtest.Eventually(t, time.Minute, "neighbour "+to, func() error {
			return gw.Do(func() error {
				all, err := netlink.NeighList(0, 0)
				if err != nil {
					return err
				}
				for _, n := range all {
					if n.IP.Equal(address.AsSlice()) && n.State&usable != 0 && len(n.HardwareAddr) == 6 {
						return nil
					}
				}
				return fmt.Errorf("not resolved")
			})
		})
		do(t, gw, func() error { return Forget(neighbour) })
		if managed() {
			t.Errorf("%s is still kept", to)
		}
	}
}

func TestNextHopIsTheRouterOffTheLink(t *testing.T) {
	gw, _ := watched(t)
	_, dst, _ := net.ParseCIDR("203.0.113.0/24")
	do(t, gw, func() error { return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP("10.0.2.3")}) })
	for to, want := range map[string]string{"10.0.2.2": "10.0.2.2", "203.0.113.9": "10.0.2.3"} {
		do(t, gw, func() error {
			_, hop, err := NextHop(netip.MustParseAddr(to))
			if err == nil && hop.String() != want {
				t.Errorf("next hop to %s is %s, want %s", to, hop, want)
			}
			return err
		})
	}
	do(t, gw, func() error {
		interfaces, err := Interfaces()
		if err != nil {
			return err
		}
		for _, i := range interfaces {
			if i.Name == "lan0" && (i.Kind != "veth" || !i.Virtual() || !i.Up) {
				t.Errorf("lan0 is %+v", i)
			}
		}
		return nil
	})
}

// TestRoutedGoesByRules: of two providers, "ip rule" gives one to a port, a source or a source port.
func TestRoutedGoesByRules(t *testing.T) {
	gw, _ := watched(t)
	_, dst, _ := net.ParseCIDR("203.0.113.0/24")
	_, inside, _ := net.ParseCIDR("10.0.2.64/26")
	var lan int
	do(t, gw, func() error {
		l, err := netlink.LinkByName("lan0")
		if err != nil {
			return err
		}
		lan = l.Attrs().Index
		rules := make([]*netlink.Rule, 3)
		for i := range rules {
			rules[i] = netlink.NewRule()
			rules[i].Table, rules[i].Family = 100, netlink.FAMILY_V4
		}
		rules[0].IPProto, rules[0].Dport = unix.IPPROTO_TCP, netlink.NewRulePortRange(443, 443)
		rules[1].Src = inside
		rules[2].IPProto, rules[2].Sport = unix.IPPROTO_UDP, netlink.NewRulePortRange(5060, 5061)
		for _, r := range rules {
			err = errors.Join(err, netlink.RuleAdd(r))
		}
		return errors.Join(err,
			netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP("10.0.2.3")}),
			netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP("10.0.2.4"), Table: 100}))
	})
	for _, c := range []struct {
		protocol flow.Protocol
		from, to string
		want     string
	}{
		{flow.TCP, "10.0.2.9:4000", "203.0.113.9:80", "10.0.2.3"},
		{flow.TCP, "10.0.2.9:4000", "203.0.113.9:443", "10.0.2.4"},
		{flow.UDP, "10.0.2.9:4000", "203.0.113.9:443", "10.0.2.3"},
		{flow.UDP, "10.0.2.9:5061", "203.0.113.9:443", "10.0.2.4"},
		{flow.TCP, "10.0.2.70:4000", "203.0.113.9:80", "10.0.2.4"},
		{flow.ICMP, "10.0.2.70:0", "203.0.113.9:0", "10.0.2.4"},
		{flow.TCP, "10.0.2.9:4000", "10.0.2.2:80", "10.0.2.2"},
	} {
		do(t, gw, func() error {
			tuple := flow.Tuple{Protocol: c.protocol, Source: netip.MustParseAddrPort(c.from), Dest: netip.MustParseAddrPort(c.to)}
			index, hop, err := Routed(lan, tuple)
			if err == nil && (hop.String() != c.want || index != lan) {
				t.Errorf("%s goes to %s by interface %d, want %s by %d", tuple, hop, index, c.want, lan)
			}
			return err
		})
	}
}

// TestInterfacesWhileOthersComeAndGo: the kernel reports that a list may be incomplete.
func TestInterfacesWhileOthersComeAndGo(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "busy", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	gw := l.Node("gateway")
	pair := func(i int) *netlink.Veth {
		a := netlink.NewLinkAttrs()
		a.Name = fmt.Sprintf("a%d", i)
		return &netlink.Veth{LinkAttrs: a, PeerName: fmt.Sprintf("b%d", i)}
	}
	const pairs = 50 // a list of several messages
	do(t, gw, func() (err error) {
		for i := range pairs {
			err = errors.Join(err, netlink.LinkAdd(pair(i)))
		}
		return err
	})
	ctx, cancel := context.WithCancel(t.Context())
	churned := make(chan error)
	go func() {
		churned <- gw.Do(func() (err error) {
			for ctx.Err() == nil && err == nil {
				err = errors.Join(netlink.LinkAdd(pair(pairs)), netlink.LinkDel(pair(pairs)))
			}
			return err
		})
	}()
	do(t, gw, func() error {
		for range 300 {
			if list, err := Interfaces(); err != nil || len(list) < 2*pairs+1 {
				return fmt.Errorf("%d interfaces: %w", len(list), err)
			}
		}
		return nil
	})
	cancel()
	if err := <-churned; err != nil {
		t.Error(err)
	}
}

// TestLostChangesAreTold: an overflow of the socket is reported, and later changes are reported too.
func TestLostChangesAreTold(t *testing.T) {
	labtest.Require(t, labtest.Root)
	gw := labtest.New(t, lab.Balancer()).Node("gateway")
	var w *Watcher
	do(t, gw, func() (err error) {
		if w, err = Open(); err == nil {
			err = w.socket.SetReceiveBufferSize(4096, true)
		}
		return err
	})
	do(t, gw, func() error { // the socket is not read meanwhile
		lan, err := netlink.LinkByName("lan0")
		for i := 0; i < 2000 && err == nil; i++ {
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: lan.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4(198, 18, byte(i>>8), byte(i)), Mask: net.CIDRMask(32, 32)}})
		}
		return err
	})
	ctx, cancel := context.WithCancel(t.Context())
	r := &recorder{}
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, r.add) }()
	sawKind(t, r, Lost)
	labtest.Eventually(t, time.Minute, "the end of what the socket had", func() error {
		if n := len(r.drain()); n > 0 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	do(t, gw, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}, Gw: net.IPv4(10, 0, 2, 2)})
	})
	sawKind(t, r, Route)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestLocalWithoutAddresses: a namespace in which no address was ever given has no local table, and no error.
func TestLocalWithoutAddresses(t *testing.T) {
	labtest.Require(t, labtest.Root)
	runtime.LockOSThread() // the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	if list, err := Local(); len(list) != 0 || err != nil {
		t.Errorf("%v, %v", list, err)
	}
}
