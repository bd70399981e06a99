// SPDX-License-Identifier: Apache-2.0

// Package lab builds small networks out of network namespaces and veth pairs, for the demo, the
// tests and the benchmarks, and for users who want to play.
//
// A lab is built from a [Topology], which is plain data. Its namespaces are named
// sluice-TOPOLOGY-ID-NODE and can be used with "ip netns exec". Everything that a lab makes lives
// in these namespaces, under /run/netns and under /run/sluice/lab; the host's own namespace is
// not touched, except by [Lab.HostSysctl].
//
// A lab ends with [Lab.Down]. What a crash leaves behind is removed by the next [Up] or [Sweep]:
// a record of every lab is stored before anything of it is made, and locked by the process that
// owns it.
package lab

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrDown is in every error of [Lab.Down]: something of the lab is still there.
var ErrDown = errors.New("down")

// Lab is a network that is up.
type Lab struct {
	record Record
	owner  *os.File // the locked record file; nil for a lab that another process made
	nodes  []*Node

	sysctlLock *os.File // held while the lab has changed settings of the host
}

// Up builds the topology and returns when every interface carries packets and every address can
// be used. When ctx ends meanwhile, or anything fails, nothing is left. Needs root.
func Up(ctx context.Context, t Topology) (*Lab, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("topology %s: %w", t.Name, err)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("lab: network namespaces need root: run it with sudo")
	}
	_, _ = Sweep() // what cannot be removed hinders nobody here; "sluice lab list" shows it
	id := make([]byte, 3)
	if _, err := rand.Read(id); err != nil {
		return nil, err
	}
	l := fromRecord(Record{ID: hex.EncodeToString(id), Topology: t, Created: time.Now().UTC()})
	owner, err := l.record.store(nil)
	if err != nil {
		return nil, fmt.Errorf("lab %s: record: %w", l.ID(), err)
	}
	l.owner = owner
	if err := l.build(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("lab %s: %w", l.ID(), err), l.Down())
	}
	return l, nil
}

func fromRecord(r Record) *Lab {
	l := &Lab{record: r}
	for _, spec := range r.Topology.Nodes {
		n := &Node{spec: spec, full: fmt.Sprintf("sluice-%s-%s-%s", r.Topology.Name, r.ID, spec.Name)}
		if spec.Forward {
			if dir := filepath.Join(l.mountDir(), spec.Name); isBPFFS(dir) {
				n.bpffs = dir
			}
		}
		l.nodes = append(l.nodes, n)
	}
	return l
}

// Find returns a lab that is up, made by any process, for use or for taking it down.
func Find(id string) (*Lab, error) {
	r, err := readRecord(recordPath(filepath.Base(id)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lab %q: no such lab; \"sluice lab list\" shows what is up", id)
	}
	if err != nil {
		return nil, fmt.Errorf("lab %q: %w", id, err)
	}
	return fromRecord(r), nil
}

// Sweep removes what crashed processes left of their labs and returns the ids. Labs whose owner
// lives and labs that were detached stay. What cannot be removed hinders the removal of no other.
func Sweep() ([]string, error) {
	errs := []error{removeUnfinished()}
	records, err := List()
	errs = append(errs, err)
	var swept []string
	for _, r := range records {
		if r.Live || r.Detached {
			continue
		}
		done, err := sweepOne(r.ID)
		if done {
			swept = append(swept, r.ID)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return swept, fmt.Errorf("lab: sweep: %w", err)
	}
	return swept, nil
}

// sweepOne takes the ownership of a lab that nobody owns and takes it down. It reports false when
// another process was first.
func sweepOne(id string) (bool, error) {
	unlock, err := lockRecords()
	if err != nil {
		return false, err
	}
	defer unlock()
	f, err := os.OpenFile(recordPath(id), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	r, err := readRecord(f.Name())
	if err != nil || r.Live || r.Detached {
		f.Close()
		return false, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return false, nil // a reader looks at it just now: the next sweep gets it
	}
	l := fromRecord(r)
	l.owner = f
	if err := l.Down(); err != nil {
		f.Close() // nobody owns what is left, and the next sweep tries again
		return false, err
	}
	return true, nil
}

// ID returns the part of the namespace names that makes them unique.
func (l *Lab) ID() string { return l.record.ID }

// Topology returns what the lab was built from.
func (l *Lab) Topology() Topology { return l.record.Topology }

// Record returns what the machine knows about the lab.
func (l *Lab) Record() Record { return l.record }

// Nodes returns the nodes in the order of the topology.
func (l *Lab) Nodes() []*Node { return l.nodes }

// Lookup returns the node of that name within the topology, and false when there is none.
func (l *Lab) Lookup(name string) (*Node, bool) {
	for _, n := range l.nodes {
		if n.spec.Name == name {
			return n, true
		}
	}
	return nil, false
}

// Node returns the node of that name. It panics when the topology has none: the name is written
// in the same program as the topology.
func (l *Lab) Node(name string) *Node {
	n, ok := l.Lookup(name)
	if !ok {
		panic(fmt.Sprintf("lab: topology %s has no node %q", l.record.Topology.Name, name))
	}
	return n
}

// Detach lets the lab outlive this process; "sluice lab down" or [Lab.Down] of another process
// removes it.
func (l *Lab) Detach() error {
	l.record.Detached = true
	f, err := l.record.store(l.owner)
	if err != nil {
		return fmt.Errorf("lab %s: record: %w", l.ID(), err)
	}
	l.owner = nil
	return f.Close()
}

// Down ends the processes that still run in the lab's namespaces (SIGTERM, two seconds, SIGKILL)
// and removes namespaces, links, mounts, the state of killed gateways and the record. It can be
// called again after an error.
//
// A socket that this process opened through [Node.Do] keeps its namespace alive, without a name
// and without links, until it is closed.
func (l *Lab) Down() error {
	paths := make([]string, 0, len(l.nodes))
	for _, n := range l.nodes {
		paths = append(paths, n.Path())
	}
	errs := []error{endProcesses(paths), l.restoreHost()}
	for _, n := range l.nodes {
		if _, ok := namespaceInode(n.Path()); ok {
			errs = append(errs, n.removeLinks())
		}
		errs = append(errs, deleteNamespace(n.full), os.RemoveAll(n.StateDir()))
	}
	errs = append(errs, l.unmountAll())
	if errors.Join(errs...) == nil { // else the record stays for another try
		if err := os.Remove(recordPath(l.ID())); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lab %s: %w: %w", l.ID(), ErrDown, err)
	}
	if l.owner != nil {
		l.owner.Close()
		l.owner = nil
	}
	return nil
}

// build makes everything, looking at ctx between the steps.
func (l *Lab) build(ctx context.Context) error {
	if err := prepareNetnsDir(); err != nil {
		return err
	}
	ends := make(map[string][]End)
	for _, link := range l.record.Topology.Links {
		ends[link.A.Node] = append(ends[link.A.Node], link.A)
		ends[link.B.Node] = append(ends[link.B.Node], link.B)
	}
	for _, n := range l.nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.makeNode(n); err != nil {
			return err
		}
	}
	for _, link := range l.record.Topology.Links {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := makeLink(link, l.Node(link.A.Node), l.Node(link.B.Node)); err != nil {
			return err
		}
	}
	steps := []func(*Node) error{
		func(n *Node) error { return n.raise(ends[n.spec.Name]) },
		func(n *Node) error { return n.waitUp(ctx, ends[n.spec.Name]) },
		func(n *Node) error { return n.address(ends[n.spec.Name]) },
		func(n *Node) error { return n.waitAddresses(ctx) },
	}
	for _, step := range steps {
		for _, n := range l.nodes {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := step(n); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *Lab) makeNode(n *Node) error {
	if err := createNamespace(n.full); err != nil {
		return err
	}
	if err := n.prepare(); err != nil {
		return err
	}
	if n.spec.Switch {
		return n.makeBridge()
	}
	if n.spec.Forward {
		return l.mountBPFFS(n)
	}
	return nil
}
