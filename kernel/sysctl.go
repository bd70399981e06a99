// SPDX-License-Identifier: Apache-2.0

// Package kernel reads the settings and the clock of the running kernel and explains their effect on forwarding. It
// is independent of Sluice's configuration.
package kernel

import (
	"os"
	"path/filepath"
	"strings"
)

// Sysctl reads a setting in the calling thread's network namespace, or "" if it does not exist. As in sysctl(8), a
// dot in an interface name is written as a slash.
func Sysctl(key string) string {
	text, _ := os.ReadFile(filepath.Join("/proc/sys", strings.NewReplacer(".", "/", "/", ".").Replace(key)))
	return strings.TrimSpace(string(text))
}
