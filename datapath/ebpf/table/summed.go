// SPDX-License-Identifier: Apache-2.0

package table

import (
	"sync"

	"github.com/cilium/ebpf/btf"
)

// ipSummedOffset is the bit offset of ip_summed in the running kernel's struct sk_buff, if TC programs may read it (Linux
// 6.2 and BTF); otherwise 0.
var ipSummedOffset = sync.OnceValue(func() uint32 {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return 0
	}
	var cast *btf.Func
	var skb *btf.Struct
	if kernel.TypeByName("bpf_cast_to_kern_ctx", &cast) != nil || kernel.TypeByName("sk_buff", &skb) != nil {
		return 0
	}
	at, ok := memberAt(skb.Members, "ip_summed")
	if !ok {
		return 0
	}
	return uint32(at)
})

// memberAt finds a member by name, also in unnamed structures and unions.
func memberAt(members []btf.Member, name string) (btf.Bits, bool) {
	for _, m := range members {
		if m.Name == name {
			return m.Offset, true
		}
		if m.Name != "" {
			continue
		}
		var inner []btf.Member
		switch t := btf.UnderlyingType(m.Type).(type) {
		case *btf.Struct:
			inner = t.Members
		case *btf.Union:
			inner = t.Members
		}
		if at, ok := memberAt(inner, name); ok {
			return m.Offset + at, true
		}
	}
	return 0, false
}
