// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Polled detects changes of the interfaces, addresses, routes, routing rules and IPsec policies of a network
// namespace. Without a change, a caller can reuse earlier readings. The kernel queues its messages before it answers
// the request for a change. So Changed reports every change that was complete before the call.
type Polled struct{ sockets []int }

// polledGroups are the multicast groups for interfaces, addresses and answers to RTM_GETROUTE.
var polledGroups = []int{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP,
}

// OpenPolled opens a Polled for the network namespace of the calling thread.
func OpenPolled() (*Polled, error) {
	p := &Polled{}
	err := p.open(unix.NETLINK_ROUTE, polledGroups...)
	if err == nil {
		err = p.open(unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	}
	if err != nil && !withoutIPsec(err) {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (p *Polled) open(protocol int, groups ...int) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return fmt.Errorf("netlink socket of protocol %d: %w", protocol, err)
	}
	p.sockets = append(p.sockets, fd)
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
		}
	}
	if err != nil {
		return fmt.Errorf("netlink socket of protocol %d: %w", protocol, err)
	}
	return nil
}

// Changed reports whether there was a change since the last call, or since OpenPolled. It does not wait.
func (p *Polled) Changed() (changed bool) {
	for _, fd := range p.sockets {
		changed = drainSocket(fd) || changed
	}
	return changed
}

// drainSocket empties a socket and reports whether it contained a message.
func drainSocket(socket int) bool {
	changed, beginning := false, make([]byte, unix.SizeofNlMsghdr) // of a message; the rest is discarded
	for {
		_, _, err := unix.Recvfrom(socket, beginning, unix.MSG_DONTWAIT)
		switch {
		case err == nil:
			changed = true
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return changed
		case errors.Is(err, unix.ENOBUFS): // the socket buffer overflowed
			changed = true
		default:
			return true
		}
	}
}

// Close closes the sockets.
func (p *Polled) Close() (err error) {
	for _, fd := range p.sockets {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}
