// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// cleaner sets large arrays to their initial content, repeatedly.
type cleaner struct {
	mapped   map[*ebpf.Map][]byte        // mapped memory of the maps that allow it
	programs map[*ebpf.Map]*ebpf.Program // programs that set all elements of the other maps to zero
}

func newCleaner() cleaner {
	return cleaner{map[*ebpf.Map][]byte{}, map[*ebpf.Map]*ebpf.Program{}}
}

// memory clears an array that this process can map.
func (c cleaner) memory(m *ebpf.Map) (err error) {
	all := c.mapped[m]
	if all == nil {
		page := os.Getpagesize()
		size := int(m.MaxEntries()) * ((int(m.ValueSize()) + 7) / 8 * 8)
		if all, err = unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
		c.mapped[m] = all
	}
	clear(all)
	return nil
}

// elements clears an array that only the kernel can access. A batch of the bpf system call takes a second for a
// million elements, a program some milliseconds.
func (c cleaner) elements(m *ebpf.Map) (err error) {
	p := c.programs[m]
	if p == nil {
		if p, err = zeroing(m); err != nil {
			return err
		}
		c.programs[m] = p
	}
	_, err = p.Run(&ebpf.RunOptions{Data: make([]byte, 14)})
	return err
}

// zeroing is a program that sets all elements of a map to zero.
func zeroing(m *ebpf.Map) (*ebpf.Program, error) {
	number := &btf.Int{Name: "long", Size: 8, Encoding: btf.Signed}
	function := func(name string, linkage btf.FuncLinkage, params int) *btf.Func {
		p := make([]btf.FuncParam, params)
		for i := range p {
			p[i] = btf.FuncParam{Name: string(rune('a' + i)), Type: number}
		}
		return &btf.Func{Name: name, Type: &btf.FuncProto{Return: number, Params: p}, Linkage: linkage}
	}
	code := asm.Instructions{
		btf.WithFuncMetadata(asm.LoadMapPtr(asm.R1, m.FD()).WithSymbol("zeroing"), function("zeroing", btf.GlobalFunc, 1)),
		asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}.WithReference("element"),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnForEachMapElem.Call(),
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	}
	element := asm.Instructions{asm.Mov.Imm(asm.R0, 0)}
	size := int16(m.ValueSize())
	for at := int16(0); at < size; {
		width := asm.DWord
		if size-at < 8 {
			width = asm.Byte
		}
		element = append(element, asm.StoreMem(asm.R3, at, asm.R0, width))
		at += int16(width.Sizeof())
	}
	element = append(element, asm.Return())
	element[0] = btf.WithFuncMetadata(element[0].WithSymbol("element"), function("element", btf.StaticFunc, 4))
	return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: append(code, element...)})
}

func (c cleaner) close() (err error) {
	for _, all := range c.mapped {
		err = errors.Join(err, unix.Munmap(all))
	}
	for _, p := range c.programs {
		err = errors.Join(err, p.Close())
	}
	return err
}
