// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// reasonPrefix is what the kernel puts before the name of a drop reason.
const reasonPrefix = "SKB_DROP_REASON_"

// subsystemShift: the upper half of a reason names a subsystem with a list of
// its own (SKB_DROP_REASON_SUBSYS_SHIFT, since 6.4).
const subsystemShift = 16

// Reasons decodes drop reasons with the running kernel's own list: the numbers
// have changed several times between releases.
type Reasons struct {
	names      map[uint32]string
	subsystems map[uint32]string
}

// LoadReasons reads the list of drop reasons from the kernel's BTF.
func LoadReasons(kernel *btf.Spec) (*Reasons, error) {
	var reasons *btf.Enum
	if err := kernel.TypeByName("skb_drop_reason", &reasons); err != nil {
		return nil, fmt.Errorf("drop reasons: enum skb_drop_reason: %w", err)
	}
	r := &Reasons{names: map[uint32]string{}, subsystems: map[uint32]string{}}
	for _, v := range reasons.Values {
		if v.Name == "SKB_DROP_REASON_SUBSYS_MASK" || v.Name == "SKB_DROP_REASON_MAX" {
			continue
		}
		r.names[uint32(v.Value)] = strings.TrimPrefix(v.Name, reasonPrefix)
	}
	var subsystems *btf.Enum
	if kernel.TypeByName("skb_drop_reason_subsys", &subsystems) == nil {
		for _, v := range subsystems.Values {
			r.subsystems[uint32(v.Value)] = strings.TrimPrefix(v.Name, reasonPrefix+"SUBSYS_")
		}
	}
	return r, nil
}

// Name returns the reason's name without the common prefix; a number that the
// kernel's list does not have is shown as such. It works on nil.
func (r *Reasons) Name(reason uint32) string {
	if r == nil {
		return fmt.Sprintf("reason %d", reason)
	}
	if name, ok := r.names[reason]; ok {
		return name
	}
	if sub, ok := r.subsystems[reason>>subsystemShift]; ok && reason>>subsystemShift != 0 {
		return fmt.Sprintf("%s %d", sub, reason&(1<<subsystemShift-1))
	}
	return fmt.Sprintf("reason %d", reason)
}

// Number returns the number of a drop reason; ok is false if this kernel does not have the reason.
func (r *Reasons) Number(name string) (number uint32, ok bool) {
	if r == nil {
		return 0, false
	}
	for n, s := range r.names {
		if s == name {
			return n, true
		}
	}
	return 0, false
}
