// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Node is one network namespace of a lab.
type Node struct {
	spec  NodeSpec
	full  string
	bpffs string // per-node bpffs, mounted by the lab; "" if the node has none
}

// Name returns the full name of the namespace, unique on the machine, as "ip netns" shows it.
func (n *Node) Name() string { return n.full }

// Short returns the node's name within its topology.
func (n *Node) Short() string { return n.spec.Name }

// Spec returns the spec of the node.
func (n *Node) Spec() NodeSpec { return n.spec }

// Path returns the file of the namespace under /run/netns.
func (n *Node) Path() string { return netnsPath(n.full) }

// StateDir is the directory for the socket and the lock of a gateway in the node. It is the default of "sluice
// --state-dir" in a namespace of this name. [Lab.Down] removes it.
func (n *Node) StateDir() string { return filepath.Join("/run/sluice/netns", n.full) }

// Do runs f inside the namespace, on the calling goroutine and with its thread locked. A socket that f opens stays in
// the namespace. A goroutine that f starts does not run there.
func (n *Node) Do(f func() error) error {
	if err := inNamespace(n.Path(), f); err != nil {
		return fmt.Errorf("node %s: %w", n.spec.Name, err)
	}
	return nil
}

// End ends every process that runs in the namespace: SIGTERM, two seconds, SIGKILL.
func (n *Node) End() error {
	if err := endProcesses([]string{n.Path()}); err != nil {
		return fmt.Errorf("node %s: %w", n.spec.Name, err)
	}
	return nil
}

// Handle returns a netlink handle of the namespace; the caller closes it.
func (n *Node) Handle() (*netlink.Handle, error) {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", n.spec.Name, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE) // other families may belong to modules that are not loaded
	if err != nil {
		return nil, fmt.Errorf("node %s: netlink: %w", n.spec.Name, err)
	}
	return h, nil
}

// Interface returns one interface of the node: index, hardware address, MTU.
func (n *Node) Interface(name string) (*net.Interface, error) {
	var iface *net.Interface
	err := n.Do(func() (err error) {
		iface, err = net.InterfaceByName(name)
		return err
	})
	return iface, err
}

// Listen opens a TCP listener inside the namespace. The address is a literal such as
// "10.0.2.2:80" or "[::]:80".
func (n *Node) Listen(address string) (net.Listener, error) {
	var l net.Listener
	err := n.Do(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// ListenPacket opens a UDP socket inside the namespace. The address is a literal.
func (n *Node) ListenPacket(address string) (net.PacketConn, error) {
	var c net.PacketConn
	err := n.Do(func() (err error) {
		c, err = net.ListenPacket("udp", address)
		return err
	})
	return c, err
}

// Dial connects from inside the namespace. The address is a literal: the resolver would run in another thread and so
// in another namespace. d selects the source (LocalAddr) and may be nil.
func (n *Node) Dial(ctx context.Context, d *net.Dialer, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("node %s: dial %q: %w", n.spec.Name, address, err)
	}
	if d == nil {
		d = &net.Dialer{}
	}
	var c net.Conn
	err := n.Do(func() (err error) {
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Command prepares a child process that runs inside the namespace. Like "ip netns exec", it uses a mount namespace
// with the /sys of the network namespace.
//
// Unlike "ip netns exec", the host's mounts below /sys (cgroups, tracing) remain visible. On a forwarding node,
// /sys/fs/bpf is a private bpffs with the lifetime of the lab. So a gateway's pins survive its process and are
// invisible to other gateways.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	path, lookErr := exec.LookPath(name)
	if lookErr == nil {
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = append([]string{enterArg0, n.Path(), n.bpffs, path, name}, args...)
	if lookErr != nil {
		cmd.Err = fmt.Errorf("node %s: %w", n.spec.Name, lookErr)
	}
	return cmd
}

// Contains reports whether a process runs in the namespace.
func (n *Node) Contains(pid int) bool {
	own, ok := namespaceInode(n.Path())
	its, ok2 := namespaceInode(fmt.Sprintf("/proc/%d/ns/net", pid))
	return ok && ok2 && own == its
}
