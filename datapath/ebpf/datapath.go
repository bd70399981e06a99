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

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// Options configures a datapath. Gateways use the zero value.
type Options struct {
	// Dir is the bpffs directory for pinned maps and links. By default it is a directory for the
	// network namespace in /sys/fs/bpf/sluice. If /sys/fs/bpf is no bpffs, one is mounted at
	// StateDir/bpf.
	Dir string
	// StateDir is the gateway's directory; empty: /run/sluice.
	StateDir string
	// NoAttach loads the programs but attaches none, for tests that run packets through Program.
	NoAttach bool
	// RouteEveryPacket looks up the route of every packet, instead of caching the next hop. It
	// serves only to measure the benefit of the cache.
	RouteEveryPacket bool
	// NoTCX attaches to TC by filters, as on kernels before 6.6. For tests.
	NoTCX bool
	// FullPath disables the fast path of settled flows, for tests that compare both paths.
	FullPath bool
	// Log receives messages between calls of Apply; nil means slog.Default().
	Log *slog.Logger
}

// Datapath runs services and rules by XDP and TC programs in one network namespace.
type Datapath struct {
	opt     Options
	ns      netns.NsHandle
	cookie  uint64         // Cookie of the namespace; never reused.
	changes *netdev.Polled // Reports whether placementHost is out of date.
	dir     string
	mounted string // bpffs in the state directory that contains the pins, or ""
	// ephemeralErr explains why the bpffs was mounted privately, so that the pins are lost when
	// this process exits. Nil if the pins persist.
	ephemeralErr error
	hz           uint32

	heldMu sync.Mutex    // Held while held changes and while held packets run.
	held   *heldPrograms // Changes under mu and heldMu; nil before the first Apply, and with NoAttach.

	growMu    sync.Mutex            // Held while programs changes and while a flow table grows.
	growthErr atomic.Pointer[error] // Points to the error of the last attempt to grow a flow table, or to nil.

	// mu serialises Plan, Apply and Remove, and protects the fields below.
	mu            sync.Mutex
	t             *table.Tables    // nil before the first Apply.
	noPins        bool             // No tables of an earlier process exist; checked for the first empty snapshot.
	programs      *ebpf.Collection // in force
	switches      wire.Switches
	inForce       *compile.Desired
	snapshot      *datapath.Snapshot
	lastHost      *compile.Host               // Host when inForce was written.
	placementHost *compile.Host               // Host at the last placement of a service; nil if it could not be read.
	appliedHost   *compile.Host               // Host for which inForce was compiled: lastHost with objects removed since.
	mismatch      error                       // Why the configuration does not match lastHost; nil if it does.
	verified      bool                        // readBack has verified inForce.
	uses          compile.Uses                // Index of inForce, built on demand.
	regions       map[uint32]table.Region     // Scheduler tables in the slots map, by service.
	onDemand      map[string]*ebpf.Collection // Programs loaded on demand, by name.
	attached      map[attachPoint]*attachment
	unattached    map[int]error // why new interfaces have no program, by index
	neighbours    neighbours
	carriers      map[carrier]int    // Sockets of learnTunnelMTUs.
	stop          context.CancelFunc // Stops the watcher.
	watching      sync.WaitGroup
	failedEvents  atomic.Uint64                         // Events that could not be handled.
	logs          atomic.Pointer[map[uint32]config.Log] // Log options by service id, for the reader of events.
	// sourceNames maps ids of source rules in force to names, for the log.
	sourceNames atomic.Pointer[map[uint32]string]
}

var (
	_ datapath.Datapath = (*Datapath)(nil)
)

// Open opens the datapath of the calling thread's network namespace. It changes nothing before the
// first Apply.
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
	d := &Datapath{opt: opt, ns: ns, cookie: cookie, hz: hz, regions: map[uint32]table.Region{}, attached: map[attachPoint]*attachment{}, carriers: map[carrier]int{}}
	if err := d.checkPinning(); err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	if d.changes, err = netdev.OpenPolled(); err != nil {
		return nil, errors.Join(fmt.Errorf("ebpf: %w", err), ns.Close())
	}
	return d, nil
}

// Name returns "ebpf".
func (d *Datapath) Name() string { return "ebpf" }

// inNamespace runs f in the datapath's network namespace.
func (d *Datapath) inNamespace(f func() error) error {
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
			panic(fmt.Sprintf("cannot return to the network namespace: %v", err)) // the thread must not continue in another namespace
		}
	}()
	return f()
}

// Close releases the process's references. Pinned maps, links and the timer persist and continue to
// forward traffic.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.release(), d.changes.Close(), d.ns.Close())
}

func (d *Datapath) release() (err error) {
	if d.stop != nil {
		d.stop()
		d.watching.Wait()
		d.stampStopped()
		d.stop = nil
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
	d.held.close()
	d.held = nil
	if d.t != nil {
		err = errors.Join(err, d.t.Close())
		d.t = nil
	}
	d.inForce, d.snapshot = nil, nil
	d.neighbours = neighbours{}
	return errors.Join(err, d.learnTunnelMTUs(nil))
}

// Remove detaches the programs and removes maps and pins.
func (d *Datapath) Remove(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inNamespace(func() error {
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
		err = errors.Join(err, undoNotes(d.dir), os.RemoveAll(d.dir))
		if parent := filepath.Dir(d.dir); filepath.Base(parent) == "sluice" {
			os.Remove(parent) // succeeds only if no other namespace has pins
		}
		d.dir = ""
		return errors.Join(err, d.unmount())
	})
}

// Program returns the loaded program of a hook ("xdp" or "tc"). Tests and benchmarks run packets
// through it. It is valid until the next Apply.
func (d *Datapath) Program(hook string) *ebpf.Program {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.programs == nil {
		return nil
	}
	return d.programs.Programs["sluice_"+hook]
}
