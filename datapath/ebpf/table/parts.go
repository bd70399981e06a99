// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"iter"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Parts is a map of maps that holds the parts of one array, mapped into this process's memory. Values has the maximum
// size of the array. Elements of missing parts read as zero.
type Parts[T any] struct {
	outer  *ebpf.Map
	inner  *ebpf.MapSpec
	raw    []byte
	there  []bool
	Values []T

	shown atomic.Uint32 // number of parts up to the last existing one
}

// MapParts maps the existing parts of an array of at most size elements.
func MapParts[T any](outer *ebpf.Map, inner *ebpf.MapSpec, size uint32) (_ *Parts[T], err error) {
	var zero T
	bytes := int(outer.MaxEntries()) * int(inner.MaxEntries) * int(unsafe.Sizeof(zero))
	if part := bytes / int(outer.MaxEntries()); part%os.Getpagesize() != 0 || uint32(unsafe.Sizeof(zero)) != inner.ValueSize {
		return nil, fmt.Errorf("map %s: parts of %d bytes", outer, part)
	}
	// Zero pages: reading them allocates no memory.
	raw, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %s: mmap: %w", outer, err)
	}
	p := &Parts[T]{outer: outer, inner: inner, raw: raw, there: make([]bool, outer.MaxEntries()), Values: unsafe.Slice((*T)(unsafe.Pointer(&raw[0])), size)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for n := range outer.MaxEntries() {
		var part *ebpf.Map
		if err := outer.Lookup(n, &part); errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("map %s: part %d: %w", outer, n, err)
		}
		err := p.mapPart(n, part)
		if err = errors.Join(err, part.Close()); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// mapPart maps a part at its position.
func (p *Parts[T]) mapPart(n uint32, part *ebpf.Map) error {
	size := len(p.raw) / len(p.there)
	at := unsafe.Pointer(&p.raw[int(n)*size])
	if _, err := unix.MmapPtr(part.FD(), 0, at, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return fmt.Errorf("map %s: part %d: mmap: %w", p.outer, n, err)
	}
	p.there[n] = true
	p.shown.Store(max(p.shown.Load(), n+1))
	return nil
}

// Shown returns the elements up to the last existing part.
func (p *Parts[T]) Shown() []T {
	return p.Values[:min(int(p.shown.Load())*int(p.inner.MaxEntries), len(p.Values))]
}

// Add creates the missing parts: all, or none on error. It returns after the kernel has stored them.
func (p *Parts[T]) Add(numbers iter.Seq[uint32]) (err error) {
	var fresh, descriptors []uint32
	defer func() {
		for _, n := range fresh {
			if err != nil {
				err = errors.Join(err, p.unmapPart(n))
			}
		}
	}()
	for n := range numbers {
		if p.there[n] {
			continue
		}
		part, err := ebpf.NewMap(p.inner)
		if err != nil {
			return fmt.Errorf("map %s: part %d: %w", p.outer, n, err)
		}
		defer part.Close() // the outer map and the mapping keep it alive
		if err := p.mapPart(n, part); err != nil {
			return err
		}
		fresh, descriptors = append(fresh, n), append(descriptors, uint32(part.FD()))
	}
	if len(fresh) == 0 {
		return nil
	}
	if _, err := p.outer.BatchUpdate(fresh, descriptors, nil); err != nil {
		return fmt.Errorf("map %s: %d parts from %d on: %w", p.outer, len(fresh), fresh[0], err)
	}
	return nil
}

// sequence returns the numbers first to last-1.
func sequence(first, last uint32) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for n := first; n < last && yield(n); n++ {
		}
	}
}

// unmapPart replaces a part by zero pages.
func (p *Parts[T]) unmapPart(n uint32) error {
	size := len(p.raw) / len(p.there)
	at := unsafe.Pointer(&p.raw[int(n)*size])
	_, err := unix.MmapPtr(-1, 0, at, uintptr(size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	p.there[n] = false
	return err
}

// Drop frees the parts first to last-1.
func (p *Parts[T]) Drop(first, last uint32) (err error) {
	for n := first; n < last; n++ {
		if p.there[n] {
			err = errors.Join(err, p.outer.Delete(n), p.unmapPart(n))
		}
	}
	return err
}

// Wait returns when every currently running program has ended. The kernel waits for this whenever an element of a map
// of maps is replaced (maybe_wait_bpf_programs of kernel/bpf/syscall.c).
func (p *Parts[T]) Wait() error {
	for n, there := range p.there {
		if !there {
			continue
		}
		var part *ebpf.Map
		if err := p.outer.Lookup(uint32(n), &part); err != nil {
			return fmt.Errorf("map %s: part %d: %w", p.outer, n, err)
		}
		defer part.Close()
		if err := p.outer.Put(uint32(n), part); err != nil {
			return fmt.Errorf("map %s: part %d: %w", p.outer, n, err)
		}
		return nil
	}
	return nil
}

// Clear zeroes the parts, for tests that reuse tables.
func (p *Parts[T]) Clear() {
	for n, there := range p.there {
		if each := len(p.raw) / len(p.there); there {
			clear(p.raw[n*each:][:each])
		}
	}
}

// Bytes returns the memory of the parts. It must not run during Add.
func (p *Parts[T]) Bytes() (sum uint64) {
	for _, there := range p.there {
		if there {
			sum += uint64(len(p.raw) / len(p.there))
		}
	}
	return sum
}

func (p *Parts[T]) Close() error {
	if p == nil || p.raw == nil {
		return nil
	}
	raw := p.raw
	p.raw, p.Values = nil, nil
	return unix.Munmap(raw)
}
