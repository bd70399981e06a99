// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue is struct ethtool_value of <linux/ethtool.h>.
type ethtoolValue struct {
	cmd  uint32
	data uint32
}

// ifreqData is struct ifreq of <linux/if.h> with its pointer member in use.
type ifreqData struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte // the rest of the kernel's union
}

// setOffload enables or disables one offload of an interface in the current namespace.
func setOffload(iface string, cmd uint32, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := ethtoolValue{cmd: cmd}
	if on {
		value.data = 1
	}
	req := ifreqData{data: unsafe.Pointer(&value)}
	copy(req.name[:unix.IFNAMSIZ-1], iface)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return fmt.Errorf("interface %s: ethtool command %#x: %w", iface, cmd, errno)
	}
	return nil
}

// SetGRO enables or disables generic receive offload of an interface. On a veth that is up it also controls NAPI.
// Without NAPI and without an XDP program of its own, the interface loses frames that XDP redirects to its peer.
func (n *Node) SetGRO(iface string, on bool) error {
	return n.Do(func() error { return SetGRO(iface, on) })
}

// SetGRO is Node.SetGRO in the current namespace.
func SetGRO(iface string, on bool) error { return setOffload(iface, unix.ETHTOOL_SGRO, on) }

// SetTXChecksum selects whether an interface of the current namespace leaves checksums to its peer (leave) or writes
// them.
func SetTXChecksum(iface string, leave bool) error {
	return setOffload(iface, unix.ETHTOOL_STXCSUM, leave)
}
