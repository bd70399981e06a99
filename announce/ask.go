// SPDX-License-Identifier: Apache-2.0

package announce

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

// Silent is an address in the network of an interface for which nobody there answers.
type Silent struct {
	Address   netip.Addr
	Interface string
}

// Unanswered asks by ARP and neighbour discovery, as a host does before it takes an address, for
// those addresses that lie in a network of the calling thread's namespace, and returns those for
// which nobody answers. The host's own addresses are not asked for, nor those for which it answers
// in the name of others (proxy ARP).
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

// answersForAll tells whether an interface answers ARP for whatever it has a route to.
func answersForAll(name string) bool {
	for _, which := range []string{name, "all"} {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/sys/net/ipv4/conf/%s/proxy_arp", which))
		if strings.TrimSpace(string(text)) == "1" {
			return true
		}
	}
	return false
}

// proxies are the addresses for which neighbour entries have the host answer.
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
