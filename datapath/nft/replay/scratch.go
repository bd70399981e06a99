// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// inNamespaces runs f on a thread in a new unnamed network namespace. It passes a second namespace for the far ends
// of the links. Both namespaces end with their last descriptor and thread, also if f fails.
func inNamespaces(home int, f func(host *host, far int) error) error {
	done := make(chan error, 1)
	go func() { done <- onThread(home, f) }()
	return <-done
}

// onThread runs f on the thread of the calling goroutine, which must have no other work. All its descriptors are
// closed before it returns.
func onThread(home int, f func(host *host, far int) error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() { // the main thread must not move, because /proc/self refers to it
		defer runtime.UnlockOSThread()
		return inNamespaces(home, f)
	}
	back, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer back.Close()
	err = runInScratch(home, f)
	// A thread that cannot return stays locked and ends with this goroutine.
	if unix.Setns(int(back.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
	return err
}

func runInScratch(home int, f func(host *host, far int) error) error {
	if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network namespace: %w", err)
	}
	h, err := readHost()
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("scratch namespace: %w: it takes root or CAP_SYS_ADMIN", err)
	}
	for key, value := range map[string]string{"ipv4/ip_forward": "0", "ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/disable_ipv6": "1"} {
		_ = os.WriteFile(sysctls+key, []byte(value), 0o644) // the far ends forward nothing, because they have no routes
	}
	far, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("scratch namespace: %w", err)
	}
	defer unix.Close(far)
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("scratch namespace: %w", err)
	}
	return f(h, far)
}

// link is an interface of the host with its replacement in the scratch namespace.
type link struct {
	name    string
	real    int // Index on the host.
	index   int // Index in the scratch namespace.
	mac     net.HardwareAddr
	mtu     int
	up      bool
	master  int // index on the host, of a bridge or bond only
	vrf     bool
	farName string
}

// makeLinks creates a veth pair for every interface except the loopback.
func (h *host) makeLinks(ctx context.Context, far int) error {
	other, err := netlink.NewHandleAt(netns.NsHandle(far), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("far namespace: %w", err)
	}
	defer other.Close()
	if lo, err := netlink.LinkByName("lo"); err == nil {
		if err := netlink.LinkSetUp(lo); err != nil {
			return fmt.Errorf("loopback: %w", err)
		}
	}
	for i := range h.links {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := h.links[i].createLink(far, other); err != nil {
			return fmt.Errorf("interface %s: %w", h.links[i].name, err)
		}
	}
	return nil
}

// Minimum and maximum MTU of IPv4 (RFC 791), which are the limits of a veth pair.
const leastMTU, mostMTU = 68, 65535

func (l *link) createLink(far int, other *netlink.Handle) error {
	l.farName = fmt.Sprintf("far%d", l.real)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index, attrs.MTU = l.name, l.real, min(max(l.mtu, leastMTU), mostMTU)
	if len(l.mac) == 6 {
		attrs.HardwareAddr = l.mac
	}
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: l.farName, PeerNamespace: netlink.NsFd(far)}
	err := netlink.LinkAdd(pair)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) { // the index is in use: new namespaces may have tunnel devices
		pair.Index = 0
		err = netlink.LinkAdd(pair)
	}
	switch {
	case errors.Is(err, unix.EEXIST): // the name of such a tunnel device
		l.farName = ""
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: the kernel has no veth: load the module", err)
	case err != nil:
		return err
	}
	made, err := netlink.LinkByName(l.name)
	if err != nil {
		return err
	}
	l.index, l.mac = made.Attrs().Index, made.Attrs().HardwareAddr
	if l.farName == "" || !l.up {
		return nil
	}
	end, err := other.LinkByName(l.farName)
	if err != nil {
		return err
	}
	if err := other.LinkSetUp(end); err != nil {
		return err
	}
	// No station answers ARP. With ARP off, the kernel needs no neighbour's hardware address.
	if err := netlink.LinkSetARPOff(made); err != nil {
		return err
	}
	return netlink.LinkSetUp(made)
}
