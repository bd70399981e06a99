// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Silent is an address in the network of an interface that no station answers for.
type Silent struct {
	Address   netip.Addr
	Interface string
}

// Unanswered probes addresses by ARP and neighbour discovery, like a host before it uses an address. It probes the
// addresses in a network of the calling thread's namespace and returns those without an answer. It skips the host's
// own addresses and addresses that the host answers for as a proxy (proxy ARP).
func Unanswered(addresses []netip.Addr) (list []Silent, err error) {
	h, err := readHost(nil)
	if err != nil {
		return nil, err
	}
	proxied := proxies()
	ask := map[int][]netip.Addr{}
	for _, a := range addresses {
		n, met := h.networkOf(a)
		_, own := h.own[a]
		if !met || own || !n.carrier || n.isEnd(a) || proxied[a] || answersForAll(n.name) ||
			slices.ContainsFunc(h.local, func(p netip.Prefix) bool { return p.Contains(a) }) {
			continue
		}
		ask[n.ifindex] = append(ask[n.ifindex], a)
	}
	for index, asked := range ask {
		held, err := probe(h.stations[index], asked, h.macs)
		if err != nil {
			return nil, err
		}
		for _, a := range asked {
			if held[a] == "" {
				list = append(list, Silent{a, h.stations[index].name})
			}
		}
	}
	slices.SortFunc(list, func(a, b Silent) int { return a.Address.Compare(b.Address) })
	return list, nil
}

// answersForAll reports whether an interface answers ARP for every routed address.
func answersForAll(name string) bool {
	for _, which := range []string{name, "all"} {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/sys/net/ipv4/conf/%s/proxy_arp", which))
		if strings.TrimSpace(string(text)) == "1" {
			return true
		}
	}
	return false
}

// proxies returns the addresses of proxy neighbour entries.
func proxies() map[netip.Addr]bool {
	found := map[netip.Addr]bool{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		entries, _ := netdev.Whole(func() ([]netlink.Neigh, error) { return netlink.NeighProxyList(0, family) })
		for _, e := range entries {
			if a, ok := netip.AddrFromSlice(e.IP); ok {
				found[a.Unmap()] = true
			}
		}
	}
	return found
}
