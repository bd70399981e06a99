// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"strings"
	"testing"
)

// TestCaseStudy: the page has the case study of a machine. A run that the report lacks is shown as not measured.
func TestCaseStudy(t *testing.T) {
	s := newSite(t)
	s.measure("", "Z80", 4, 4)
	s.write("explained.yaml", "flows: {nft DSR / nft DNAT: {why: the links are veth.}}\n")
	s.write(caseStudyFile, `{"server": "a container", "runs": [{"name": "before", "requests_per_second": 2000, "complete": 30000},
		{"name": "collapse", "requests_per_second": 20, "complete": 1000, "conntrack_drops": 35000}], "identity": {"conntrack_drop": 35000, "drop_events": 34999, "syns_refused": 35000}}`)
	page, err := s.written()
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{
		"Measured on Z80 with a container:", "| published by Docker | 2,000 | 1.000 | 6,576 | 1.000 | 30,000 | 0 |",
		"| published by Docker, table of 1,000 | 20 | 0.010 | 76 | 0.012 | 1,000 | 35,000 |", "| published by Docker, tuned | not measured |",
		"35,000 by the kernel's counter, 34,999 by `sluice drops`, 35,000 by both ends",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is missing in\n%s", want, page)
		}
	}
	s.write(caseStudyFile, `{"runs": []}`)
	if _, err := s.written(); err == nil || !strings.Contains(err.Error(), "no rate before the collapse") {
		t.Errorf("an empty report is accepted: %v", err)
	}
}
