// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pause"
)

// hostSysctlLock is held exclusively while settings of the host are changed, and shared by processes that rely on
// them.
const hostSysctlLock = "/run/lock/sluice-host-sysctl.lock"

// Sysctl writes one setting of the namespace, for example ("net.ipv4.ip_forward", "1").
func (n *Node) Sysctl(key, value string) error {
	return n.Do(func() error { return writeSysctl(key, value) })
}

// HostSysctl changes one setting of the host until [Lab.Down], for settings that are not per namespace. The lab's
// record stores the original value first, so it is restored even after a crash. HostSysctl waits, until ctx ends,
// while another program has changed settings of the host.
func (l *Lab) HostSysctl(ctx context.Context, key, value string) error {
	if l.owner == nil {
		return fmt.Errorf("lab %s: sysctl %s: only the process that made the lab may change the host", l.ID(), key)
	}
	if l.sysctlLock == nil {
		f, err := LockHostSettings(ctx, unix.LOCK_EX)
		if err != nil {
			return fmt.Errorf("lab %s: sysctl %s: %w", l.ID(), key, err)
		}
		l.sysctlLock = f
	}
	if _, known := l.record.HostSysctls[key]; !known {
		if err := l.checkUnclaimed(ctx, key); err != nil {
			return fmt.Errorf("lab %s: sysctl %s: %w", l.ID(), key, err)
		}
		found, err := os.ReadFile(sysctlPath(key))
		if err != nil {
			return fmt.Errorf("lab %s: sysctl %s: %w", l.ID(), key, err)
		}
		if l.record.HostSysctls == nil {
			l.record.HostSysctls = make(map[string]string)
		}
		l.record.HostSysctls[key] = strings.TrimSpace(string(found))
		owner, err := l.record.store(l.owner)
		if err != nil {
			return fmt.Errorf("lab %s: record: %w", l.ID(), err)
		}
		l.owner = owner
	}
	return writeSysctl(key, value)
}

// checkUnclaimed returns an error if another lab has changed the setting without restoring it. Such a lab is detached, or
// its owner was killed and it cannot be swept. The current value is then not the original one.
func (l *Lab) checkUnclaimed(ctx context.Context, key string) error {
	for tries := 20; ; tries-- { // a sweep skips records that another process is reading
		_, err := Sweep()
		records, listed := List()
		if listed != nil {
			return errors.Join(err, listed)
		}
		i := slices.IndexFunc(records, func(r Record) bool { _, changed := r.HostSysctls[key]; return changed && r.ID != l.ID() })
		if i < 0 {
			return nil
		}
		if r := records[i]; tries == 0 || r.Detached {
			return errors.Join(fmt.Errorf("lab %s has changed it and not put %s back: take it down first", r.ID, r.HostSysctls[key]), err)
		}
		if err := pause.For(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// LockHostSettings locks the host's settings: unix.LOCK_EX to change them, unix.LOCK_SH to rely on them. It waits for
// other holders until ctx ends. The lock is released when every process has closed the file.
func LockHostSettings(ctx context.Context, how int) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(hostSysctlLock), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(hostSysctlLock, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", hostSysctlLock, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("another program holds %s and has changed the host's settings for a while: %w", hostSysctlLock, ctx.Err())
		case <-tick.C:
		}
	}
}

// restoreHost restores the host's settings.
func (l *Lab) restoreHost() error {
	var errs []error
	for key, value := range l.record.HostSysctls {
		errs = append(errs, writeSysctl(key, value))
	}
	if err := errors.Join(errs...); err != nil {
		return err // keep the lock: the next holder would take the changed value for the original
	}
	if l.sysctlLock != nil {
		l.sysctlLock.Close()
		l.sysctlLock = nil
	}
	return nil
}

func sysctlPath(key string) string {
	return filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
}

func writeSysctl(key, value string) error {
	if err := os.WriteFile(sysctlPath(key), []byte(value), 0o644); err != nil {
		return fmt.Errorf("sysctl %s = %s: %w", key, value, err)
	}
	return nil
}
