// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestSymbolsReadAgain: what could not be read is not fresh the next time.
func TestSymbolsReadAgain(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c := cachedSymbols{symbols: new(Symbols), read: time.Now()} // from before the program came
	broken := errors.New("not now")
	if _, err := c.recent(func() (*Symbols, error) { return nil, broken }, nil); !errors.Is(err, broken) {
		t.Fatalf("symbols that cannot be read: %v", err)
	}
	want := new(Symbols)
	if got, err := c.recent(func() (*Symbols, error) { return want, nil }, nil); err != nil || got != want {
		t.Errorf("after a failed reading the old symbols are used again: %v", err)
	}
}

// TestRecentSymbols loads a program behind the cache's back: it must be found.
func TestRecentSymbols(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if _, err := recentSymbols(); err != nil {
		t.Fatal(err)
	}
	// The kernel lists programs by their count: while others go, one of the list may be left out.
	labtest.Eventually(t, 10*time.Second, "the symbol of a new program", func() error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "sluice_newcomer", Type: ebpf.SocketFilter, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		if err != nil {
			return err
		}
		defer p.Close()
		info, err := p.Info()
		if err != nil {
			return err
		}
		addrs, ok := info.JitedKsymAddrs()
		if !ok || len(addrs) == 0 {
			t.Skip("the kernel does not compile BPF programs")
		}
		after, err := recentSymbols()
		if err != nil {
			return err
		}
		if got, want := after.Find(uint64(addrs[0])).Name, "bpf_prog_"+info.Tag+"_sluice_newcomer"; got != want {
			return fmt.Errorf("the place of a new program is called %s, want %s", got, want)
		}
		return nil
	})
}
