// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// carrier is the outer header of a tunnel: a protocol number on an address family.
type carrier struct{ family, protocol int }

// carriersOf returns the outer headers of the tunnels to backends.
func carriersOf(s *datapath.Snapshot) map[carrier]bool {
	all := map[carrier]bool{}
	for _, svc := range s.Services {
		if svc.Mode != config.ModeTunnel {
			continue
		}
		for i := range svc.Backends {
			for _, l := range svc.Listen {
				c := carrier{unix.AF_INET, unix.IPPROTO_IPIP}
				if svc.Backends[i].Address.Is6() {
					c.family = unix.AF_INET6
				}
				switch {
				case svc.Tunnel.Type == config.TunnelGUE:
					c.protocol = unix.IPPROTO_UDP
				case l.Address.Is6():
					c.protocol = unix.IPPROTO_IPV6
				}
				all[c] = true
			}
		}
	}
	return all
}

// learnTunnelMTUs lets the kernel learn the path MTU of tunnels. A router that cannot forward a packet of a tunnel sends
// its ICMP error to this host. The kernel stores the MTU with the route only if the packet belongs to a socket (raw_err in
// net/ipv4/raw.c, rawv6_err in net/ipv6/raw.c): a raw socket suffices. The programs read the stored MTU and send too-big
// to the client. The sockets receive nothing.
func (d *Datapath) learnTunnelMTUs(want map[carrier]bool) error {
	for c, fd := range d.carriers {
		if !want[c] {
			unix.Close(fd)
			delete(d.carriers, c)
		}
	}
	var errs []error
	for c := range want {
		if _, open := d.carriers[c]; open {
			continue
		}
		fd, err := c.listen()
		if err != nil {
			errs = append(errs, fmt.Errorf("socket of protocol %d: %w", c.protocol, err))
			continue
		}
		d.carriers[c] = fd
	}
	return errors.Join(errs...)
}

// listen opens a raw socket that receives no packets and few errors. rawv6_err ignores unconnected sockets without
// IPV6_RECVERR.
func (c carrier) listen() (fd int, err error) {
	if fd, err = unix.Socket(c.family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, c.protocol); err != nil {
		return fd, err
	}
	none := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &none})
	err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0)) // the kernel's minimum
	if c.family == unix.AF_INET6 {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1))
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, err
}
