// SPDX-License-Identifier: Apache-2.0

// Package kernel reads the settings and the clock of the running kernel and says what they mean
// for forwarding. It knows nothing of Sluice's configuration.
package kernel

import (
	"os"
	"path/filepath"
	"strings"
)

// Sysctl reads a setting in the calling thread's network namespace, "" when there is none of that
// name. As in sysctl(8), a dot in the name of an interface is written as a slash.
func Sysctl(key string) string {
	text, _ := os.ReadFile(filepath.Join("/proc/sys", strings.NewReplacer(".", "/", "/", ".").Replace(key)))
	return strings.TrimSpace(string(text))
}
