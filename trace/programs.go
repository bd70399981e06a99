// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"slices"

	"github.com/cilium/ebpf"
)

// programs finds the function of a BPF program that holds an address, as they were loaded when it was made.
type programs struct {
	functions []programFunction // sorted by address
	names     map[ebpf.ProgramID][]string
}

type programFunction struct {
	start, end uint64
	program    ebpf.ProgramID
	number     int    // Within the program.
	name       string // of the program: tag and name
}

// loadedPrograms asks for all programs, one after the other. Without the right to ask there are none.
func loadedPrograms() *programs {
	p := &programs{names: map[ebpf.ProgramID][]string{}}
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if err != nil {
			break
		}
		id = next
		if program, err := ebpf.NewProgramFromID(id); err == nil { // otherwise the program was unloaded in the meantime
			p.add(id, program)
			program.Close()
		}
	}
	slices.SortFunc(p.functions, func(a, b programFunction) int { return cmp.Compare(a.start, b.start) })
	return p
}

func (p *programs) add(id ebpf.ProgramID, program *ebpf.Program) {
	info, err := program.Info()
	if err != nil {
		return
	}
	starts, _ := info.JitedKsymAddrs()
	sizes, _ := info.JitedFuncLens()
	for i := range min(len(starts), len(sizes)) {
		p.functions = append(p.functions, programFunction{uint64(starts[i]), uint64(starts[i]) + uint64(sizes[i]), id, i, "bpf_prog_" + info.Tag + "_" + info.Name})
	}
}

// find names the place as /proc/kallsyms does, but with the tag of the whole program.
func (p *programs) find(address uint64) (Symbol, bool) {
	if p == nil {
		return Symbol{}, false
	}
	i, exact := slices.BinarySearchFunc(p.functions, address, func(f programFunction, a uint64) int { return cmp.Compare(f.start, a) })
	if !exact {
		i--
	}
	if i < 0 || address >= p.functions[i].end {
		return Symbol{}, false
	}
	f := &p.functions[i]
	at := Symbol{Name: f.name, Offset: address - f.start}
	names, known := p.names[f.program]
	if !known {
		names = functionNames(f.program)
		p.names[f.program] = names
	}
	if f.number < len(names) {
		at.Name = f.name[:len("bpf_prog_")+16] + "_" + names[f.number]
	}
	return at, true
}

// functionNames lists the functions of a program in their order; nil where the program is gone or has no type information.
func functionNames(id ebpf.ProgramID) (names []string) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return nil
	}
	functions, err := info.FuncInfos()
	if err != nil {
		return nil
	}
	for _, f := range functions {
		names = append(names, f.Func.Name)
	}
	return names
}
