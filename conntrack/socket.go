// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// skMeminfoDrops is the index of the count of lost messages in the answer to
// SO_MEMINFO (linux/sock_diag.h).
const skMeminfoDrops = 8

// socketMemory reads the memory statistics of a socket. x/sys/unix has no function for an option with an array value.
func socketMemory(fd int) (info [9]uint32, err error) {
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return info, errno
	}
	return info, nil
}
