// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// Options of a datapath. The zero value is what a gateway uses.
type Options struct {
	// Dir is where maps and links are pinned, on a bpffs; empty:
	// /sys/fs/bpf/sluice, or a bpffs mounted at StateDir/bpf when that is none.
	Dir string
	// StateDir is the gateway's directory; empty: /run/sluice.
	StateDir string
	// NoAttach loads everything but attaches no program: for tests that run
	// packets through Program.
	NoAttach bool
	// RouteEveryPacket asks the routing table for the next hop of every packet
	// instead of remembering it: to measure what that gains, and for nothing else.
	RouteEveryPacket bool
	// FullPath keeps packets off the straight path of settled flows: for tests
	// that hold the two against each other.
	FullPath bool
	// Log of what happens between Applies; nil: slog.Default().
	Log *slog.Logger
}

// Datapath carries services and rules by XDP and TC programs in one network
// namespace.
type Datapath struct {
	opt     Options
	ns      netns.NsHandle
	dir     string
	mounted string // bpffs that this process mounted, "" for none
	hz      uint32

	// mu serialises Plan, Apply and Remove, and protects what follows.
	mu       sync.Mutex
	t        *tables          // nil before the first Apply
	programs *ebpf.Collection // in force
	switches switches
	inForce  *desired
	snapshot *datapath.Snapshot
	regions  map[uint32]region // of services in the slots map
	attached map[string]*attachment
	stop     context.CancelFunc // of the watcher
	watching sync.WaitGroup
	missed   atomic.Uint64                         // events that could not be handled
	logs     atomic.Pointer[map[uint32]config.Log] // of services by id, for the reader of events
}

var (
	_ datapath.Datapath = (*Datapath)(nil)
)

// Open opens the datapath of the network namespace of the calling thread. It
// changes nothing before the first Apply.
func Open(opt Options) (*Datapath, error) {
	if opt.Log == nil {
		opt.Log = slog.Default()
	}
	if opt.StateDir == "" {
		opt.StateDir = "/run/sluice"
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("ebpf: %w", err)
	}
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("ebpf: network namespace: %w", err)
	}
	hz, err := measureHz()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	return &Datapath{opt: opt, ns: ns, hz: hz, regions: map[uint32]region{}, attached: map[string]*attachment{}}, nil
}

// Name returns "ebpf".
func (d *Datapath) Name() string { return "ebpf" }

// inside runs f in the datapath's network namespace.
func (d *Datapath) inside(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer here.Close()
	if here.Equal(d.ns) {
		return f()
	}
	if err := netns.Set(d.ns); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer func() {
		if err := netns.Set(here); err != nil {
			panic(fmt.Sprintf("cannot return to the network namespace: %v", err)) // the thread must not go on elsewhere
		}
	}()
	return f()
}

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
}

// pinDir finds or mounts the bpffs that maps and links are pinned in.
func (d *Datapath) pinDir() (string, error) {
	if d.opt.Dir != "" {
		return d.opt.Dir, nil
	}
	if isBPFFS("/sys/fs/bpf") {
		var st unix.Stat_t
		if err := unix.Fstat(int(d.ns), &st); err != nil {
			return "", fmt.Errorf("network namespace: %w", err)
		}
		return fmt.Sprintf("/sys/fs/bpf/sluice/%d", st.Ino), nil
	}
	dir := filepath.Join(d.opt.StateDir, "bpf")
	if !isBPFFS(dir) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", fmt.Errorf("bpffs: %w", err)
		}
		if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return "", fmt.Errorf("bpffs: mount %s: %w", dir, err)
		}
		d.mounted = dir
	}
	return filepath.Join(dir, "sluice"), nil
}

// Close lets go of the kernel objects: pinned maps, links and the timer live on,
// and traffic with them.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.release(), d.ns.Close())
}

func (d *Datapath) release() (err error) {
	if d.stop != nil {
		d.stop()
		d.watching.Wait()
		d.stop = nil
	}
	for name, a := range d.attached {
		err = errors.Join(err, a.close())
		delete(d.attached, name)
	}
	if d.programs != nil {
		d.programs.Close()
		d.programs = nil
	}
	if d.t != nil {
		err = errors.Join(err, d.t.close())
		d.t = nil
	}
	d.inForce, d.snapshot = nil, nil
	return err
}

// Remove detaches the programs and removes maps and pins.
func (d *Datapath) Remove(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inside(func() error {
		if d.dir == "" {
			dir, err := d.pinDir()
			if err != nil {
				return err
			}
			d.dir = dir
		}
		err := d.detachAll()
		if d.programs != nil {
			_, stopped := d.programs.Programs["sweep_stop"].Run(&ebpf.RunOptions{Context: make([]byte, 8)})
			err = errors.Join(err, stopped)
		}
		err = errors.Join(err, d.release(), os.RemoveAll(d.dir))
		if parent := filepath.Dir(d.dir); filepath.Base(parent) == "sluice" {
			os.Remove(parent) // when no other namespace has anything there
		}
		if d.mounted != "" {
			err = errors.Join(err, unix.Unmount(d.mounted, 0), os.Remove(d.mounted))
			d.mounted = ""
		}
		d.dir = ""
		return err
	})
}

// Program returns the loaded program of a hook ("xdp" or "tc"), for tests and
// benchmarks that run packets through it. Valid until the next Apply.
func (d *Datapath) Program(hook string) *ebpf.Program {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.programs == nil {
		return nil
	}
	return d.programs.Programs["sluice_"+hook]
}
