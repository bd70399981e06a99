// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"testing"

	"github.com/cilium/ebpf"
)

// TestMapMemory bounds the maps' part of the memory of a doctor. The reader's memory holds a ring twice. The test counts
// one copy of a map for each CPU.
func TestMapMemory(t *testing.T) {
	const (
		mostMapped = 10 << 20
		mostKernel = 6 << 20
	)
	var mapped, kernel uint64
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"drops": dropsSpec, "losses": loadLosses, "observe": loadObserve, "ports": loadPorts} {
		spec, err := load()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, m := range spec.Maps {
			size := uint64(m.MaxEntries)
			if m.Type == ebpf.RingBuf {
				mapped += 2 * size
			} else {
				size *= uint64(m.KeySize + m.ValueSize)
			}
			kernel += size
			t.Logf("%s %s: %d bytes", name, m.Name, size)
		}
	}
	if mapped > mostMapped || kernel > mostKernel {
		t.Errorf("rings take %d bytes of the reader's memory, maps %d bytes of the kernel's; want at most %d and %d", mapped, kernel, mostMapped, mostKernel)
	}
}
