// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// Topology describes a network. It is plain data that can be printed, compared and changed before [Up] builds it.
type Topology struct {
	// Name distinguishes topologies in namespace names: at most 12 lower-case letters and digits.
	Name string `json:"name"`
	// About describes in one sentence the purpose of the topology.
	About string     `json:"about,omitempty"`
	Nodes []NodeSpec `json:"nodes"`
	Links []LinkSpec `json:"links"`
}

// NodeSpec describes one network namespace.
type NodeSpec struct {
	// Name is the node's name within the topology: at most 12 lower-case letters and digits.
	Name string `json:"name"`
	// Forward makes the node a router for IPv4 and IPv6.
	Forward bool `json:"forward,omitempty"`
	// Switch makes the node an Ethernet switch: every link to the node is a port of one bridge. A switch has no
	// addresses, no IPv6 of its own, and no bridge netfilter.
	Switch bool `json:"switch,omitempty"`
	// Addresses of lo, as CIDR.
	Addresses []string `json:"addresses,omitempty"`
	// Owns lists prefixes of local routes: each address belongs to the node. One node can so emulate thousands of
	// clients or hosts.
	Owns   []string `json:"owns,omitempty"`
	Routes []Route  `json:"routes,omitempty"`
	// Sysctls are written after the interfaces exist, for example "net.ipv4.conf.all.arp_ignore": "1".
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Servers are the servers that "sluice lab up" starts in the node. [Up] does not: tests and the demo start their
	// own.
	Servers []ServerSpec `json:"servers,omitempty"`
}

// ServerSpec describes a small server. It listens on every address of its node. Its answers contain the node's name
// and the client's address as received.
type ServerSpec struct {
	// Kind is "web" (HTTP), "ftp", "echo" (an answer to each TCP line and UDP datagram) or "dns" (a TXT record for
	// every question, over UDP). "dnsmasq" and "openvpn" are these programs. The kinds in [kindsWithoutPort] serve no
	// port of their own.
	Kind string `json:"kind"`
	Port uint16 `json:"port,omitempty"`
}

// Kinds of servers. kindsWithoutPort are "sluice" (the daemon with examples/TOPOLOGY.yaml), "openvpn-client" and
// "dhcp-client" (it configures eth0).
var (
	kindsWithPort    = []string{"web", "ftp", "echo", "dns", "dnsmasq", "openvpn"}
	kindsWithoutPort = []string{"sluice", "openvpn-client", "dhcp-client"}
)

func (s ServerSpec) String() string {
	if s.Port == 0 {
		return s.Kind
	}
	return fmt.Sprintf("%s:%d", s.Kind, s.Port)
}

// LinkSpec describes a veth pair between two nodes.
type LinkSpec struct {
	A End `json:"a"`
	B End `json:"b"`
	// MTU in bytes of both ends; 0 means the kernel's 1500.
	MTU int `json:"mtu,omitempty"`
}

// End is one end of a link.
type End struct {
	Node  string `json:"node"`
	Iface string `json:"iface"`
	// Addresses as CIDR. IPv6 addresses are usable at once: duplicate address detection is off.
	Addresses []string `json:"addresses,omitempty"`
	// MAC is the hardware address; empty means a random one.
	MAC string `json:"mac,omitempty"`
	// NoTxChecksum makes the node's stack compute checksums itself ("ethtool -K DEV tx off"). Native XDP on a veth
	// forwards frames without the kernel's note that a checksum is incomplete. So real TCP through it needs this
	// option at both hosts. It also disables segmentation offload.
	NoTxChecksum bool `json:"no_tx_checksum,omitempty"`
	// GRO enables generic receive offload and thereby NAPI. A veth needs NAPI to receive frames that XDP redirects to
	// its peer.
	GRO bool `json:"gro,omitempty"`
}

// Route is a static route of a node.
type Route struct {
	// To is "default" (IPv4), "default6" or a CIDR.
	To string `json:"to"`
	// Via is the next hop's address; empty means on-link.
	Via string `json:"via,omitempty"`
	// Dev is the interface; it may be empty if Via is sufficient.
	Dev string `json:"dev,omitempty"`
	// From limits the route to packets that the node sends from this address or prefix (a policy rule with its own
	// routing table); empty means all packets.
	From string `json:"from,omitempty"`
}

// AddressesOf returns the addresses of a node: first on its links, then on lo.
func (t Topology) AddressesOf(node string) []netip.Addr {
	var cidrs []string
	for _, l := range t.Links {
		for _, e := range []End{l.A, l.B} {
			if e.Node == node {
				cidrs = append(cidrs, e.Addresses...)
			}
		}
	}
	for _, n := range t.Nodes {
		if n.Name == node {
			cidrs = append(cidrs, n.Addresses...)
		}
	}
	var addrs []netip.Addr
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil { // Validate rejects other values
			addrs = append(addrs, p.Addr())
		}
	}
	return addrs
}

var nodeName = regexp.MustCompile(`^[a-z][a-z0-9]{0,11}$`)

// maxIfaceName is the maximum length of an interface name (IFNAMSIZ minus the final NUL).
const maxIfaceName = 15

// Validate reports the first error in the topology.
func (t Topology) Validate() error {
	if !nodeName.MatchString(t.Name) {
		return fmt.Errorf("topology %q: name must be 1 to 12 lower-case letters and digits", t.Name)
	}
	nodes := make(map[string]NodeSpec, len(t.Nodes))
	for _, n := range t.Nodes {
		if !nodeName.MatchString(n.Name) {
			return fmt.Errorf("node %q: name must be 1 to 12 lower-case letters and digits", n.Name)
		}
		if _, ok := nodes[n.Name]; ok {
			return fmt.Errorf("node %s: name used twice", n.Name)
		}
		nodes[n.Name] = n
		if err := n.validate(); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	ifaces := make(map[[2]string]bool)
	for _, l := range t.Links {
		for _, e := range []End{l.A, l.B} {
			if err := e.validate(nodes); err != nil {
				return fmt.Errorf("link %s/%s: %w", e.Node, e.Iface, err)
			}
			key := [2]string{e.Node, e.Iface}
			if ifaces[key] {
				return fmt.Errorf("link %s/%s: interface used twice", e.Node, e.Iface)
			}
			ifaces[key] = true
		}
	}
	return nil
}

func (n NodeSpec) validate() error {
	if n.Switch && (n.Forward || len(n.Addresses) > 0 || len(n.Routes) > 0 || len(n.Owns) > 0) {
		return fmt.Errorf("a switch has no addresses, no routes and does not forward packets")
	}
	for _, s := range n.Servers {
		kinds, words := kindsWithPort, "with a port"
		if s.Port == 0 {
			kinds, words = kindsWithoutPort, "without a port"
		}
		if !slices.Contains(kinds, s.Kind) {
			return fmt.Errorf("server %s: must be one of %s %s", s, strings.Join(kinds, ", "), words)
		}
	}
	for _, a := range append(append([]string(nil), n.Addresses...), n.Owns...) {
		if _, err := netip.ParsePrefix(a); err != nil {
			return fmt.Errorf("address %q: not a CIDR such as 192.0.2.1/24", a)
		}
	}
	for _, r := range n.Routes {
		if err := r.validate(); err != nil {
			return fmt.Errorf("route to %q: %w", r.To, err)
		}
	}
	return nil
}

func (r Route) validate() error {
	if _, err := r.destination(); err != nil {
		return err
	}
	if r.Via == "" && r.Dev == "" {
		return fmt.Errorf("needs a next hop (via) or an interface (dev)")
	}
	if r.Via != "" {
		if _, err := netip.ParseAddr(r.Via); err != nil {
			return fmt.Errorf("next hop %q: not an IP address", r.Via)
		}
	}
	if r.From != "" {
		if _, err := parsePrefixOrAddr(r.From); err != nil {
			return fmt.Errorf("from %q: not an IP address or CIDR", r.From)
		}
	}
	return nil
}

func (r Route) destination() (netip.Prefix, error) {
	switch r.To {
	case "default":
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0), nil
	case "default6":
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), nil
	}
	p, err := netip.ParsePrefix(r.To)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("not \"default\", \"default6\" or a CIDR")
	}
	return p.Masked(), nil
}

func (e End) validate(nodes map[string]NodeSpec) error {
	n, ok := nodes[e.Node]
	if !ok {
		return fmt.Errorf("no node of that name")
	}
	if e.Iface == "" || e.Iface == "lo" || len(e.Iface) > maxIfaceName {
		return fmt.Errorf("interface name must have 1 to %d characters and not be lo", maxIfaceName)
	}
	if n.Switch && len(e.Addresses) > 0 {
		return fmt.Errorf("a switch port has no addresses")
	}
	for _, a := range e.Addresses {
		if _, err := netip.ParsePrefix(a); err != nil {
			return fmt.Errorf("address %q: not a CIDR such as 192.0.2.1/24", a)
		}
	}
	if e.MAC != "" {
		if _, err := net.ParseMAC(e.MAC); err != nil {
			return fmt.Errorf("hardware address %q: %w", e.MAC, err)
		}
	}
	return nil
}

func parsePrefixOrAddr(s string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}
