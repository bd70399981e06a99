// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// caller runs programs on frames and reads elements of maps, millions of times. Package ebpf allocates for each
// call, encodes contexts by reflection, and masks signals.
type caller struct {
	attr [16]uint64 // union bpf_attr
	xdp  xdpContext
	skb  skbMeta
	key  uint32
	out  []byte // output frame of a program; valid until the next call
}

// room returns a buffer for the output of a program for a frame of n bytes.
func (c *caller) room(n int) []byte {
	if len(c.out) < n+512 {
		c.out = make([]byte, 2*n+2048)
	}
	return c.out[:n+512]
}

func (c *caller) call(command uintptr, size uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(&c.attr)), size); errno != 0 {
		return errno
	}
	return nil
}

// run is ebpf.Program.Run. Before Linux 5.13, the kernel may report a pending signal after one run in place of
// the verdict.
func (c *caller) run(p *ebpf.Program, o *ebpf.RunOptions) (uint32, error) {
	var context unsafe.Pointer
	var size uintptr
	switch x := o.Context.(type) {
	case xdpContext:
		c.xdp = x
		context, size = unsafe.Pointer(&c.xdp), unsafe.Sizeof(c.xdp)
	case skbMeta:
		c.skb = x
		context, size = unsafe.Pointer(&c.skb), unsafe.Sizeof(c.skb)
	default:
		return 0, fmt.Errorf("context %T", x)
	}
	if len(o.Data) == 0 || len(o.DataOut) == 0 {
		return 0, errors.New("no frame")
	}
	word := func(low, high uint32) uint64 { return uint64(low) | uint64(high)<<32 }
	c.attr = [16]uint64{
		word(uint32(p.FD()), 0), // the verdict, written by the kernel
		word(uint32(len(o.Data)), uint32(len(o.DataOut))),
		uint64(uintptr(unsafe.Pointer(&o.Data[0]))),
		uint64(uintptr(unsafe.Pointer(&o.DataOut[0]))),
		word(1, 0), // number of runs, and their duration
		word(uint32(size), 0),
		uint64(uintptr(context)),
		0,
		word(o.Flags, 0),
	}
	err := c.call(unix.BPF_PROG_TEST_RUN, 80)
	runtime.KeepAlive(o)
	runtime.KeepAlive(p)
	if err != nil {
		return 0, err
	}
	o.DataOut = o.DataOut[:c.attr[1]>>32]
	return uint32(c.attr[0] >> 32), nil
}

// element reads an element of an array into value, which has room for every CPU.
func element[T any](c *caller, m *ebpf.Map, key uint32, value *T) error {
	c.key = key
	c.attr = [16]uint64{uint64(m.FD()), uint64(uintptr(unsafe.Pointer(&c.key))), uint64(uintptr(unsafe.Pointer(value)))}
	err := c.call(unix.BPF_MAP_LOOKUP_ELEM, 32)
	runtime.KeepAlive(value)
	runtime.KeepAlive(m)
	return err
}
