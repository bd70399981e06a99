// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/capacity"
)

// proportionalSize returns the proportional set size of a process in bytes.
func proportionalSize(pid int) (uint64, error) {
	file := fmt.Sprintf("/proc/%d/smaps_rollup", pid)
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte("Pss:")); ok {
			kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(string(rest)), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("%s: no Pss", file)
}

// connectionMemory returns the bytes of the gateway's entries in connection tracking and of the BPF maps of a process,
// 0 for none.
func (n *network) connectionMemory(pid int) (uint64, error) {
	entries, err := n.trackedConnections()
	if err != nil || pid == 0 {
		return entries * capacity.EntryBytes(capacity.Extensions{NAT: true}), err
	}
	maps, err := mapMemory(pid)
	return entries*capacity.EntryBytes(capacity.Extensions{NAT: true}) + maps, err
}

// trackedConnections returns the number of connections that the gateway's kernel tracks.
func (n *network) trackedConnections() (entries uint64, err error) {
	const file = "/proc/sys/net/netfilter/nf_conntrack_count"
	err = n.gateway.Do(func() error {
		if !isReadable(file) {
			return nil // without the module there are no entries
		}
		entries, err = strconv.ParseUint(readLine(file), 10, 64)
		return err
	})
	return entries, err
}

// mapMemory returns the memory that the kernel charges for the BPF maps of a process.
func mapMemory(pid int) (sum uint64, err error) {
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{} // a map may have several descriptors
	for _, fd := range fds {
		b, err := os.ReadFile(filepath.Join(dir, fd.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the descriptor was closed during the scan
		}
		if err != nil {
			return 0, err
		}
		of := map[string]string{}
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			of[key] = strings.TrimSpace(value)
		}
		id := of["map_id"]
		if id == "" || seen[id] {
			continue
		}
		seen[id] = true
		bytes, err := strconv.ParseUint(of["memlock"], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("map %s: memlock: %w", id, err)
		}
		sum += bytes
	}
	return sum, nil
}
