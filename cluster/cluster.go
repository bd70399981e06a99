// SPDX-License-Identifier: Apache-2.0

// Package cluster connects a node to the store of its cluster, an etcd. The store has one configuration document for
// all nodes, a key with a lease for each live node, and requests to drain. No packet depends on it: while the store is
// away, the node continues with the document that it has.
//
// Nothing here depends on a wall clock. Revisions of etcd order all changes, etcd itself counts the time of a lease, and
// a node measures the time since its last contact with its own monotonic clock.
package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/store"
)

const (
	// leaseTime is the time after which a silent node is not live, and a silent store is away.
	leaseTime  = 10 * time.Second
	opTimeout  = 3 * time.Second  // of one request to the store
	retryAfter = time.Second      // between two attempts to connect
	readEvery  = 30 * time.Second // Everything is read again, in case that a watch delivers nothing.
	// answerTime is the time in which each live node answers a plan, and reports a new revision.
	answerTime = 10 * time.Second
	maxPeers   = 64 // nodes that are remembered, including those that are no longer in the configuration
)

// Errors of changes.
var (
	ErrNoStore  = errors.New("the configuration has no cluster.store: add it to the file of each node")
	ErrConflict = errors.New("another change of the cluster came first")
)

// AwayError is returned for changes while the store does not answer.
type AwayError struct{ Cause error }

// Error implements error.
func (e *AwayError) Error() string {
	return fmt.Sprintf("the store of the cluster does not answer: traffic, checks and announcements continue, and the configuration can be changed when it answers again: %v", e.Cause)
}

// Unwrap implements the interface of package errors.
func (e *AwayError) Unwrap() error { return e.Cause }

// Settings are the parts of the configuration that decide the connection to the store.
type Settings struct {
	Name  string // of the cluster
	Node  string // of this host
	Store *config.ClusterStore
}

// Local is the state of this node.
type Local struct {
	Settings
	InForce store.Shared // the document in force; zero: the operator's file
	Drains  bool
}

// Gateway is this node.
type Gateway interface {
	Local() Local
	// Plan returns the error with which the node would refuse a configuration.
	Plan(context.Context, *config.Config) error
	// Apply puts a document of the store in force.
	Apply(ctx context.Context, d *Document, cfg *config.Config, revision store.Shared) error
	// Drain begins or ends the drain of the node.
	Drain(ctx context.Context, by string, drain bool) error
}

// Options of a Member.
type Options struct {
	Gateway Gateway
	Version string
	Log     *slog.Logger
	// Times for tests on busy machines: of the lease, of one request to the store, and of the answers of other nodes.
	// 0 means the constants above.
	Lease, Request, Answer time.Duration
}

// Member is a node of a cluster with a store.
type Member struct {
	opt      Options
	instance string // random; differs between two hosts with the same node name

	work chan struct{} // has one element when the worker has something to do
	put  chan struct{} // has one element when the node's own key has to be written

	mu      sync.Mutex    // protects the fields below
	changed chan struct{} // closed and replaced after each change
	local   Local
	session *session  // nil without a connection
	contact time.Time // of the last answer of the store; zero: none
	failure error     // of the last connection
	id      uint64    // of the etcd cluster
	doc     stored
	peers   map[string]Peer
	plan    *plan // that a node asks for; nil: none
	answers map[string]answer
	request *request // to drain, for this node
	refused *Refusal // of the document in the store
	// answered is the last plan that this node has answered; only the worker uses it.
	answered string
	twin     bool // Another host writes this node's key.
	counts   Counts
}

// stored is the document in the store.
type stored struct {
	revision int64 // 0: none
	value    []byte
}

// Counts are the counters since the start.
type Counts struct {
	Connections uint64 // to the store, which succeeded
	Failures    uint64 // of connections
	Refused     uint64 // documents
}

// Refusal is a document that a node refused.
type Refusal struct {
	Revision int64  `json:"revision"`
	Error    string `json:"error"`
}

// report is the value of a node's own key.
type report struct {
	Instance string   `json:"instance"`
	Version  string   `json:"version"`
	Revision int64    `json:"revision"` // in force; 0: the operator's file
	Refused  *Refusal `json:"refused,omitempty"`
	Drains   bool     `json:"drains,omitempty"`
}

// Peer is a node as the store knows it.
type Peer struct {
	Live     bool
	Revision int64    // of the document in force when it was last seen; 0: its file
	Refused  *Refusal // The node refused a document.
	Drains   bool
	Version  string
	// Since is when this node learned that the other one is live with this revision, or is no longer live.
	Since time.Time
}

// New returns a member that is not connected.
func New(opt Options) *Member {
	opt.Lease, opt.Request, opt.Answer = cmp.Or(opt.Lease, leaseTime), cmp.Or(opt.Request, opTimeout), cmp.Or(opt.Answer, answerTime)
	return &Member{opt: opt, instance: rand.Text(), work: make(chan struct{}, 1), put: make(chan struct{}, 1),
		changed: make(chan struct{}), peers: map[string]Peer{}, answers: map[string]answer{}}
}

// Kick makes the member look at the configuration in force. It never blocks.
func (m *Member) Kick() { signal(m.work) }

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// notify wakes the callers of await. The caller holds the lock.
func (m *Member) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// Run keeps the node connected until the context ends.
func (m *Member) Run(ctx context.Context) {
	m.Kick()
	go m.runWorker(ctx)
	for ctx.Err() == nil {
		m.mu.Lock()
		local, changed := m.local, m.changed
		m.mu.Unlock()
		if local.Store == nil {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		err := m.runSession(ctx, local.Settings)
		if err != nil {
			err = fmt.Errorf("%s: %w", strings.Join(local.Store.Endpoints, ", "), err)
		}
		m.mu.Lock()
		m.session = nil
		if err == nil || ctx.Err() != nil { // the settings changed, or the daemon ends
			m.mu.Unlock()
			continue
		}
		news := m.failure == nil || m.failure.Error() != err.Error()
		m.failure = err
		m.counts.Failures++
		m.notify()
		m.mu.Unlock()
		if news {
			m.opt.Log.Warn("no connection to the store of the cluster; trying again", "every", retryAfter, "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryAfter):
		}
	}
}

// runWorker does the slow work, so that the session always reads.
func (m *Member) runWorker(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.work:
		}
		m.refresh()
		m.answerPlan(ctx)
		m.follow(ctx)
		m.obey(ctx)
	}
}

// refresh reads the state of this node.
func (m *Member) refresh() {
	local := m.opt.Gateway.Local()
	m.mu.Lock()
	defer m.mu.Unlock()
	if reflect.DeepEqual(local, m.local) {
		return
	}
	if !reflect.DeepEqual(local.Settings, m.local.Settings) {
		if m.session != nil {
			m.session.cancel()
		}
		m.forget()
	}
	m.local = local
	signal(m.put)
	m.notify()
}

// forget drops the state of another store. The caller holds the lock.
func (m *Member) forget() {
	m.contact, m.failure, m.id, m.doc, m.plan, m.request, m.refused, m.twin = time.Time{}, nil, 0, stored{}, nil, nil, nil, false
	clear(m.peers)
	clear(m.answers)
}

// follow puts the document of the store in force, if it is another one.
func (m *Member) follow(ctx context.Context) {
	m.mu.Lock()
	doc, local := m.doc, m.local
	wanted := store.Shared{Cluster: local.Name, Store: m.id, Revision: doc.revision}
	done := m.refused != nil && m.refused.Revision == doc.revision
	m.mu.Unlock()
	older := wanted.Cluster == local.InForce.Cluster && wanted.Store == local.InForce.Store && wanted.Revision < local.InForce.Revision
	if local.Store == nil || doc.revision == 0 || wanted == local.InForce || older || done {
		return
	}
	d, cfg, err := decode(doc.value)
	if err == nil {
		err = m.opt.Gateway.Apply(ctx, d, cfg, wanted)
	}
	if ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	m.refused = nil
	if err != nil {
		m.refused = &Refusal{doc.revision, err.Error()}
		m.counts.Refused++
		m.opt.Log.Error("the document of the cluster was refused, the configuration in force stays", "revision", doc.revision, "error", err)
	}
	m.mu.Unlock()
	m.refresh()
	signal(m.put)
}

// Status is the state of the connection to the store.
type Status struct {
	Settings
	Connected bool
	// Away is the time since the last answer, while there is no connection; 0 with a connection, and before the first one.
	Away     time.Duration
	Failure  error // why there is no connection
	Document int64 // revision of the document in the store; 0: none, or not known
	InForce  int64 // revision of the document in force; 0: the operator's file
	Refused  *Refusal
	Counts   Counts
}

// Status returns the state of the connection; its Settings have no Store for a node without one.
func (m *Member) Status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := Status{Settings: m.local.Settings, Connected: m.connected(), Failure: m.failure, Document: m.doc.revision, InForce: m.local.InForce.Revision, Refused: m.refused, Counts: m.counts}
	if !s.Connected && !m.contact.IsZero() {
		s.Away = time.Since(m.contact)
	}
	return s
}

// connected reports whether the store answers. The caller holds the lock.
func (m *Member) connected() bool {
	return m.session != nil && !m.contact.IsZero() && time.Since(m.contact) < m.opt.Lease
}

// Peers returns the nodes by name.
func (m *Member) Peers() map[string]Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.peers)
}

// Warnings returns the reasons why the nodes may have different configurations.
func (m *Member) Warnings() (list []string) {
	s := m.Status()
	if s.Settings.Store == nil {
		return nil
	}
	if !s.Connected && s.Failure != nil {
		list = append(list, (&AwayError{s.Failure}).Error())
	}
	if s.Refused != nil {
		list = append(list, fmt.Sprintf("revision %d of the cluster is not in force on this node: %s", s.Refused.Revision, s.Refused.Error))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.twin {
		list = append(list, fmt.Sprintf("another host is node %s of the cluster too: start one of them with --node", m.local.Node))
	}
	if s.Connected && m.local.InForce.Store == m.id && m.local.InForce.Cluster == m.local.Name && m.doc.revision < m.local.InForce.Revision {
		list = append(list, fmt.Sprintf("the store has lost revision %d of the cluster, which stays in force: run 'sluice apply --cluster' again", m.local.InForce.Revision))
	}
	settled := func(p Peer) bool { return p.Live && time.Since(p.Since) > m.opt.Answer }
	for _, name := range slices.Sorted(maps.Keys(m.peers)) {
		if p := m.peers[name]; s.Connected && settled(p) && settled(m.peers[m.local.Node]) && p.Revision != m.local.InForce.Revision {
			list = append(list, fmt.Sprintf("node %s has revision %d of the cluster in force, this node has %d", name, p.Revision, m.local.InForce.Revision))
		}
	}
	return list
}

// current returns the session, or an error that says why there is none.
func (m *Member) current() (*session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.local.Store == nil:
		return nil, ErrNoStore
	case !m.connected():
		cause := m.failure
		if cause == nil {
			cause = errors.New("not connected yet")
		}
		return nil, &AwayError{cause}
	}
	return m.session, nil
}

// await waits until f, which is called with the lock held, returns true. It reports whether f did so before the
// context ended.
func (m *Member) await(ctx context.Context, f func() bool) bool {
	for {
		m.mu.Lock()
		done, changed := f(), m.changed
		m.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}
