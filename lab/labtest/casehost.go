// SPDX-License-Identifier: Apache-2.0

package labtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/model"
)

// CaseHost makes the calling thread's network namespace the host of a packet case. The far ends of its interfaces are
// in the namespace far, so that a test can send packets on them. For far == [netns.None] both ends are in the same
// namespace. It returns the indices of both by the interface's name.
func CaseHost(h model.Host, far netns.NsHandle) (ifaces, peers map[string]int, err error) {
	for _, f := range [][2]string{{"ipv4/ip_forward", "1"}, {"ipv4/conf/all/promote_secondaries", "1"}, {"ipv6/conf/all/forwarding", "1"},
		{"ipv4/conf/all/rp_filter", "0"}, {"ipv4/conf/default/rp_filter", "0"}, {"ipv6/conf/default/accept_dad", "0"}, {"ipv6/conf/default/addr_gen_mode", "1"}} {
		if err := setNet(f[0], f[1]); err != nil {
			return nil, nil, err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, nil, err
	}
	errs := []error{netlink.LinkSetUp(lo)}
	ifaces, peers = map[string]int{}, map[string]int{}
	other := &netlink.Handle{} // the zero handle uses the calling thread's namespace
	if far.IsOpen() {
		if other, err = netlink.NewHandleAt(far, unix.NETLINK_ROUTE); err != nil {
			return nil, nil, err
		}
		defer other.Close()
	}
	for _, i := range h.Interfaces {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: i.Name, MTU: i.MTU, HardwareAddr: net.HardwareAddr(i.MAC[:])}, PeerName: "peer-" + i.Name}
		if far.IsOpen() {
			link.PeerNamespace = netlink.NsFd(far)
		}
		if err := netlink.LinkAdd(link); err != nil {
			return nil, nil, err
		}
		ifaces[i.Name] = link.Index
		peer, err := other.LinkByName(link.PeerName)
		if err != nil {
			return nil, nil, err
		}
		peers[i.Name] = peer.Attrs().Index
		errs = append(errs, sources(i), netlink.LinkSetUp(link), other.LinkSetUp(peer))
		for _, p := range i.Addresses {
			a := &netlink.Addr{IPNet: network(p)}
			if p.Addr().Is6() {
				a.Flags = unix.IFA_F_NODAD
			}
			errs = append(errs, netlink.AddrAdd(link, a))
		}
	}
	for _, i := range h.Interfaces {
		for n, mac := range i.Stations {
			link := &netlink.Macvlan{Mode: netlink.MACVLAN_MODE_PRIVATE, LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("vrrp%d-%s", n, i.Name),
				ParentIndex: ifaces[i.Name], HardwareAddr: net.HardwareAddr(mac[:])}}
			if err := netlink.LinkAdd(link); err != nil {
				return nil, nil, err
			}
			errs = append(errs, netlink.LinkSetUp(link))
		}
	}
	if far.IsOpen() {
		for name, index := range ifaces {
			errs = append(errs, lab.SetTXChecksum(name, false), awaitUp(index))
		}
	}
	for _, n := range h.Neighbours {
		errs = append(errs, netlink.NeighSet(neighbour(n, ifaces[n.Interface])))
	}
	for _, r := range h.Routes {
		errs = append(errs, wrapError("route", r, netlink.RouteAdd(route(r, ifaces[r.Interface]))))
	}
	errs = append(errs, lab.AwaitAddresses(context.Background(), &netlink.Handle{}))
	return ifaces, peers, errors.Join(errs...)
}

// sources writes the settings of an interface that decide which sources it accepts.
func sources(i model.Interface) error {
	accept := 0
	if i.AcceptLocal {
		accept = 1
	}
	return errors.Join(setNet("ipv4/conf/"+i.Name+"/rp_filter", fmt.Sprint(i.RPFilter)), setNet("ipv4/conf/"+i.Name+"/accept_local", fmt.Sprint(accept)))
}

// setNet writes a setting of the current network namespace.
func setNet(name, value string) error {
	return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644)
}

// awaitUp waits until the kernel's worker has handled the link's activation. Earlier packets are lost.
func awaitUp(index int) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return err
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("interface %s is not up: %s", l.Attrs().Name, l.Attrs().OperState)
		}
	}
}
