// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// memory is an array map's values in this process's memory.
type memory[T any] struct {
	raw    []byte
	values []T
}

// portOwner is an element of port_owners, as it lies in memory.
type portOwner struct{ entry, _ uint32 }

// mapMemory maps an array whose elements are T. The kernel puts them at multiples of
// eight bytes, so T must have such a size.
func mapMemory[T any](m *ebpf.Map) (*memory[T], error) {
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
	return &memory[T]{raw, unsafe.Slice((*T)(unsafe.Pointer(&raw[0])), m.MaxEntries())}, nil
}

func (m *memory[T]) close() error {
	if m == nil || m.raw == nil {
		return nil
	}
	raw := m.raw
	m.raw, m.values = nil, nil
	return unix.Munmap(raw)
}
