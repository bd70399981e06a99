// SPDX-License-Identifier: Apache-2.0

// Package netdev lists and enters network namespaces, reads the interfaces, routes, neighbours and IPsec policies of
// one, and reports changes that affect forwarding.
package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Kind of a change.
type Kind uint8

// Kinds.
const (
	Link      Kind = iota // An interface was added, removed, or changed its state, MAC or MTU.
	Address               // An address was added or removed.
	Route                 // A route or a next-hop object was added, removed or changed.
	Neighbour             // The MAC of a known neighbour changed, or it is no longer known.
	Policy                // An IPsec policy was added, removed or changed.
	Rule                  // A routing rule was added or removed.
	Setting               // Forwarding, rp_filter or another setting of an interface was written.
	Lost                  // The kernel had more changes than fitted the socket: anything may have changed.
)

var kindNames = [...]string{"link", "address", "route", "neighbour", "policy", "rule", "setting", "lost"}

// String returns the kind in lower case.
func (k Kind) String() string { return kindNames[k] }

// Event is one change. Ifindex and Address are set if they apply to the kind.
type Event struct {
	Kind    Kind
	Ifindex int
	Address netip.Addr
	Special bool // of a Route: it is one that Routes or HasLocalInOtherTables reports
	// Table and Protocol (RTPROT) of a Route; 0 for a next-hop object.
	Table    uint32
	Protocol uint8
}

// groups are the multicast groups of NETLINK_ROUTE about next hops.
var groups = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
}

// receiveBuffer in bytes. It holds the changes of some ten thousand routes. A table of a million routes
// that is replaced at once overflows any buffer, which Lost reports.
const receiveBuffer = 8 << 20

// Watcher receives the changes of the namespace in which it was opened.
type Watcher struct {
	socket   *nl.NetlinkSocket
	policies *nl.NetlinkSocket    // nil on a kernel without IPsec.
	macs     map[neighbour]string // Known addresses, to distinguish a new MAC from a new state.
	mu       sync.Mutex           // Protects aging.
	aging    map[neighbour]Aging
	route    unicastRoute // the last one that was read
}

type neighbour struct {
	ifindex int
	address netip.Addr
}

// Open starts watching the network namespace of the calling thread. It reports every change after its return.
func Open() (*Watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...) // SubscribeAt requires CAP_SYS_ADMIN, even for this namespace
	if err != nil {
		return nil, fmt.Errorf("route netlink socket: %w", err)
	}
	if err := socket.SetReceiveBufferSize(receiveBuffer, true); err != nil {
		// Without CAP_NET_ADMIN the kernel's own bound holds; Lost reports when it was too small.
		_ = socket.SetReceiveBufferSize(receiveBuffer, false)
	}
	w := &Watcher{socket: socket, macs: map[neighbour]string{}}
	w.policies, err = nl.Subscribe(unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	if err != nil && !withoutIPsec(err) {
		w.close()
		return nil, fmt.Errorf("IPsec netlink socket: %w", err)
	}
	if err := neighbours(func(_ neighbour, n *netlink.Neigh) { w.learn(n) }); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *Watcher) close() {
	w.socket.Close()
	if w.policies != nil {
		w.policies.Close()
	}
}

// Run calls changed for every change until the context ends, one call at a time. It must be called once; it closes
// the watcher.
func (w *Watcher) Run(ctx context.Context, changed func(Event)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, w.close)()
	var one sync.Mutex
	serially := func(e Event) {
		one.Lock()
		defer one.Unlock()
		changed(e)
	}
	ended := make(chan error, 2)
	running := 1
	go func() { ended <- w.receive(ctx, w.socket, serially) }()
	if w.policies != nil {
		running++
		go func() { ended <- w.receive(ctx, w.policies, serially) }()
	}
	err := <-ended // the watcher ends without Close only after an error
	cancel()
	for range running - 1 {
		err = errors.Join(err, <-ended)
	}
	return err
}

func (w *Watcher) receive(ctx context.Context, socket *nl.NetlinkSocket, changed func(Event)) error {
	for {
		messages, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			changed(Event{Kind: Lost})
			continue
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return fmt.Errorf("netlink socket: %w", err)
		}
		for i := range messages {
			if socket == w.policies {
				changed(Event{Kind: Policy})
				break
			}
			if e, ok := w.event(messages[i].Header.Type, messages[i].Data); ok {
				changed(e)
			}
		}
	}
}

// event decodes a message; false if no next hop has changed.
func (w *Watcher) event(kind uint16, data []byte) (Event, bool) {
	switch kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(data) < unix.SizeofIfInfomsg {
			return Event{}, false
		}
		return Event{Kind: Link, Ifindex: int(nl.DeserializeIfInfomsg(data).Index)}, true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return Event{Kind: Address}, true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, table, _ := tableRoute(data)
		special := w.route.read(data) && w.route.isRelevant() || r.Type == unix.RTN_LOCAL && table != unix.RT_TABLE_LOCAL
		return Event{Kind: Route, Special: special, Table: table, Protocol: r.Protocol}, true
	case unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		return Event{Kind: Route}, true
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		return Event{Kind: Rule}, true
	case unix.RTM_NEWNETCONF:
		return Event{Kind: Setting}, true
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		n, err := netlink.NeighDeserialize(data)
		if err != nil {
			return Event{}, false
		}
		if kind == unix.RTM_DELNEIGH {
			n.HardwareAddr = nil
		}
		return w.learn(n)
	}
	return Event{}, false
}

// usable are the states in which the kernel sends to a neighbour's address.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

// learn records the MAC of a neighbour and reports whether a known one changed. A neighbour that becomes
// known is no change: no packet can have used it.
func (w *Watcher) learn(n *netlink.Neigh) (Event, bool) {
	address, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return Event{}, false // a bridge's forwarding entry
	}
	key := neighbour{n.LinkIndex, address.Unmap()}
	mac := ""
	if n.State&usable != 0 {
		mac = string(n.HardwareAddr)
	}
	w.noteAge(key, n)
	before, known := w.macs[key]
	if mac == "" {
		delete(w.macs, key)
	} else {
		w.macs[key] = mac
	}
	return Event{Kind: Neighbour, Ifindex: key.ifindex, Address: key.address}, known && before != mac
}
