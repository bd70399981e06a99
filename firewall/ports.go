// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// PortRules reports whether the calling thread's namespace has rules that see the port of a bridge, or the hardware
// addresses: of nftables in the families bridge and netdev, or of ebtables-legacy.
func PortRules() (found bool, err error) {
	for _, family := range []nftables.TableFamily{nftables.TableFamilyBridge, nftables.TableFamilyNetdev} {
		err := again(func() error {
			return dump(unix.NFT_MSG_GETRULE, family, nil, func(nftables.TableFamily, *mdnetlink.AttributeDecoder) error {
				found = true
				return nil
			})
		})
		if err != nil {
			return false, fmt.Errorf("nftables rules: %w", err)
		}
		err = again(func() error {
			return dump(unix.NFT_MSG_GETCHAIN, family, nil, func(_ nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
				for a.Next() {
					found = found || a.Type() == unix.NFTA_CHAIN_POLICY && a.Uint32() == uint32(nftables.ChainPolicyDrop)
				}
				return nil
			})
		})
		if err != nil {
			return false, fmt.Errorf("nftables chains: %w", err)
		}
	}
	bridges, err := bridgeRules()
	return found || bridges, err
}

// again repeats a read that a change of the rules has interrupted.
func again(read func() error) error {
	err := errInterrupted
	for n := 0; n < readAgain && errors.Is(err, errInterrupted); n++ {
		err = read()
	}
	return err
}

// bridgeRules reports whether a table of ebtables-legacy has a rule. It loads no table.
func bridgeRules() (bool, error) {
	const (
		getInfo   = 128 // EBT_SO_GET_INFO
		tableSize = 120 // struct ebt_replace
		entriesAt = 36  // ebt_replace.nentries
	)
	modules, err := os.ReadFile("/proc/modules")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	for _, name := range []string{"filter", "nat", "broute"} {
		if !bytes.Contains(modules, []byte("ebtable_"+name+" ")) {
			continue // the request would load the module
		}
		info := make([]byte, tableSize)
		copy(info, name)
		switch err := getsockopt(fd, unix.SOL_IP, getInfo, info); {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return false, fmt.Errorf("table %s of ebtables-legacy: %w", name, err)
		case binary.NativeEndian.Uint32(info[entriesAt:]) > 0:
			return true, nil
		}
	}
	return false, nil
}
