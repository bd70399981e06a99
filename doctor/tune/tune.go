// SPDX-License-Identifier: Apache-2.0

// Package tune sets the kernel's network settings for a role or a load, keeps a journal of the
// previous values, and restores them exactly.
//
// It computes a Proposal from a profile, writes it live, reads every value back,
// watches the drop counters for a trial and takes everything back when they
// rise. Only a trial that was passed is written to /etc/sysctl.d: a host that
// hangs or is rebooted in the meantime comes back as it was. It refuses
// timeouts below the floors of the RFCs unless forced, never lowers a size, and
// touches neither CPU mitigations nor offloads nor MTUs.
package tune

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/netdev"
)

// System is where settings are read and written. The zero value is the running
// host, in the caller's network namespace.
type System struct {
	// Proc is the directory of the settings; default /proc/sys.
	Proc string
	// Etc is where settings are kept for the next boot; default /etc/sysctl.d.
	// Only the host's own namespace has a next boot.
	Etc string
	// Dir holds the journal; default /var/lib/sluice/tune.
	Dir string
	// Namespace in which settings are read and written.
	Namespace netdev.Namespace
	// Program runs the commands of this program; default the running one.
	Program string
	// Memory and Cores of the host; 0 reads them from the system.
	Memory capacity.Bytes
	Cores  int

	between func() // for tests: called between two readings of the sockets
}

// FileName is the name of the file in Etc. It sorts late, so that few other
// files override it.
const FileName = "99-sluice-tune.conf"

func (s *System) proc() string {
	if s.Proc == "" {
		return "/proc/sys"
	}
	return s.Proc
}

func (s *System) file() string {
	if s.Etc == "" {
		return filepath.Join("/etc/sysctl.d", FileName)
	}
	return filepath.Join(s.Etc, FileName)
}

func (s *System) dir() string {
	if s.Dir == "" {
		return "/var/lib/sluice/tune"
	}
	return s.Dir
}

// persistent reports whether settings of the namespace survive a reboot.
func (s *System) persistent() bool {
	return s.host() || s.Namespace == netdev.Namespace{}
}

func (s *System) host() bool { return s.Namespace.Name == "host" }

// keySeparators exchanges dots and slashes, as sysctl does: the key of eth0.7 has eth0/7.
var keySeparators = strings.NewReplacer(".", "/", "/", ".")

// path returns the file of a key such as net.ipv4.ip_forward.
func (s *System) path(key string) string {
	return filepath.Join(s.proc(), keySeparators.Replace(key))
}

// errHostWide says that a key rules the whole host and cannot be written from
// the namespace.
var errHostWide = errors.New("rules the whole host: it can be written only in the host's first network namespace")

// Get reads the value of a key, without the newline.
func (s *System) Get(key string) (value string, err error) {
	err = s.Namespace.Do(func() error {
		b, err := os.ReadFile(s.path(key))
		value = strings.TrimRight(string(b), "\n")
		return err
	})
	if err != nil {
		return "", fmt.Errorf("%s: %w", key, err)
	}
	return value, nil
}

// Set writes the value of a key.
func (s *System) Set(key, value string) error {
	err := s.Namespace.Do(func() error {
		f, err := os.OpenFile(s.path(key), os.O_WRONLY|os.O_TRUNC, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value + "\n")
		return errors.Join(err, f.Close())
	})
	if err != nil {
		return fmt.Errorf("%s = %s: %w", key, value, err)
	}
	return nil
}

// writable reports whether the key is there and may be written from here.
func (s *System) writable(key string) error {
	return s.Namespace.Do(func() error {
		st, err := os.Stat(s.path(key))
		switch {
		case errors.Is(err, fs.ErrNotExist) && !s.persistent() && hostWide(key):
			return errHostWide
		case err != nil:
			return err
		case st.Mode()&0o200 == 0:
			return errHostWide
		}
		return nil
	})
}

// hostWide reports whether a key exists in the host's first namespace only.
func hostWide(key string) bool {
	switch {
	case strings.HasPrefix(key, "net.core.netdev_"), strings.Contains(key, ".neigh.default.gc_thresh"):
		return true
	}
	return key == "net.netfilter.nf_conntrack_max" || key == "net.netfilter.nf_conntrack_buckets"
}

// machine fills Memory and Cores.
func (s *System) machine() (capacity.Host, error) {
	h := capacity.Host{Memory: s.Memory, Cores: s.Cores}
	if h.Cores == 0 {
		h.Cores = runtime.NumCPU()
	}
	if h.Memory != 0 {
		return h, nil
	}
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return h, fmt.Errorf("memory of the host: %w", err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemTotal:"); ok {
			kib, err := strconv.ParseUint(strings.Fields(rest)[0], 10, 64)
			h.Memory = capacity.Bytes(kib) * capacity.KiB
			return h, err
		}
	}
	return h, errors.New("memory of the host: /proc/meminfo names no MemTotal")
}

// number reads a key as a number; 0 when it is absent or no number.
func (s *System) number(key string) uint64 {
	v, err := s.Get(key)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(v), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// same compares two values the way the kernel reads them: by their words.
func same(a, b string) bool {
	return strings.Join(strings.Fields(a), " ") == strings.Join(strings.Fields(b), " ")
}
