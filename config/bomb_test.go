// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
)

// TestAliasBomb: aliases that expand to more values than a file may have are refused early.
func TestAliasBomb(t *testing.T) {
	bomb := "services:\n  - &s {name: x, listen: [" + strings.Repeat("{address: 192.0.2.1, ports: [1]}, ", 200) +
		"], protocol: tcp, mode: dnat, backends: []}\n" + strings.Repeat("  - *s\n", 1000)
	_, err := decode("bomb", []byte(bomb), 10_000)
	errs, ok := err.(Errors)
	if !ok || errs[0].Cause != "too many values when aliases are written out" {
		t.Errorf("%.300v", err)
	}
}

// TestDeepFiles: nested brackets, and similar constructs, are refused in linear time. Quadratic time would be an
// hour.
func TestDeepFiles(t *testing.T) {
	for _, part := range []string{"[", "{", "- ", "{a: ", "? ", "&a ", "|\n", "a: b: ", "[a, ", "- [", "a: [\n"} {
		if _, err := Decode("deep", []byte(strings.Repeat(part, (1<<20)/len(part)))); err == nil {
			t.Errorf("%q repeated was taken", part)
		}
	}
}
