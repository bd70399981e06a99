// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
)

// Live reads the running host.
type Live struct {
	root fs.FS
	only []netdev.Namespace

	once          sync.Once // the kernel's symbols take some 50 ms of CPU time to read
	symbols       map[string]bool
	flowtables    bool
	flowtablesErr error

	mu    sync.Mutex
	asked map[uint64]askedReading // by inode of the namespace; protected by mu
}

// NewLive examines the given namespaces; none means all of the host.
func NewLive(only []netdev.Namespace) *Live { return &Live{root: os.DirFS("/"), only: only} }

// Namespaces implements Reader.
func (l *Live) Namespaces() ([]netdev.Namespace, int) {
	if len(l.only) > 0 {
		return l.only, 0
	}
	list, unseen := netdev.Namespaces()
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.asked, func(inode uint64, _ askedReading) bool {
		return !slices.ContainsFunc(list, func(ns netdev.Namespace) bool { return ns.Inode == inode })
	})
	return list, unseen
}

// Partial implements Reader.
func (l *Live) Partial() bool { return len(l.only) > 0 }

// Host implements Reader.
func (l *Live) Host(context.Context) (h HostReading) {
	inFirst(func() { h = ReadHostFiles(l.root) })
	records, err := readKmsg()
	h.Log, h.LogErr = ParseLog(records, monotonic()), err
	l.once.Do(func() {
		l.symbols, l.flowtablesErr = readSymbols(l.root)
		if l.flowtablesErr == nil {
			l.flowtables, l.flowtablesErr = hasFlowtables(l.root, l.symbols, h.Release)
		}
	})
	h.Symbols, h.Flowtables, h.FlowtablesErr = l.symbols, l.flowtables, l.flowtablesErr
	return h
}

// Counters implements Reader.
func (l *Live) Counters(context.Context) (c HostCounters) {
	inFirst(func() { c = ReadHostCounters(l.root) })
	return c
}

// inFirst reads in the first namespace of the host, where that can be entered: neighbour
// statistics and thresholds are shown there only.
func inFirst(read func()) {
	if err := netdev.HostNamespace().Do(func() error { read(); return nil }); err != nil {
		read()
	}
}

// hasFlowtables reports whether this kernel has flowtables built in, or as a module that the first
// use would load. A request to the kernel would load the module.
func hasFlowtables(root fs.FS, symbols map[string]bool, release string) (bool, error) {
	if symbols[symbolFlowtables] {
		return true, nil
	}
	modules, err := fs.ReadFile(root, "lib/modules/"+release+"/modules.dep")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // a kernel without modules
	}
	return bytes.Contains(modules, []byte("/nf_flow_table.ko")), err
}

// Kernel functions whose presence shows a feature.
const (
	symbolFlowtables   = "nf_flow_table_init"
	SymbolKprobes      = "register_kprobe"
	SymbolBPFNetfilter = "bpf_nf_link_attach" // exists since Linux 6.4
)

// readSymbols reports which of the functions above this kernel has. The result is nil if the kernel
// does not list its symbols.
func readSymbols(root fs.FS) (map[string]bool, error) {
	symbols, err := root.Open("proc/kallsyms")
	if err != nil {
		return nil, err
	}
	defer symbols.Close()
	return findSymbols(symbols, symbolFlowtables, SymbolKprobes, SymbolBPFNetfilter), nil
}

// findSymbols reports which kernel functions exist. It stops before the symbols of BPF programs:
// the kernel needs quadratic time to list them, which takes minutes for thousands of programs.
func findSymbols(f fs.File, names ...string) map[string]bool {
	found := map[string]bool{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Bytes()
		if bytes.HasSuffix(line, []byte("\t[bpf]")) {
			break
		}
		for _, name := range names {
			if i := bytes.LastIndex(line, []byte(name)); i > 0 && line[i-1] == ' ' && i+len(name) == len(line) {
				found[name] = true
			}
		}
	}
	return found
}

func monotonic() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// readKmsg reads the present content of the kernel's log and does not wait for more.
func readKmsg() ([]string, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/kmsg: %w", err)
	}
	defer unix.Close(fd)
	var records []string
	buf := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return records, nil
		case errors.Is(err, unix.EPIPE): // overwritten meanwhile; the next one is read
		case err != nil:
			return records, fmt.Errorf("/dev/kmsg: %w", err)
		case n == 0:
			return records, nil
		default:
			records = append(records, string(buf[:n]))
		}
	}
}

// Namespace implements Reader.
func (l *Live) Namespace(ctx context.Context, ns netdev.Namespace, known *Sockets) (r NamespaceReading, err error) {
	err = ns.Do(func() (err error) {
		if r, err = ReadNamespaceFiles(l.root); err != nil {
			return err
		}
		r.Links, err = readLinks()
		r.Routing = readRouting(l.root, r.Links)
		r.readRoutes()
		r.Generation, _ = firewall.Generation()
		if known != nil {
			r.Sockets = *known
			return err
		}
		r.ReadSockets(l.root)
		l.readAsked(ns, &r)
		return err
	})
	if err != nil {
		return r, err
	}
	perCPU, err := conntrack.ReadPerCPU(ctx, ns)
	if err != nil {
		r.ConntrackErr = err
		return r, nil
	}
	r.Counters.AddConntrack(conntrack.Total(perCPU))
	return r, nil
}

// readLinks reads the interfaces of the calling thread's namespace.
func readLinks() ([]Link, error) {
	list, err := netdev.Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	qdiscs, _ := netdev.Whole(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	tool, err := openEthtool()
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	defer tool.close()
	indexes := make([]int, len(list))
	for i, l := range list {
		indexes[i] = l.Attrs().Index
	}
	features := netdev.XDPFeatures(indexes)
	peers := map[int]peer{}
	var out []Link
	for _, l := range list {
		a := l.Attrs()
		link := Link{
			Name: a.Name, Index: a.Index, Kind: l.Type(), Up: a.RawFlags&unix.IFF_UP != 0,
			MTU: a.MTU, Queues: a.NumRxQueues, XDP: a.Xdp != nil && a.Xdp.Attached, LRO: -1, GRO: -1, RxChecksum: -1, UDPForwarding: -1,
		}
		link.Loopback = a.RawFlags&unix.IFF_LOOPBACK != 0
		link.Carrier, link.NoARP = a.RawFlags&unix.IFF_LOWER_UP != 0, a.RawFlags&unix.IFF_NOARP != 0
		link.Master, link.Queue = a.MasterIndex, a.TxQLen
		copy(link.MAC[:], a.HardwareAddr)
		if link.Kind == "veth" && a.ParentIndex > 0 {
			peers[a.Index] = peer{a.ParentIndex, a.NetNsID}
		}
		if s := a.Statistics; s != nil {
			link.RxPackets, link.TxPackets, link.RxErrors, link.TxErrors = s.RxPackets, s.TxPackets, s.RxErrors, s.TxErrors
			link.RxDropped, link.TxDropped, link.RxMissed, link.RxFifo = s.RxDropped, s.TxDropped, s.RxMissedErrors, s.RxFifoErrors
		}
		for _, q := range qdiscs {
			if qa := q.Attrs(); qa.LinkIndex == a.Index && qa.Parent == netlink.HANDLE_ROOT && qa.Statistics != nil && qa.Statistics.Queue != nil {
				link.QdiscDrops += uint64(qa.Statistics.Queue.Drops)
				if qa.Statistics.Basic != nil {
					link.QdiscPackets += uint64(qa.Statistics.Basic.Packets)
				}
			}
		}
		link.offloads(tool)
		link.XDPFeatures, link.XDPKnown = features[a.Index]
		out = append(out, link)
	}
	readAddresses(out)
	readPorts(out, peers)
	return out, nil
}

// Table implements Reader.
func (l *Live) Table(ctx context.Context, ns netdev.Namespace, r *NamespaceReading) (*conntrack.Summary, *Entries, error) {
	if limits, err := conntrack.ReadLimits(ns); err == nil && limits.Count == 0 {
		return nil, nil, nil // even an empty namespace's dump walks the whole host's table
	}
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	s := conntrack.NewSummary(conntrack.BySource | conntrack.ByService | conntrack.ByBackend | conntrack.BySNATPort)
	s.Enter(ns.Name, 0)
	single, where := &Entries{}, placingOf(r)
	_ = ns.Do(func() error { where.lingering(l.root); return nil })
	err = c.Dump(ctx, nil, func(e *conntrack.Entry) error {
		s.Add(e)
		single.add(e, where)
		return nil
	})
	single.finish()
	_ = ns.Do(func() error { single.routes(r.Links); return nil })
	if errors.Is(err, conntrack.ErrInterrupted) {
		err = nil // a busy table changes while it is read; shares stay right
	}
	return s, single, err
}

// FollowUp implements Reader.
func (l *Live) FollowUp(n *Namespace) { n.followUp() }

// NewRate implements Reader.
func (l *Live) NewRate(ctx context.Context, ns netdev.Namespace) (float64, error) {
	return conntrack.NewRate(ctx, ns, newWindow, newEnough)
}

// New connections are sampled until there are enough for an estimate, because listening slows a
// busy gateway down.
const (
	newWindow = 300 * time.Millisecond
	newEnough = 500
)

// Rules implements Reader.
func (l *Live) Rules(ctx context.Context, ns netdev.Namespace) (r *firewall.Ruleset, err error) {
	err = ns.Do(func() (err error) {
		r, err = firewall.Read(ctx)
		return err
	})
	return r, err
}

// Silent implements Reader.
func (l *Live) Silent(_ context.Context, ns netdev.Namespace, addresses []netip.Addr) (list []hold.Silent) {
	if len(addresses) == 0 {
		return nil
	}
	// Without CAP_NET_RAW no address is known to be silent.
	_ = ns.Do(func() (err error) {
		list, err = hold.Unanswered(addresses)
		return err
	})
	return list
}
