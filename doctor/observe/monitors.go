// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/sluice-lb/sluice/netdev"
)

// exporters are the names, cut to 15 bytes as the kernel does, of programs that export
// counters of connection tracking of the namespace in which they run, and of no other.
var exporters = []string{
	"node_exporter", "prometheus-node", "conntrack_expor", "conntrack-stats", "netdata", "telegraf", "collectd",
	"munin-node",
}

// monitors finds exporters among the processes.
func monitors(root fs.FS) (list []Monitor) {
	names, _ := fs.Glob(root, "proc/[0-9]*/comm")
	for _, path := range names {
		name := strings.TrimSpace(text(root, path))
		if !slices.Contains(exporters, name) {
			continue
		}
		st, err := fs.Stat(root, strings.TrimSuffix(path, "comm")+"ns/net")
		if err != nil {
			continue
		}
		if file, ok := st.Sys().(*syscall.Stat_t); ok {
			list = append(list, Monitor{name, file.Ino, file.Ino == netdev.HostNamespace().Inode})
		}
	}
	return list
}
