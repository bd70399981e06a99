// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestSymbolsEndBeforePrograms: the slow part of the kernel's list is not read, and an address far behind the
// last function does not get its name.
func TestSymbolsEndBeforePrograms(t *testing.T) {
	s, err := ReadSymbols(strings.NewReader("ffffffff81000000 T nf_hook_slow\nffffffffc0000000 t nf_nat_init\t[nf_nat]\n" +
		"ffffffffc0800000 t bpf_prog_0123456789abcdef_xdp\t[bpf]\nffffffffc0000100 t not_read\t[bpf]\n"))
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[uint64]string{
		0xffffffff81000010: "nf_hook_slow", 0xffffffffc0000200: "nf_nat_init", 0xffffffffc0800010: "0xffffffffc0800010", 0xffffffff80000000: "0xffffffff80000000",
	} {
		if got := s.Find(address).Name; got != want {
			t.Errorf("%#x is called %s, want %s", address, got, want)
		}
	}
}

// TestHiddenSymbolsEndBeforePrograms: the slow part is not read without access to addresses either.
func TestHiddenSymbolsEndBeforePrograms(t *testing.T) {
	read := 0
	_, err := ReadSymbols(lines(func() (string, bool) {
		read++
		return []string{"0000000000000000 T nf_hook_slow\n", "0000000000000000 t bpf_prog_0123456789abcdef_xdp\t[bpf]\n"}[min(read, 2)-1], read < 100
	}))
	if !errors.Is(err, ErrHiddenSymbols) || read > 3 {
		t.Errorf("%d lines are read: %v", read, err)
	}
}

// lines is a reader that returns one line per read.
type lines func() (string, bool)

func (l lines) Read(b []byte) (int, error) {
	line, more := l()
	if !more {
		return 0, io.EOF
	}
	return copy(b, line), nil
}

// TestProgramsAreNamed loads a program of two functions: each is found by its name.
func TestProgramsAreNamed(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	number := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	function := func(name string) *btf.Func {
		return &btf.Func{Name: name, Type: &btf.FuncProto{Return: number}, Linkage: btf.StaticFunc}
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "sluice_newcomer", Type: ebpf.SocketFilter, License: "GPL", Instructions: asm.Instructions{
		btf.WithFuncMetadata(asm.Call.Label("inner").WithSymbol("outer_function"), function("outer_function")),
		asm.Return(),
		btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0).WithSymbol("inner"), function("inner")),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	addrs, ok := info.JitedKsymAddrs()
	if !ok || len(addrs) == 0 {
		labtest.Lacks(t, "the kernel does not compile BPF programs")
	}
	loaded := loadedPrograms()
	for i, name := range []string{"outer_function", "inner"} {
		want := Symbol{"bpf_prog_" + info.Tag + "_" + name, 1}
		if got, ok := loaded.find(uint64(addrs[i]) + 1); !ok || got != want {
			t.Errorf("function %d is at %v, %v, want %v", i, got, ok, want)
		}
	}
	if got, ok := loaded.find(1); ok {
		t.Errorf("address 1 is %v", got)
	}
}
