// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mountDir is where the lab mounts a bpffs for each gateway, in the host's mount namespace: pins
// in one that a gateway mounts for itself end with the gateway's own mount namespace.
func (l *Lab) mountDir() string { return filepath.Join(recordDir, l.ID()) }

// mountBPFFS gives the node a bpffs of its own. On a kernel without one the node goes without.
func (l *Lab) mountBPFFS(n *Node) error {
	dir := filepath.Join(l.mountDir(), n.spec.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	if errors.Is(err, unix.ENODEV) {
		return os.Remove(dir)
	}
	if err != nil {
		return fmt.Errorf("node %s: mount a bpffs: %w", n.spec.Name, err)
	}
	n.bpffs = dir
	return nil
}

// unmountAll removes what was mounted for the lab's gateways.
func (l *Lab) unmountAll() error {
	entries, err := os.ReadDir(l.mountDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := filepath.Join(l.mountDir(), e.Name())
		if isBPFFS(dir) {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", dir, err)
			}
		}
		if err := os.Remove(dir); err != nil {
			return err
		}
	}
	for _, n := range l.nodes {
		n.bpffs = ""
	}
	return os.Remove(l.mountDir())
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

// BPFFS returns the directory, in the host's mount namespace, of the bpffs that is
// the node's own; "" when it has none.
func (n *Node) BPFFS() string { return n.bpffs }
