// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-lb/sluice/config"
)

// Keys of a cluster, below /sluice/NAME/. The keys of nodes, plans and answers have a lease.
const (
	keyDocument = "config"
	keyPlan     = "plan" // and answers/NODE
	// nodes/NODE is the report of a live node, drains/NODE a request that the node deletes when it has followed it.
)

// plan is a document that all live nodes check before it is committed. There is one at a time.
type plan struct {
	ID    string `json:"id"`
	Node  string `json:"node"` // that asks
	Lease int64  `json:"lease"`
	Value []byte `json:"value"`
}

// answer is the answer of a node to a plan.
type answer struct {
	ID    string `json:"id"`
	Error string `json:"error,omitempty"`
}

// Outcome is the result of a change of the cluster.
type Outcome struct {
	Revision int64
	InForce  []string // nodes that have the revision in force
	Silent   []string // live nodes that did not report in time
}

// RefusedError reports the nodes that refuse a document.
type RefusedError struct {
	By   map[string]string // cause by node
	What string            // what became of the change
}

// Error implements error.
func (e *RefusedError) Error() string {
	var lines []string
	for _, n := range slices.Sorted(maps.Keys(e.By)) {
		lines = append(lines, "node "+n+" refuses: "+e.By[n])
	}
	return strings.Join(append(lines, e.What), "\n")
}

// Apply makes a document the configuration of all nodes. All live nodes plan it first. It is committed only if the
// document in the store is still the one of the beginning, or of revision expected if that is not negative. If a node
// refuses it then, the previous document is written again.
func (m *Member) Apply(ctx context.Context, d Document, expected int64) (*Outcome, error) {
	cfg, err := config.Decode(d.Name, []byte(d.YAML))
	if err != nil {
		return nil, err
	}
	if len(cfg.Nodes()) == 0 {
		return nil, errors.New("the configuration has no cluster.nodes: list the gateways of the cluster")
	}
	s, err := m.current()
	if err != nil {
		return nil, err
	}
	value, err := encode(&d)
	if err != nil {
		return nil, err
	}
	c := &change{m: m, s: s, value: value}
	defer c.end()
	if err := c.begin(ctx, expected); err != nil {
		return nil, err
	}
	if err := c.ask(ctx); err != nil {
		return nil, err
	}
	return c.commit(ctx)
}

// change is a change of the cluster's document.
type change struct {
	m        *Member
	s        *session
	value    []byte
	previous stored
	id       string
	lease    clientv3.LeaseID
	live     []string // nodes that take part
}

// end removes the plan and the answers to it.
func (c *change) end() {
	if c.lease != 0 {
		_ = c.s.do(context.Background(), func(ctx context.Context) error {
			_, err := c.s.client.Revoke(ctx, c.lease)
			return err // without an answer, the lease ends by itself
		})
	}
}

// txn runs a transaction. An error leaves open whether it was made.
func (c *change) txn(ctx context.Context, ifs []clientv3.Cmp, then, otherwise []clientv3.Op) (got *clientv3.TxnResponse, err error) {
	err = c.s.do(ctx, func(ctx context.Context) error {
		got, err = c.s.client.Txn(ctx).If(ifs...).Then(then...).Else(otherwise...).Commit()
		return err
	})
	if err != nil {
		return nil, &AwayError{err}
	}
	return got, nil
}

// begin writes the plan.
func (c *change) begin(ctx context.Context, expected int64) error {
	key := c.s.prefix + keyPlan
	read, err := c.txn(ctx, nil, []clientv3.Op{clientv3.OpGet(c.s.prefix + keyDocument), clientv3.OpGet(c.s.prefix+"nodes/", clientv3.WithPrefix())}, nil)
	if err != nil {
		return err
	}
	for _, kv := range read.Responses[0].GetResponseRange().Kvs {
		c.previous = stored{kv.ModRevision, kv.Value}
	}
	if expected >= 0 && c.previous.revision != expected {
		return fmt.Errorf("%w: the store has revision %d, not %d", ErrConflict, c.previous.revision, expected)
	}
	for _, kv := range read.Responses[1].GetResponseRange().Kvs {
		c.live = append(c.live, strings.TrimPrefix(string(kv.Key), c.s.prefix+"nodes/"))
	}
	err = c.s.do(ctx, func(ctx context.Context) error {
		l, err := c.s.client.Grant(ctx, int64(2*c.m.opt.Answer/time.Second))
		if err == nil {
			c.lease, c.id = l.ID, rand.Text()
		}
		return err
	})
	if err != nil {
		return &AwayError{err}
	}
	text, err := json.Marshal(plan{c.id, c.s.node, int64(c.lease), c.value})
	if err != nil {
		return err
	}
	made, err := c.txn(ctx, []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(key), "=", 0)},
		[]clientv3.Op{clientv3.OpPut(key, string(text), clientv3.WithLease(c.lease))}, []clientv3.Op{clientv3.OpGet(key)})
	if err != nil || made.Succeeded {
		return err
	}
	other := plan{Node: "unknown"}
	for _, kv := range made.Responses[0].GetResponseRange().Kvs {
		_ = json.Unmarshal(kv.Value, &other) // the name is for the message only
	}
	return fmt.Errorf("%w: node %s applies a configuration at the moment; see what it is, and try again", ErrConflict, other.Node)
}

// ask waits for the answers of all live nodes.
func (c *change) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.m.opt.Answer)
	defer cancel()
	var missing []string
	refused := map[string]string{}
	done := c.m.await(ctx, func() bool {
		missing = missing[:0]
		for _, n := range c.live {
			switch a, ok := c.m.answers[n]; {
			case ok && a.ID == c.id && a.Error != "":
				refused[n] = a.Error
			case ok && a.ID == c.id, !c.m.peers[n].Live: // a node that has died does not take part
			default:
				missing = append(missing, n)
			}
		}
		return len(missing) == 0 || len(refused) > 0
	})
	switch {
	case len(refused) > 0:
		return &RefusedError{refused, "nothing has changed"}
	case !done:
		return fmt.Errorf("no answer of %s within %s: nothing has changed", strings.Join(missing, ", "), c.m.opt.Answer)
	}
	return nil
}

// commit writes the document and waits for the reports of all live nodes.
func (c *change) commit(ctx context.Context) (*Outcome, error) {
	document, key := c.s.prefix+keyDocument, c.s.prefix+keyPlan
	made, err := c.txn(ctx, []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(document), "=", c.previous.revision), clientv3.Compare(clientv3.LeaseValue(key), "=", c.lease)},
		[]clientv3.Op{clientv3.OpPut(document, string(c.value)), clientv3.OpDelete(key)}, nil)
	if err != nil {
		return nil, fmt.Errorf("the change may have been made or not, 'sluice show nodes' has the revision: %w", err)
	}
	if !made.Succeeded {
		return nil, fmt.Errorf("%w: nothing has changed", ErrConflict)
	}
	out := &Outcome{Revision: made.Header.Revision}
	refused := map[string]string{}
	waiting, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.opt.Answer) // a change that was committed is followed to its end
	defer cancel()
	c.m.await(waiting, func() bool {
		out.InForce, out.Silent = nil, nil
		for _, n := range c.live {
			switch p := c.m.peers[n]; {
			case p.Live && p.Revision >= out.Revision:
				out.InForce = append(out.InForce, n)
			case p.Live && p.Refused != nil && p.Refused.Revision == out.Revision:
				refused[n] = p.Refused.Error
			case p.Live:
				out.Silent = append(out.Silent, n)
			}
		}
		return len(refused) > 0 || len(out.Silent) == 0
	})
	if len(refused) == 0 {
		return out, nil
	}
	return nil, c.revert(waiting, out.Revision, refused)
}

// revert writes the previous document again.
func (c *change) revert(ctx context.Context, revision int64, refused map[string]string) error {
	if c.previous.revision == 0 {
		return &RefusedError{refused, fmt.Sprintf("revision %d is the first document in the store, and stays there: correct the cause, or apply another one", revision)}
	}
	if s, err := c.m.current(); err == nil { // a new connection, perhaps
		c.s = s
	}
	document := c.s.prefix + keyDocument
	made, err := c.txn(context.WithoutCancel(ctx), []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(document), "=", revision)}, []clientv3.Op{clientv3.OpPut(document, string(c.previous.value))}, nil)
	switch {
	case err != nil:
		return &RefusedError{refused, fmt.Sprintf("revision %d could not be taken back: %v", revision, err)}
	case !made.Succeeded:
		return &RefusedError{refused, "another change has replaced it"}
	}
	return &RefusedError{refused, fmt.Sprintf("taken back: revision %d has the content of revision %d", made.Header.Revision, c.previous.revision)}
}

// answerPlan checks the plan of another node, or of this one.
func (m *Member) answerPlan(ctx context.Context) {
	m.mu.Lock()
	p, s := m.plan, m.session
	done := p == nil || s == nil || m.answered == p.ID
	m.mu.Unlock()
	if done {
		return
	}
	a := answer{ID: p.ID}
	_, cfg, err := decode(p.Value)
	if err == nil {
		err = m.opt.Gateway.Plan(ctx, cfg)
	}
	if err != nil {
		a.Error = err.Error()
	}
	text, err := json.Marshal(a)
	if err != nil {
		return
	}
	err = s.do(ctx, func(ctx context.Context) error {
		_, err := s.client.Put(ctx, s.prefix+"answers/"+s.node, string(text), clientv3.WithLease(clientv3.LeaseID(p.Lease)))
		return err
	})
	if err != nil {
		m.opt.Log.Warn("a plan of the cluster was not answered", "node", p.Node, "error", err)
		return
	}
	m.answered = p.ID
}

// request asks a node to drain, or to end its drain.
type request struct {
	By    string `json:"by"`
	Drain bool   `json:"drain"`

	revision int64
}

// Drain asks a node to withdraw its addresses, or to announce them again. It reports whether the node has done so; a
// node that is not live does it when it is back.
func (m *Member) Drain(ctx context.Context, by, node string, drain bool) (bool, error) {
	s, err := m.current()
	if err != nil {
		return false, err
	}
	text, err := json.Marshal(request{By: by, Drain: drain})
	if err != nil {
		return false, err
	}
	err = s.do(ctx, func(ctx context.Context) error {
		_, err := s.client.Put(ctx, s.prefix+"drains/"+node, string(text))
		return err
	})
	if err != nil {
		return false, &AwayError{err}
	}
	ctx, cancel := context.WithTimeout(ctx, m.opt.Answer)
	defer cancel()
	live := false
	done := m.await(ctx, func() bool {
		p := m.peers[node]
		live = p.Live
		return !live || p.Drains == drain
	})
	return live && done, nil
}

// obey follows a request to drain, and deletes it.
func (m *Member) obey(ctx context.Context) {
	m.mu.Lock()
	r, s, drains := m.request, m.session, m.local.Drains
	m.mu.Unlock()
	if r == nil || s == nil {
		return
	}
	if r.Drain != drains {
		if err := m.opt.Gateway.Drain(ctx, r.By, r.Drain); err != nil {
			m.opt.Log.Error("a request to drain was refused", "by", r.By, "error", err)
		}
		m.refresh()
	}
	key := s.prefix + "drains/" + s.node
	_ = s.do(ctx, func(ctx context.Context) error {
		_, err := s.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", r.revision)).Then(clientv3.OpDelete(key)).Commit()
		return err // the next read finds the request again
	})
}
