// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"net"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/lab"
)

// dhcpNode keeps a node's address and default route by DHCP.
type dhcpNode struct {
	clients *DHCP
	cancel  context.CancelFunc
	done    chan struct{} // closed when the renewals have ended
}

// configureByDHCP obtains a lease for an interface, configures its address and the default route, and renews the
// lease at half of its time until Stop.
func configureByDHCP(ctx context.Context, n *lab.Node, iface string) (*dhcpNode, error) {
	clients, err := OpenDHCP(n, iface)
	if err != nil {
		return nil, err
	}
	lease, err := obtainLease(ctx, clients, n, iface)
	if err != nil {
		clients.Close()
		return nil, err
	}
	d := &dhcpNode{clients: clients, done: make(chan struct{})}
	ctx, d.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(d.done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(lease.Time / 2):
			}
			try, cancel := context.WithTimeout(ctx, lease.Time/4)
			if again, err := clients.Renew(try, lease); err == nil {
				lease = again
			} else if again, err := obtainLease(ctx, clients, n, iface); err == nil { // the server has forgotten the lease
				lease = again
			}
			cancel()
		}
	}()
	return d, nil
}

// obtainLease gets a lease and configures it.
func obtainLease(ctx context.Context, clients *DHCP, n *lab.Node, iface string) (Lease, error) {
	h, err := n.Handle()
	if err != nil {
		return Lease{}, err
	}
	defer h.Close()
	link, err := h.LinkByName(iface)
	if err != nil {
		return Lease{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	lease, err := clients.Lease(ctx, link.Attrs().HardwareAddr)
	if err != nil {
		return Lease{}, err
	}
	address := net.IPNet{IP: lease.Address.Addr().AsSlice(), Mask: net.CIDRMask(lease.Address.Bits(), 32)}
	if err := h.AddrReplace(link, &netlink.Addr{IPNet: &address}); err != nil {
		return Lease{}, err
	}
	return lease, h.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: lease.Router.AsSlice()})
}

// Stop ends the renewals. The address stays.
func (d *dhcpNode) Stop() error {
	d.cancel()
	<-d.done
	return d.clients.Close()
}
