// SPDX-License-Identifier: Apache-2.0

// Package lab builds small networks from network namespaces and veth pairs, for the demo, tests, benchmarks and
// experiments.
//
// A lab is built from a [Topology], which is plain data. Its namespaces are named sluice-TOPOLOGY-ID-NODE and can be
// used with "ip netns exec". All objects of a lab are in these namespaces, under /run/netns and under
// /run/sluice/lab. Only [Lab.HostSysctl] changes the host's own namespace.
//
// [Lab.Down] removes a lab. After a crash the next [Up] or [Sweep] removes the rest: every lab has a record, written
// before its other objects and locked by the owning process.
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

// ErrDown is wrapped by every error of [Lab.Down]: a part of the lab still exists.
var ErrDown = errors.New("down")

// Lab is a network that is up.
type Lab struct {
	record Record
	owner  *os.File // the locked record file; nil for a lab of another process
	nodes  []*Node

	sysctlLock *os.File // held while the lab has changed settings of the host
}

// Up builds the topology and returns when every interface carries packets and every address is usable. If ctx ends or
// a step fails, Up removes everything. It needs root.
func Up(ctx context.Context, t Topology) (*Lab, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("topology %s: %w", t.Name, err)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("lab: network namespaces need root: run it with sudo")
	}
	_, _ = Sweep() // an error does not affect this lab; "sluice lab list" shows the rest
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

// Find returns a lab of any process, for use or removal.
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

// Sweep removes the labs of crashed processes and returns their IDs. It keeps detached labs and labs with a live
// owner. A failed removal does not stop the others.
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

// sweepOne takes ownership of an orphaned lab and removes it. It reports false if another process owns the lab.
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
		return false, nil // a reader holds the lock; the next sweep removes the lab
	}
	l := fromRecord(r)
	l.owner = f
	if err := l.Down(); err != nil {
		f.Close() // release the lock, so that the next sweep retries
		return false, err
	}
	return true, nil
}

// ID returns the unique part of the namespace names.
func (l *Lab) ID() string { return l.record.ID }

// Topology returns the topology of the lab.
func (l *Lab) Topology() Topology { return l.record.Topology }

// Record returns the stored record of the lab.
func (l *Lab) Record() Record { return l.record }

// Nodes returns the nodes in the order of the topology.
func (l *Lab) Nodes() []*Node { return l.nodes }

// Lookup returns the node with that name in the topology, or false.
func (l *Lab) Lookup(name string) (*Node, bool) {
	for _, n := range l.nodes {
		if n.spec.Name == name {
			return n, true
		}
	}
	return nil, false
}

// Node returns the node with that name. It panics if the topology has none, because the caller defines both.
func (l *Lab) Node(name string) *Node {
	n, ok := l.Lookup(name)
	if !ok {
		panic(fmt.Sprintf("lab: topology %s has no node %q", l.record.Topology.Name, name))
	}
	return n
}

// Detach lets the lab outlive this process. "sluice lab down" or [Lab.Down] of another process removes it.
func (l *Lab) Detach() error {
	l.record.Detached = true
	f, err := l.record.store(l.owner)
	if err != nil {
		return fmt.Errorf("lab %s: record: %w", l.ID(), err)
	}
	l.owner = nil
	return f.Close()
}

// Down ends the processes in the lab's namespaces (SIGTERM, two seconds, SIGKILL). It removes namespaces, links,
// mounts, the state of killed gateways and the record. It can be called again after an error.
//
// A socket that this process opened through [Node.Do] keeps its namespace alive, without a name or links, until it is
// closed.
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
	if errors.Join(errs...) == nil { // else keep the record for a retry
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

// build creates all objects and checks ctx between the steps.
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
		func(n *Node) error { return n.activateLinks(ends[n.spec.Name]) },
		func(n *Node) error { return n.waitUp(ctx, ends[n.spec.Name]) },
		func(n *Node) error { return n.configureAddresses(ends[n.spec.Name]) },
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
	if err := n.writeEarlySettings(); err != nil {
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
