// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Polled tells whether anything was changed about the interfaces, addresses, routes and routing rules of
// a network namespace, so that whoever has read them need not do so again. The kernel queues its messages
// before the request for a change is answered: what was changed before a call of Changed, that call tells.
type Polled struct{ socket int }

// polledGroups are those of what an interface, an address or an answer to RTM_GETROUTE depends on.
var polledGroups = []int{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP,
}

// OpenPolled opens one for the network namespace of the calling thread.
func OpenPolled() (*Polled, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("route netlink socket: %w", err)
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range polledGroups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("route netlink socket: %w", err), unix.Close(fd))
	}
	return &Polled{fd}, nil
}

// Changed reports whether there was a change since the last call, or since it was opened. It does not wait.
func (p *Polled) Changed() bool {
	changed, beginning := false, make([]byte, unix.SizeofNlMsghdr) // of a message, whose rest is dropped
	for {
		_, _, err := unix.Recvfrom(p.socket, beginning, unix.MSG_DONTWAIT)
		switch {
		case err == nil:
			changed = true
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return changed
		case errors.Is(err, unix.ENOBUFS): // more messages than fitted
			changed = true
		default:
			return true
		}
	}
}

// Close closes it.
func (p *Polled) Close() error { return unix.Close(p.socket) }
