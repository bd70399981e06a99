// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"testing"
	"testing/fstest"
)

// TestSymbolsBeforePrograms: the search finds functions of the kernel, and stops before the symbols of BPF programs.
func TestSymbolsBeforePrograms(t *testing.T) {
	root := fstest.MapFS{"proc/kallsyms": {Data: []byte("ffffffff81000000 T register_kprobe\n" +
		"ffffffffc0000000 t nf_flow_table_init_net\t[nf_flow_table]\n" +
		"ffffffffc0010000 t bpf_prog_6deef7357e7b4530_sluice_tc\t[bpf]\n" +
		"ffffffffc0020000 t bpf_nf_link_attach\n")}}
	found, err := readSymbols(root)
	if err != nil || !found[SymbolKprobes] || found[symbolFlowtables] || found[SymbolBPFNetfilter] {
		t.Errorf("found %v: %v", found, err)
	}
}
