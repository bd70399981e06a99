// SPDX-License-Identifier: Apache-2.0

package labtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/model"
)

// ChangeHost changes the host made by [CaseHost] or ChangeHost into another one with the same interfaces. It reports
// whether more than neighbours have changed.
func ChangeHost(was, now model.Host) (more bool, err error) {
	var errs []error
	links := map[string]netlink.Link{}
	six := false                 // IPv6 addresses were added.
	renewed := map[string]bool{} // Interfaces with neighbour entries flushed by the kernel.
	for n, i := range now.Interfaces {
		old := was.Interfaces[n]
		l, err := netlink.LinkByName(i.Name)
		if err != nil {
			return false, err
		}
		links[i.Name] = l
		if i.MTU != old.MTU {
			more = true
			errs = append(errs, netlink.LinkSetMTU(l, i.MTU))
		}
		if i.RPFilter != old.RPFilter || i.AcceptLocal != old.AcceptLocal {
			more = true
			errs = append(errs, sources(i))
		}
		if i.MAC != old.MAC {
			more, renewed[i.Name] = true, true
			errs = append(errs, netlink.LinkSetHardwareAddr(l, i.MAC[:]))
		}
		for _, p := range missingFrom(old.Addresses, i.Addresses) {
			more = true
			errs = append(errs, netlink.AddrDel(l, &netlink.Addr{IPNet: network(p)}))
		}
		for _, p := range missingFrom(i.Addresses, old.Addresses) {
			more = true
			a := &netlink.Addr{IPNet: network(p)}
			if p.Addr().Is6() {
				a.Flags = unix.IFA_F_NODAD
			}
			errs = append(errs, netlink.AddrAdd(l, a))
			six = six || p.Addr().Is6()
		}
	}
	if six {
		errs = append(errs, lab.AwaitAddresses(context.Background(), &netlink.Handle{}))
	}
	for _, r := range missingFrom(was.Routes, now.Routes) {
		more = true
		errs = append(errs, wrapError("unroute", r, netlink.RouteDel(route(r, links[r.Interface].Attrs().Index))))
	}
	for _, r := range missingFrom(now.Routes, was.Routes) {
		more = true
		errs = append(errs, wrapError("route", r, netlink.RouteAdd(route(r, links[r.Interface].Attrs().Index))))
	}
	for _, n := range missingFrom(was.Neighbours, now.Neighbours) {
		if !renewed[n.Interface] {
			errs = append(errs, wrapError("forget", n, netlink.NeighDel(neighbour(n, links[n.Interface].Attrs().Index))))
		}
	}
	for _, n := range now.Neighbours {
		if renewed[n.Interface] || !slices.Contains(was.Neighbours, n) {
			errs = append(errs, wrapError("neighbour", n, netlink.NeighSet(neighbour(n, links[n.Interface].Attrs().Index))))
		}
	}
	return more, errors.Join(errs...)
}

func wrapError(what string, of any, err error) error {
	if err != nil {
		return fmt.Errorf("%s %v: %w", what, of, err)
	}
	return nil
}

// missingFrom returns the elements of some that are not in others.
func missingFrom[T comparable](some, others []T) (list []T) {
	for _, x := range some {
		if !slices.Contains(others, x) {
			list = append(list, x)
		}
	}
	return list
}

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func neighbour(n model.Neighbour, index int) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: n.Address.AsSlice(), HardwareAddr: n.MAC[:]}
}

func route(r model.Route, index int) *netlink.Route {
	to := &netlink.Route{LinkIndex: index, Dst: network(r.To), MTU: r.MTU}
	if r.Via.IsValid() {
		to.Gw, to.Flags = r.Via.AsSlice(), int(netlink.FLAG_ONLINK) // also for unnumbered interfaces
	}
	return to
}
