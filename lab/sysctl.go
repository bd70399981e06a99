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
)

// hostSysctlLock is held by whoever changes settings of the host for a while, and shared by whoever
// needs them as they are.
const hostSysctlLock = "/run/lock/sluice-host-sysctl.lock"

// Sysctl writes one setting of the namespace, for example ("net.ipv4.ip_forward", "1").
func (n *Node) Sysctl(key, value string) error {
	return n.Do(func() error { return writeSysctl(key, value) })
}

// HostSysctl changes one setting of the host until [Lab.Down], for what has no setting per
// namespace. The value found is stored in the lab's record first, so that it is restored after a
// crash too. While another program holds the host's settings changed, it waits, until ctx ends.
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
		if err := l.unborrowed(ctx, key); err != nil {
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

// unborrowed refuses a setting that another lab has changed and not restored: because who
// held the lock was killed and cannot be swept, or because that lab was detached. What is
// found then is not what is to be restored.
func (l *Lab) unborrowed(ctx context.Context, key string) error {
	for tries := 20; ; tries-- { // a sweep passes over records that somebody reads just then
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
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// LockHostSettings returns the lock of the host's settings once others have let go of it: unix.LOCK_EX to change
// some, unix.LOCK_SH to have them stay. Closing the file, in every process that has it, gives the lock back. An
// error when ctx ends before.
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

// restoreHost gives the host its settings back.
func (l *Lab) restoreHost() error {
	var errs []error
	for key, value := range l.record.HostSysctls {
		errs = append(errs, writeSysctl(key, value))
	}
	if err := errors.Join(errs...); err != nil {
		return err // and the lock stays: the next one would take what is found for the host's own
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
