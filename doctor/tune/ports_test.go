// SPDX-License-Identifier: Apache-2.0

package tune

import "testing"

func TestReservedPorts(t *testing.T) {
	s := fake(t)
	if got := s.reserve([]uint16{8080, 8081, 80, 40000}); got != "8080-8081,9000-9010,40000" {
		t.Errorf("reserved %s", got)
	}
	if got := s.reserve([]uint16{80, 9005}); got != "" {
		t.Errorf("nothing is new, and %s is reserved", got)
	}
}
