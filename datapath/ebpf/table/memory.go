// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Memory is an array map's values in this process's memory.
type Memory[T any] struct {
	raw    []byte
	Values []T
}

// MapMemory maps an array with elements of type T. The kernel aligns elements to eight bytes, so the size of T must
// be a multiple.
func MapMemory[T any](m *ebpf.Map) (*Memory[T], error) {
	var zero T
	if unsafe.Sizeof(zero)%8 != 0 {
		return nil, fmt.Errorf("map %s: elements of %d bytes", m, unsafe.Sizeof(zero))
	}
	size := int(m.MaxEntries()) * int(unsafe.Sizeof(zero))
	page := os.Getpagesize()
	raw, err := unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: mmap: %w", m, err)
	}
	return &Memory[T]{raw, unsafe.Slice((*T)(unsafe.Pointer(&raw[0])), m.MaxEntries())}, nil
}

func (m *Memory[T]) Close() error {
	if m == nil || m.raw == nil {
		return nil
	}
	raw := m.raw
	m.raw, m.Values = nil, nil
	return unix.Munmap(raw)
}
