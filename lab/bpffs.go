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

// mountDir is the directory in the host's mount namespace where the lab mounts a bpffs for each gateway. Pins in a
// bpffs that a gateway mounts itself would vanish with the gateway's mount namespace.
func (l *Lab) mountDir() string { return filepath.Join(recordDir, l.ID()) }

// mountBPFFS mounts a private bpffs for the node. If the kernel has no bpffs, the node has none.
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

// unmountAll removes the mounts of the lab's gateways.
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

// BPFFS returns the directory of the node's bpffs in the host's mount namespace, or "" if it has none.
func (n *Node) BPFFS() string { return n.bpffs }
