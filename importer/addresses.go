// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
)

// ParseAddresses reads the output of "ip -j addr": the host's own addresses by interface.
func ParseAddresses(text string) (map[string][]netip.Prefix, error) {
	if len(text) > MaxSize {
		return nil, fmt.Errorf("larger than %d MiB", MaxSize>>20)
	}
	var links []struct {
		Name      string `json:"ifname"`
		Addresses []struct {
			Local  string `json:"local"`
			Length int    `json:"prefixlen"`
		} `json:"addr_info"`
	}
	if err := json.Unmarshal([]byte(text), &links); err != nil {
		return nil, fmt.Errorf("not the output of 'ip -j addr': %w", err)
	}
	list := map[string][]netip.Prefix{}
	for _, l := range links {
		if l.Name == "" {
			continue // "ip -j -4 addr" prints {} for interfaces without an address
		}
		list[l.Name] = nil
		for _, a := range l.Addresses {
			address, err := netip.ParseAddr(a.Local)
			if err != nil {
				return nil, fmt.Errorf("interface %s: address %q is not understood", l.Name, a.Local)
			}
			p := netip.PrefixFrom(address, a.Length)
			if !p.IsValid() {
				return nil, fmt.Errorf("interface %s: address %s has the prefix length %d", l.Name, address, a.Length)
			}
			list[l.Name] = append(list[l.Name], p)
		}
	}
	if len(list) == 0 {
		return nil, errors.New("no interface in it: pass the output of 'ip -j addr'")
	}
	return list, nil
}
