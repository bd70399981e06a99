// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/doctor/vitals"
	"github.com/sluice-lb/sluice/trace"
)

// TestIDs wants every check to have a name of its own.
func TestIDs(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Checks() {
		if seen[c.ID] || seen[c.Name] || c.About == "" || c.Run == nil {
			t.Errorf("%s %s: not unique or not complete", c.ID, c.Name)
		}
		seen[c.ID], seen[c.Name] = true, true
	}
	for cause, effects := range consequences {
		for _, id := range append(effects, cause) {
			if !seen[id] {
				t.Errorf("consequences name %s, which is no check", id)
			}
		}
	}
}

// TestForwardingRemedy wants the setting of the family that does not forward.
func TestForwardingRemedy(t *testing.T) {
	for _, tc := range []struct {
		setting string
		make    func(*vitals.Sample)
	}{
		{"net.ipv4.ip_forward=1", func(*vitals.Sample) {}},
		{"net.ipv4.ip_forward=1", dropped(trace.CauseForwardOff, 300)}, // counted by no SNMP counter
		{"net.ipv6.conf.all.forwarding=1", func(s *vitals.Sample) {
			s.Namespaces[0].After.Sysctl["net.ipv4.ip_forward"], s.Namespaces[0].After.Sysctl["net.ipv6.conf.all.forwarding"] = "1", "0"
			forwards(0, 1, 0)(s)
		}},
	} {
		s := examined(t)
		s.Namespaces[0].After.Sysctl["net.ipv4.ip_forward"] = "0"
		if tc.make(s); len(s.Namespaces[0].Drops) > 0 {
			forwards(0, 0, 0)(s)
		}
		for _, f := range Judge(context.Background(), s).Findings {
			if f.Check == "FW01" && (f.Verdict < Info || !strings.Contains(f.Remedy.Do, tc.setting)) {
				t.Errorf("%s: %s %+v, want %s", f.Summary, f.Verdict, f.Remedy, tc.setting)
			}
		}
	}
}
