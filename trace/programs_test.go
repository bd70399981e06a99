// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// TestProbesAreTracepoints expects the probes of drops and profile to be tracepoints and perf events: kprobes
// may be disabled or forbidden, and cost more.
func TestProbesAreTracepoints(t *testing.T) {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"drops": loadDrops, "losses": loadLosses, "observe": loadObserve, "profile": loadProfile} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		if len(spec.Programs) == 0 {
			t.Errorf("%s has no programs", name)
		}
		for _, p := range spec.Programs {
			switch section, _, _ := strings.Cut(p.SectionName, "/"); {
			case section == "tp_btf" && p.Type == ebpf.Tracing && p.AttachType == ebpf.AttachTraceRawTp:
			case section == "raw_tp" && p.Type == ebpf.RawTracepoint:
			case section == "perf_event" && p.Type == ebpf.PerfEvent:
			default:
				t.Errorf("%s: program %s is of section %s, type %s, %s", name, p.Name, p.SectionName, p.Type, p.AttachType)
			}
		}
	}
}
