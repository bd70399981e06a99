// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"encoding/binary"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands and string sets of the ethtool ioctl (linux/ethtool.h).
const (
	ethtoolGetRxChecksum = 0x14
	ethtoolGetStrings    = 0x1b
	ethtoolGetStats      = 0x1d
	ethtoolGetFlags      = 0x25
	ethtoolGetGRO        = 0x2b
	ethtoolGetSetInfo    = 0x37
	ethtoolGetFeatures   = 0x3a

	ethFlagLRO       = 1 << 15
	ethStringLength  = 32
	ethSetStats      = 1
	ethSetFeatures   = 4
	manyStrings      = 8192 // More than any driver has.
	featureWordBytes = 16   // Available, requested, active, never changed.
)

// ethtool asks about interfaces of the namespace in which it was opened.
type ethtool struct{ fd int }

func openEthtool() (ethtool, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return ethtool{fd}, err
}

func (e ethtool) close() { unix.Close(e.fd) }

// do sends a request. The answer replaces the request in the buffer.
func (e ethtool) do(iface string, request []byte) bool {
	r := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // the rest of the kernel's union
	}{data: unsafe.Pointer(&request[0])}
	copy(r.name[:unix.IFNAMSIZ-1], iface)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(e.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r)))
	return errno == 0
}

// value asks for one number.
func (e ethtool) value(iface string, command uint32) (uint32, bool) {
	request := nativeUint32s(command, 0)
	ok := e.do(iface, request)
	return binary.NativeEndian.Uint32(request[4:]), ok
}

// nativeUint32s lays numbers out as the kernel reads them.
func nativeUint32s(v ...uint32) (b []byte) {
	for _, n := range v {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return b
}

// names reads a string set.
func (e ethtool) names(iface string, set uint32) []string {
	// struct ethtool_sset_info: cmd, reserved, sset_mask (64 bits), data[]
	info := append(nativeUint32s(ethtoolGetSetInfo, 0), nativeUint32s(0, 0, 0)...)
	binary.NativeEndian.PutUint64(info[8:], 1<<set)
	if !e.do(iface, info) || binary.NativeEndian.Uint64(info[8:]) == 0 {
		return nil
	}
	n := binary.NativeEndian.Uint32(info[16:])
	if n == 0 || n > manyStrings {
		return nil
	}
	request := append(nativeUint32s(ethtoolGetStrings, set, n), make([]byte, n*ethStringLength)...)
	if !e.do(iface, request) {
		return nil
	}
	list := make([]string, n)
	for i := range list {
		name := request[12+i*ethStringLength:][:ethStringLength]
		name, _, _ = bytes.Cut(name, []byte{0})
		list[i] = string(name)
	}
	return list
}

// feature returns 1 if a feature of the interface is on, 0 if it is off, and -1 if the kernel does
// not know it.
func (e ethtool) feature(iface, name string) int {
	names := e.names(iface, ethSetFeatures)
	size := uint32(len(names)+31) / 32
	if size == 0 {
		return -1
	}
	request := append(nativeUint32s(ethtoolGetFeatures, size), make([]byte, size*featureWordBytes)...)
	if !e.do(iface, request) {
		return -1
	}
	for i, n := range names {
		if n == name {
			active := binary.NativeEndian.Uint32(request[8+i/32*featureWordBytes+8:])
			return int(active >> (i % 32) & 1)
		}
	}
	return -1
}

// lost adds up the driver's counters with names for received packets that were dropped for lack of
// space.
func (e ethtool) lost(iface string) uint64 {
	names := e.names(iface, ethSetStats)
	if len(names) == 0 {
		return 0
	}
	request := append(nativeUint32s(ethtoolGetStats, uint32(len(names))), make([]byte, 8*len(names))...)
	if !e.do(iface, request) {
		return 0
	}
	sum := uint64(0)
	for i, name := range names {
		if ringCounter(name) {
			sum += binary.NativeEndian.Uint64(request[8+8*i:])
		}
	}
	return sum
}

// ringCounter reports whether a driver's counter counts packets that found a receive ring full.
// Names differ by driver. Counters per queue repeat the counter of the interface.
func ringCounter(name string) bool {
	name = strings.ToLower(name)
	if strings.Contains(name, "tx") || strings.Contains(name, "xdp") || strings.Contains(name, "queue") ||
		strings.ContainsAny(name, "0123456789[") {
		return false
	}
	for _, word := range []string{"no_buf", "nobuf", "missed", "out_of_buffer", "no_dma", "rx_drop", "rx_discard"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}

// offloads reads the hardware offloads of an interface.
func (l *Link) offloads(e ethtool) {
	if v, ok := e.value(l.Name, ethtoolGetFlags); ok {
		l.LRO = int(v / ethFlagLRO & 1)
	}
	if v, ok := e.value(l.Name, ethtoolGetGRO); ok {
		l.GRO = int(v & 1)
	}
	if v, ok := e.value(l.Name, ethtoolGetRxChecksum); ok {
		l.RxChecksum = int(v & 1)
	}
	if l.Kind == "device" {
		l.UDPForwarding = e.feature(l.Name, "rx-udp-gro-forwarding")
		l.RingLost = e.lost(l.Name)
	}
}
