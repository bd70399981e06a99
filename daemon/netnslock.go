// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// namespaceLock is the name of an abstract Unix socket. Each network namespace has its own abstract names,
// whatever its processes see of the file system: containers on the host's network have the host's. The
// kernel frees the name with the process.
const namespaceLock = "@sluice/gateway"

// answerTime bounds the wait for the text of a holder.
const answerTime = 2 * time.Second

// lockNamespace takes the lock of the network namespace. A process without rights over the network can bind
// the name too: it is reported in the log and does not keep a daemon from starting.
func lockNamespace(name, command string, log *slog.Logger) (io.Closer, error) {
	l, err := net.Listen("unix", name)
	if err == nil {
		go answerHolder(l, fmt.Sprintf("process %d (%s)", os.Getpid(), command))
		return l, nil
	}
	if !errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("lock of the network namespace: %w", err)
	}
	holder, entitled := holderOf(name)
	if !entitled {
		log.Warn("a second daemon in this network namespace would not be noticed: a process that is no gateway has its lock", "holder", holder)
		return nil, nil
	}
	return nil, fmt.Errorf("the lock of this network namespace is held by %s: %w", holder, errHeld)
}

// answerHolder sends a text to each client until the listener is closed.
func answerHolder(l net.Listener, text string) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // for example, no free file descriptor
			continue
		}
		_, _ = io.WriteString(c, text) // the send buffer has room for it
		c.Close()
	}
}

// holderOf describes the process that listens at the name, and reports whether it may be a gateway: it has
// CAP_NET_ADMIN, or is root in a PID namespace that this process does not see.
func holderOf(name string) (text string, entitled bool) {
	const unknown = "another daemon"
	c, err := net.DialTimeout("unix", name, answerTime)
	if err != nil {
		return unknown, !errors.Is(err, syscall.EAGAIN) // a live gateway accepts connections immediately
	}
	defer c.Close()
	var peer *unix.Ucred
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err == nil {
		outer := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		err = errors.Join(err, outer)
	}
	if err != nil {
		return unknown, true
	}
	if peer.Pid == 0 {
		entitled = peer.Uid == 0
	} else {
		entitled = hasNetAdmin(int(peer.Pid))
	}
	_ = c.SetReadDeadline(time.Now().Add(answerTime))
	said, _ := io.ReadAll(io.LimitReader(c, 4096))
	text = strconv.Quote(string(said))
	switch {
	case peer.Pid == 0:
		return "a process of another PID namespace: " + text, entitled
	case !strings.HasPrefix(string(said), "process "):
		return fmt.Sprintf("process %d of user %d", peer.Pid, peer.Uid), entitled
	}
	return fmt.Sprintf("process %d: %s", peer.Pid, text), entitled
}

// hasNetAdmin reports whether a process has CAP_NET_ADMIN. It is true for a process that has just ended.
func hasNetAdmin(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(status)) {
		if value, is := strings.CutPrefix(line, "CapEff:"); is {
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			return err != nil || set&(1<<unix.CAP_NET_ADMIN) != 0
		}
	}
	return true
}
