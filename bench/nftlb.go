// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// nftlbFarm is the part of nftlb's configuration for one service.
type nftlbFarm struct {
	Name      string         `json:"name"`
	Family    string         `json:"family"`
	Address   string         `json:"virtual-addr"`
	Ports     string         `json:"virtual-ports"`
	Mode      string         `json:"mode"`
	Protocol  string         `json:"protocol"`
	Scheduler string         `json:"scheduler"`
	State     string         `json:"state"`
	Backends  []nftlbBackend `json:"backends"`
}

type nftlbBackend struct {
	Name    string `json:"name"`
	Address string `json:"ip-addr"`
	Ether   string `json:"ether-addr,omitempty"`
	Port    string `json:"port,omitempty"`
	State   string `json:"state"`
}

// nftlb lets nftlb write its rules for one service with one backend: mode dnat, snat or dsr.
func nftlb(mode, protocol string, port uint16) setup {
	return func(t *Trial, n *network) error {
		f := nftlbFarm{
			Name: "bench", Family: "ipv4", Address: vip4.String(), Ports: fmt.Sprint(port), Mode: mode, Protocol: protocol,
			Scheduler: "rr", State: "up", Backends: []nftlbBackend{{Name: "a", Address: server4.String(), Port: fmt.Sprint(port), State: "up"}},
		}
		dir, err := os.MkdirTemp("", "sluice-bench-")
		if err != nil {
			return err
		}
		t.Cleanup(func() error { return os.RemoveAll(dir) })
		if mode == "dsr" {
			// nftlb finds the interfaces by the virtual address and the backend's neighbour entry.
			f.Backends[0].Ether = srvMAC.String()
			if err := command(t, n.gateway, "", "ip", "address", "add", vip4.String()+"/32", "dev", "wan0"); err != nil {
				return err
			}
		}
		b, err := json.Marshal(map[string]any{"farms": []nftlbFarm{f}})
		if err != nil {
			return err
		}
		path := filepath.Join(dir, "nftlb.json")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return err
		}
		if err := command(t, n.gateway, "", "nftlb", "-e", "-L", "1", "-c", path); err != nil {
			return err
		}
		// nftlb exits with status 0 even if the kernel refused its rules.
		return command(t, n.gateway, "", "nft", "list", "table", map[bool]string{true: "netdev", false: "ip"}[mode == "dsr"], "nftlb")
	}
}
