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

func (l *Lab) unmountBPFFS(n *Node) error {
	dir := filepath.Join(l.mountDir(), n.spec.Name)
	if isBPFFS(dir) {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("node %s: unmount %s: %w", n.spec.Name, dir, err)
		}
	}
	n.bpffs = ""
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("node %s: %w", n.spec.Name, err)
	}
	return nil
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}
