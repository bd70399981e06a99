// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/program"
)

// dhcpLoad are the DHCP clients of the office.
type dhcpLoad struct {
	clients *host.DHCP
	leases  []host.Lease
	renewed atomic.Uint64
}

// lease obtains an address for every client.
func (o *officeNetwork) lease(ctx context.Context) (*dhcpLoad, error) {
	clients, err := host.OpenDHCP(o.client, "eth0")
	if err != nil {
		return nil, err
	}
	d := &dhcpLoad{clients: clients, leases: make([]host.Lease, program.Leases)}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	for i := range d.leases {
		group.Go(func() (err error) {
			d.leases[i], err = clients.Lease(ctx, net.HardwareAddr{2, 0, 0, 10, 0, byte(i)})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		clients.Close()
		return nil, err
	}
	return d, nil
}

// dhcpPause is the time between two renewals of a client.
const dhcpPause = 500 * time.Millisecond

// renew renews all leases until ctx ends.
func (d *dhcpLoad) renew(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range d.leases {
		group.Go(func() error {
			for ctx.Err() == nil {
				if _, err := d.clients.Renew(ctx, l); err != nil {
					if ctx.Err() != nil {
						break // ctx ends with the measurement
					}
					return err
				}
				d.renewed.Add(1)
				_ = wait(ctx, int(dhcpPause.Milliseconds())) // the loop condition checks ctx.Err
			}
			return nil
		})
	}
	return group.Wait()
}

// heldList is the list of connections that stay open during a measurement.
type heldList []heldConnection

// heldConnection is an open connection with a request that its server answers.
type heldConnection struct {
	net.Conn
	request []byte
}

func (l heldList) close() {
	for _, c := range l {
		c.Close()
	}
}

// openConnections opens the connections: half of them from the office, the others from outside to its servers.
func (o *officeNetwork) openConnections(out, web, ftp netip.Addr) (all heldList, err error) {
	const get = "GET / HTTP/1.1\r\nHost: office\r\n\r\n"
	for _, part := range []struct {
		from    *lab.Node
		to      netip.AddrPort
		count   int
		request string
	}{
		{o.client, netip.AddrPortFrom(out, 80), heldConnections / 2, get},
		{o.server, netip.AddrPortFrom(web, 80), heldConnections/2 - 100, get},
		{o.server, netip.AddrPortFrom(ftp, 21), 100, "NOOP\r\n"},
	} {
		err := part.from.Do(func() error {
			for range part.count {
				c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(o.t, "tcp", part.to.String())
				if err != nil {
					return err
				}
				all = append(all, heldConnection{c, []byte(part.request)})
			}
			return nil
		})
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// Requests on held connections: workers send them in turn, each with a pause, so that they are 800 a second at most
// and take no notable part of the line.
const (
	heldWorkers = 8
	heldPause   = 10 * time.Millisecond
)

// sendRequests sends requests on the connections in turn until ctx ends.
func (l heldList) sendRequests(ctx context.Context) error {
	var group errgroup.Group
	for w := range heldWorkers {
		group.Go(func() error {
			answer := make([]byte, 4096)
			for i := w; ctx.Err() == nil; i = (i + heldWorkers) % len(l) {
				c := l[i]
				_ = c.SetDeadline(time.Now().Add(10 * time.Second)) // fails only on a closed connection
				_, err := c.Write(c.request)
				if err == nil {
					_, err = c.Read(answer)
				}
				if err != nil {
					return fmt.Errorf("connection %d of %d: %w", i, len(l), err)
				}
				_ = wait(ctx, int(heldPause.Milliseconds())) // the loop condition checks ctx.Err
			}
			return nil
		})
	}
	return group.Wait()
}
