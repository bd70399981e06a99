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

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netns"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/netdev"
)

// Options of a datapath. The zero value is what a gateway uses.
type Options struct {
	// Dir is where maps and links are pinned, on a bpffs; empty: a directory for
	// the network namespace in /sys/fs/bpf/sluice, or a bpffs mounted at
	// StateDir/bpf when /sys/fs/bpf is none.
	Dir string
	// StateDir is the gateway's directory; empty: /run/sluice.
	StateDir string
	// NoAttach loads everything but attaches no program: for tests that run
	// packets through Program.
	NoAttach bool
	// RouteEveryPacket asks the routing table for the next hop of every packet
	// instead of remembering it: to measure what that gains, and for nothing else.
	RouteEveryPacket bool
	// NoTCX attaches to TC by filters, as on kernels before 6.6: for tests.
	NoTCX bool
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
	cookie  uint64         // of the namespace; never used again
	changes *netdev.Polled // whether placing is out of date
	dir     string
	mounted string // bpffs of the state directory that the pins are in, "" for none
	// fleeting is why that one could only be mounted where it ends with this
	// process; nil when it did not have to.
	fleeting error
	hz       uint32

	growing sync.Mutex            // held while programs changes, and while a flow table grows
	stunted atomic.Pointer[error] // why a flow table did not grow; of nil when it did

	// mu serialises Plan, Apply and Remove, and protects what follows.
	mu          sync.Mutex
	t           *table.Tables    // nil before the first Apply
	nothingLeft bool             // an earlier process left no tables; looked up for the first snapshot without anything
	programs    *ebpf.Collection // in force
	switches    wire.Switches
	inForce     *compile.Desired
	snapshot    *datapath.Snapshot
	lastHost    *compile.Host               // when inForce was made
	placing     *compile.Host               // as it was when a service was placed; nil where it was not read
	appliedHost *compile.Host               // that inForce was made for: lastHost, and what has gone since the configuration came
	mismatch    error                       // why the configuration does not match lastHost; nil when it does
	settled     bool                        // the kernel holds inForce: it was read back
	uses        compile.Uses                // of inForce, once asked for
	regions     map[uint32]table.Region     // of services in the slots map
	onDemand    map[string]*ebpf.Collection // programs that are loaded when one is to run, by name
	attached    map[attachPoint]*attachment
	without     map[int]error // why interfaces that came later, by index, have no program
	near        neighbours
	stop        context.CancelFunc // of the watcher
	changed     func()             // tells who holds packets that the programs have
	watching    sync.WaitGroup
	missed      atomic.Uint64                         // events that could not be handled
	logs        atomic.Pointer[map[uint32]config.Log] // of services by id, for the reader of events
	// sourceNames are those of the rules in force, for the log.
	sourceNames atomic.Pointer[map[uint32]string]
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
		return nil, fmt.Errorf("ebpf: %w; run as root, or with CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON, and a bpffs at /sys/fs/bpf or CAP_SYS_ADMIN", err)
	}
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("ebpf: network namespace: %w", err)
	}
	cookie, err := netdev.NamespaceCookie()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: network namespace: %w", err), ns.Close())
	}
	hz, err := table.TickRate()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	d := &Datapath{opt: opt, ns: ns, cookie: cookie, hz: hz, regions: map[uint32]table.Region{}, attached: map[attachPoint]*attachment{}}
	if err := d.pinnable(); err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	if d.changes, err = netdev.OpenPolled(); err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	return d, nil
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

// Close lets go of the kernel objects: pinned maps, links and the timer live on,
// and traffic with them.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.release(), d.changes.Close(), d.ns.Close())
}

func (d *Datapath) release() (err error) {
	if d.stop != nil {
		d.stop()
		d.watching.Wait()
		d.stop, d.changed = nil, nil
	}
	for at, a := range d.attached {
		err = errors.Join(err, a.close())
		delete(d.attached, at)
	}
	d.forgetOnDemand()
	if d.programs != nil {
		d.programs.Close()
		d.programs = nil
	}
	if d.t != nil {
		err = errors.Join(err, d.t.Close())
		d.t = nil
	}
	d.inForce, d.snapshot = nil, nil
	d.near = neighbours{}
	return err
}

// Remove detaches the programs and removes maps and pins.
func (d *Datapath) Remove(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inside(func() error {
		if d.dir == "" {
			dir, err := d.pinDir(false)
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
		err = errors.Join(err, d.release())
		if d.dir == "" {
			return err
		}
		err = errors.Join(err, takeBack(d.dir), os.RemoveAll(d.dir))
		if parent := filepath.Dir(d.dir); filepath.Base(parent) == "sluice" {
			os.Remove(parent) // when no other namespace has anything there
		}
		d.dir = ""
		return errors.Join(err, d.unmount())
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
