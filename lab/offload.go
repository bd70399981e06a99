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

// setOffload turns one offload of an interface in the current namespace on or off.
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

// SetGRO turns generic receive offload of an interface on or off. On a veth that
// is up it also decides about NAPI, without which the interface loses frames that
// XDP redirects to its peer, unless it has an XDP program itself.
func (n *Node) SetGRO(iface string, on bool) error {
	return n.Do(func() error { return SetGRO(iface, on) })
}

// SetGRO is Node.SetGRO in the current namespace.
func SetGRO(iface string, on bool) error { return setOffload(iface, unix.ETHTOOL_SGRO, on) }

// SetTXChecksum has an interface of the current namespace leave checksums to its peer, or
// write them all.
func SetTXChecksum(iface string, leave bool) error {
	return setOffload(iface, unix.ETHTOOL_STXCSUM, leave)
}
