// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf/asm"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// TestStacksFitLinux61 adds up the stacks of every call chain, as the verifier of Linux 6.1 does: 512 bytes in
// all (MAX_BPF_STACK), each frame in steps of 32. Later kernels accept more, and the emulated machine takes
// minutes to find out. go test -v prints the remaining bytes.
func TestStacksFitLinux61(t *testing.T) {
	spec, err := wire.Spec()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range spec.Programs {
		frames := framesOf(p.Instructions)
		size, chain := frames.deepest(p.Instructions[0].Symbol())
		if size > 512 {
			t.Errorf("%s: %d bytes of stack: %s", name, size, strings.Join(chain, ", "))
		}
		t.Logf("%s: %d bytes left: %s", name, 512-size, strings.Join(chain, ", "))
	}
}

// frames are the functions of a program, by name.
type frames map[string]*frame

type frame struct {
	size  int // bytes of stack
	calls map[string]bool
}

// framesOf returns the stack depth of each function below the frame pointer, and its callees.
func framesOf(list asm.Instructions) frames {
	all := frames{}
	var now *frame
	var top asm.Register // the previous instruction set this register to the frame pointer
	for _, i := range list {
		if name := i.Symbol(); name != "" {
			now = &frame{calls: map[string]bool{}}
			all[name] = now
		}
		if i.IsFunctionReference() {
			now.calls[i.Reference()] = true
		}
		reach := 0
		switch op := i.OpCode; {
		case op.Class().IsLoad() && i.Src == asm.RFP, op.Class().IsStore() && i.Dst == asm.RFP:
			reach = -int(i.Offset)
		case op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && top != asm.RFP && i.Dst == top:
			reach = -int(i.Constant)
		}
		now.size = max(now.size, reach)
		top = asm.RFP
		if i.OpCode.ALUOp() == asm.Mov && i.OpCode.Source() == asm.RegSource && i.Src == asm.RFP {
			top = i.Dst
		}
	}
	return all
}

// deepest returns the call chain from a function with the largest stack.
func (f frames) deepest(name string) (size int, chain []string) {
	own := f[name]
	for callee := range own.calls {
		if s, c := f.deepest(callee); s > size {
			size, chain = s, c
		}
	}
	return size + max(own.size+31, 32)/32*32, append([]string{fmt.Sprintf("%s %d", name, own.size)}, chain...)
}
