// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// termGrace is the time for processes in a namespace to exit after SIGTERM, so that a gateway can remove its rules
// and pins. killGrace follows SIGKILL: on a busy machine the kernel waits for grace periods of seconds.
const termGrace, killGrace = 2 * time.Second, time.Minute

// endProcesses ends every process in the namespaces except this one.
func endProcesses(paths []string) error {
	inodes := make(map[uint64]bool)
	for _, p := range paths {
		if ino, ok := namespaceInode(p); ok {
			inodes[ino] = true
		}
	}
	if len(inodes) == 0 {
		return nil
	}
	for _, step := range []struct {
		sig  unix.Signal
		wait time.Duration
	}{{unix.SIGTERM, termGrace}, {unix.SIGKILL, killGrace}} {
		fds, err := openProcessesIn(inodes)
		if err != nil {
			return err
		}
		if len(fds) == 0 {
			return nil
		}
		for _, fd := range fds {
			// ESRCH: already exited.
			if err := unix.PidfdSendSignal(fd, step.sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				closeAll(fds)
				return fmt.Errorf("signal a process of the lab: %w", err)
			}
		}
		waitExit(fds, step.wait)
		closeAll(fds)
	}
	left, err := openProcessesIn(inodes)
	if err != nil {
		return err
	}
	closeAll(left)
	if len(left) > 0 {
		return fmt.Errorf("%d processes of the lab survive SIGKILL", len(left))
	}
	return nil
}

// openProcessesIn returns a pidfd for each process in one of the network namespaces. It checks the namespace again
// after opening the pidfd, so that a reused process ID is not killed.
func openProcessesIn(inodes map[uint64]bool) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var fds []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		path := filepath.Join("/proc", e.Name(), "ns/net")
		if ino, ok := namespaceInode(path); !ok || !inodes[ino] {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // the process exited in the meantime
		}
		if ino, ok := namespaceInode(path); !ok || !inodes[ino] {
			unix.Close(fd)
			continue
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// waitExit returns when all processes have exited, or after d.
func waitExit(pidfds []int, d time.Duration) {
	deadline := time.Now().Add(d)
	for _, fd := range pidfds {
		for {
			left := time.Until(deadline)
			if left <= 0 {
				return
			}
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, int(left.Milliseconds())+1)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if n > 0 || err != nil {
				break
			}
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// namespaceInode returns the inode of a network namespace. All namespaces are on one device (nsfs), so the inode
// alone identifies them.
func namespaceInode(path string) (uint64, bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, false
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil || fs.Type != unix.NSFS_MAGIC {
		return 0, false
	}
	return st.Ino, true
}
