// SPDX-License-Identifier: Apache-2.0

// Package published lists the ports that a Docker engine publishes, the path of packets to each port, and its cost.
package published

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/firewall"
)

// Paths of packets to a published port.
const (
	NFT    = "iptables-nft"
	Legacy = "iptables-legacy"
	Proxy  = "userland proxy"
	// None: no rule translates the port and no proxy listens on it.
	None = "none"
)

// Port is a published port of a container.
type Port struct {
	Container string     `json:"container"`
	Address   netip.Addr `json:"address"` // of the host; unspecified for all
	Port      uint16     `json:"port"`
	Protocol  string     `json:"protocol"`
	// To is the container's address and port. It is zero in a network of the host.
	To netip.AddrPort `json:"to"`
	// Path is NFT, Legacy, Proxy or None. Rules precede a proxy, which then serves only local addresses.
	Path string `json:"path"`
	// Proxied reports whether a userland proxy listens.
	Proxied bool  `json:"userland_proxy"`
	Cost    *Cost `json:"cost,omitempty"`
	// NotMeasured is the reason why Cost is missing although it was requested.
	NotMeasured string `json:"not_measured,omitempty"`
}

// String returns the published address as in "192.0.2.1:8080/tcp" or "8080/tcp".
func (p Port) String() string {
	port := strconv.Itoa(int(p.Port))
	switch {
	case !p.Address.IsUnspecified():
		port = netip.AddrPortFrom(p.Address, p.Port).String()
	case p.Address.Is6():
		port = "[::]:" + port
	}
	return port + "/" + p.Protocol
}

// List returns the published ports of the running containers, ordered by container and port, with their paths in the
// calling thread's network namespace.
func List(ctx context.Context, socket string) ([]Port, error) {
	ports, err := listContainers(ctx, socket)
	if err != nil || len(ports) == 0 {
		return ports, err
	}
	rules, err := firewall.Read(ctx)
	if err != nil {
		return nil, fmt.Errorf("the rules of this host: %w", err)
	}
	proxies, err := readProxies("/proc")
	if err != nil {
		return nil, err
	}
	for i := range ports {
		ports[i].findPath(rules, proxies)
	}
	return ports, nil
}

// findPath sets the path of a port.
func (p *Port) findPath(rules *firewall.Ruleset, proxies map[proxy]bool) {
	p.Proxied = proxies[proxy{p.Protocol, p.Address, p.Port}]
	has := func(ranges []firewall.PortRange) bool {
		return slices.ContainsFunc(ranges, func(r firewall.PortRange) bool { return r.Low <= p.Port && p.Port <= r.High })
	}
	translated := p.To.IsValid() && p.To.Addr().Is4() == p.Address.Is4() // rules do not translate between the families
	switch {
	case translated && has(rules.ForwardedLegacy):
		p.Path = Legacy
	case translated && has(rules.Forwarded):
		p.Path = NFT
	case p.Proxied:
		p.Path = Proxy
	default:
		p.Path = None
	}
}

// proxy is what a docker-proxy process listens on.
type proxy struct {
	protocol string
	address  netip.Addr
	port     uint16
}

// readProxies finds the docker-proxy processes in the calling thread's network namespace by their command lines.
func readProxies(proc string) (map[proxy]bool, error) {
	own, err := os.Readlink(filepath.Join(proc, "thread-self", "ns", "net"))
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	if err != nil {
		return nil, err
	}
	found := map[proxy]bool{}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil {
			continue // the owner of the socket has ended
		}
		words := strings.Split(string(line), "\x00")
		if filepath.Base(words[0]) != "docker-proxy" {
			continue
		}
		if its, err := os.Readlink(filepath.Join(filepath.Dir(file), "ns", "net")); err != nil || its != own {
			continue
		}
		p := proxy{}
		for i := 1; i+1 < len(words); i++ {
			switch words[i] {
			case "-proto":
				p.protocol = words[i+1]
			case "-host-ip":
				p.address, _ = netip.ParseAddr(words[i+1]) // an invalid one matches no port
			case "-host-port":
				port, _ := strconv.ParseUint(words[i+1], 10, 16) // 0 matches no port
				p.port = uint16(port)
			}
		}
		found[p] = true
	}
	return found, nil
}
