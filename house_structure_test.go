// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"regexp"
	"strings"
	"testing"
)

// TestNoForwardDeclarations: a header of bpf/ includes the definitions that it uses, so that the includes are the only
// order of reading.
func TestNoForwardDeclarations(t *testing.T) {
	declaration := regexp.MustCompile(`(?m)^[a-z_][\w *]*\w\([^{};=#]*\);$`)
	for _, ext := range []string{".c", ".h"} {
		walk(t, ext, func(path string, text []byte) {
			for _, found := range declaration.FindAllString(string(text), -1) {
				if !regexp.MustCompile(`^(extern|_Static_assert)\b|__attribute__`).MatchString(found) && !generated(text) {
					t.Errorf("%s declares a function without its body: include the file that defines it: %s", path, strings.TrimSpace(found))
				}
			}
		})
	}
}
