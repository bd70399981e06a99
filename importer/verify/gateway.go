// SPDX-License-Identifier: Apache-2.0

// Package verify compares the rules of another program with their import. It loads the rules in one
// network namespace and the imported configuration, with the rest of the rules, in another, and
// sends the same probes through both. It needs root and leaves no namespace behind.
package verify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// gateway is a network namespace with the interfaces, addresses and routes of a host. The far ends of
// its interfaces are in a second namespace.
type gateway struct {
	thread   chan func() // runs functions in the namespace, on one CPU
	far      netns.NsHandle
	peers    map[string]int // Indices of the far ends.
	farNames map[int]string // Names of interfaces by the index of the far end.
	ifaces   map[string]int
	send     int // Sends frames from the far ends.
	out      int // Sends markers from the gateway's own interfaces.
	watch    int // Receives frames at the far ends.
}

func newGateway(h model.Host) (*gateway, error) {
	g := &gateway{thread: make(chan func()), far: netns.None(), send: -1, out: -1, watch: -1}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread and its namespace end with the goroutine
		made <- g.build(h)
		for f := range g.thread {
			f()
		}
	}()
	if err := <-made; err != nil {
		return nil, errors.Join(err, g.close())
	}
	return g, nil
}

func (g *gateway) close() error {
	close(g.thread)
	var errs []error
	for _, fd := range []int{g.send, g.out, g.watch} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	if g.far.IsOpen() {
		errs = append(errs, g.far.Close())
	}
	return errors.Join(errs...)
}

// inNamespace runs f in the gateway's namespace.
func (g *gateway) inNamespace(f func() error) error {
	done := make(chan error)
	g.thread <- func() { done <- f() }
	return <-done
}

func (g *gateway) build(h model.Host) (err error) {
	if _, _, err := kernel.OneCPU(); err != nil {
		return err
	}
	if g.far, err = netns.New(); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if err := setNet("ipv6/conf/default/disable_ipv6", "1"); err != nil {
		return err
	}
	if g.send, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(g.send, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		return err
	}
	every := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	if g.watch, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(every)); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(int64(10 * time.Second))
	if err := unix.SetsockoptTimeval(g.watch, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(g.watch, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20); err != nil {
		return err
	}
	home, err := netns.New()
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer home.Close() // closes the descriptor alone: the thread stays in the namespace
	if g.out, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	return g.configure(h)
}

// configure creates the interfaces, addresses, neighbours and routes of the host.
func (g *gateway) configure(h model.Host) error {
	for _, s := range [][2]string{{"ipv4/ip_forward", "1"}, {"ipv6/conf/all/forwarding", "1"}, {"ipv6/conf/default/accept_dad", "0"},
		{"ipv6/conf/default/addr_gen_mode", "1"}, {"ipv6/auto_flowlabels", "0"}, {"ipv4/icmp_ratelimit", "0"}, {"ipv6/icmp/ratelimit", "0"},
		{"ipv4/conf/all/send_redirects", "0"}, {"ipv4/conf/default/send_redirects", "0"}, {"ipv4/conf/all/rp_filter", "0"}, {"ipv4/conf/default/rp_filter", "0"}} {
		if err := setNet(s[0], s[1]); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	other, err := netlink.NewHandleAt(g.far, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer other.Close()
	errs := []error{netlink.LinkSetUp(lo)}
	g.ifaces, g.peers, g.farNames = map[string]int{}, map[string]int{}, map[int]string{}
	for n, i := range h.Interfaces {
		peer := fmt.Sprintf("far%d", n)
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: i.Name, MTU: i.MTU, HardwareAddr: net.HardwareAddr(i.MAC[:])}, PeerName: peer, PeerNamespace: netlink.NsFd(g.far)}
		if err := netlink.LinkAdd(link); err != nil {
			return fmt.Errorf("interface %s: %w", i.Name, err)
		}
		end, err := other.LinkByName(peer)
		if err != nil {
			return err
		}
		g.ifaces[i.Name], g.peers[i.Name], g.farNames[end.Attrs().Index] = link.Index, end.Attrs().Index, i.Name
		errs = append(errs, netlink.LinkSetUp(link), other.LinkSetUp(end), lab.SetTXChecksum(i.Name, false))
		for _, p := range i.Addresses {
			a := &netlink.Addr{IPNet: ipNet(p)}
			if p.Addr().Is6() {
				a.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(link, a); err != nil {
				errs = append(errs, fmt.Errorf("address %s of %s: %w", p, i.Name, err))
			}
		}
	}
	for name, index := range g.ifaces {
		errs = append(errs, awaitUp(name, index))
	}
	for _, n := range h.Neighbours {
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: g.ifaces[n.Interface], State: netlink.NUD_PERMANENT, IP: n.Address.AsSlice(), HardwareAddr: net.HardwareAddr(n.MAC[:])}); err != nil {
			errs = append(errs, fmt.Errorf("neighbour %s: %w", n.Address, err))
		}
	}
	for _, r := range h.Routes {
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: g.ifaces[r.Interface], Dst: ipNet(r.To), Gw: r.Via.AsSlice()}); err != nil {
			errs = append(errs, fmt.Errorf("route to %s: %w", r.To, err))
		}
	}
	errs = append(errs, lab.AwaitAddresses(context.Background(), &netlink.Handle{}))
	return errors.Join(errs...)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// setNet writes a setting of the calling thread's namespace. A kernel without IPv6 has none of its
// settings.
func setNet(name, value string) error {
	err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// awaitUp waits until the kernel has processed the link change. Frames sent earlier are lost.
func awaitUp(name string, index int) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return err
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("interface %s does not come up: %s", name, l.Attrs().OperState)
		}
	}
}

// marker is the Ethernet type (local experimental, IEEE 802) of a frame sent behind a probe. Once it
// has arrived, so has everything before it.
const marker = 0x88b5

var markerFrame = packet.Packet{&packet.Ethernet{Type: packet.Force(marker)}, &packet.Data{Bytes: make([]byte, 46)}}.Build()

// sendFrame sends a frame to the gateway and returns the frames that leave it.
func (g *gateway) sendFrame(in model.Arrival) ([]model.Departure, error) {
	if err := unix.Sendto(g.send, in.Frame, 0, &unix.SockaddrLinklayer{Ifindex: g.peers[in.Interface]}); err != nil {
		return nil, err
	}
	return g.receivedFrames()
}

// receivedFrames returns the frames that have left the gateway. The kernel handles a frame on the thread
// that sends it, so that all are on their way when the markers are sent.
func (g *gateway) receivedFrames() (out []model.Departure, err error) {
	for _, index := range g.ifaces {
		if err := unix.Sendto(g.out, markerFrame, 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
			return nil, err
		}
	}
	buf := make([]byte, 1<<16)
	for markers := len(g.ifaces); markers > 0; {
		n, from, err := unix.Recvfrom(g.watch, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("await the marker: %w", err)
		}
		l, ok := from.(*unix.SockaddrLinklayer)
		if !ok || n < 14 || l.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		name, known := g.farNames[l.Ifindex]
		switch multicast := buf[0] == 0x33; { // frames of the gateway's own IPv6 stack
		case !known || multicast:
		case binary.BigEndian.Uint16(buf[12:]) == marker:
			markers--
		default:
			out = append(out, model.Departure{Interface: name, Frame: append([]byte(nil), buf[:n]...)})
		}
	}
	return out, nil
}
