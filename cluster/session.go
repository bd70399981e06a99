// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// maxAnswer is the largest answer of the store: two documents, and the keys of all nodes.
const maxAnswer = 16 << 20

// session is one connection to the store. Each failure ends it, and the next one begins with a new connection and a
// complete read: compaction, a lost lease, a change of the leader and new certificates need no code of their own.
type session struct {
	client *clientv3.Client
	cancel context.CancelFunc
	prefix string // of all keys of the cluster, with a slash at the end
	node   string
	set    Settings
	lease  clientv3.LeaseID
	limit  time.Duration // of one request
	// Revisions of etcd: the state is known up to read, the watch has delivered the events up to delivered, and behind
	// is the newest revision that a complete read found.
	read, delivered, behind int64
}

// open returns a client of the store, which connects when it is used.
func open(s Settings) (*clientv3.Client, error) {
	cfg := clientv3.Config{Endpoints: s.Store.Endpoints, DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: opTimeout,
		MaxCallRecvMsgSize: maxAnswer, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithNoProxy()}}
	if t := s.Store.TLS; t != nil {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, err
		}
		ca, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(ca) {
			return nil, fmt.Errorf("%s has no certificate", t.CA)
		}
		cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, RootCAs: pool}
	}
	return clientv3.New(cfg)
}

// do runs one request to the store.
func (s *session) do(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	return f(ctx)
}

// runSession connects and follows the store. It returns nil when the settings changed.
func (m *Member) runSession(ctx context.Context, set Settings) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client, err := open(set)
	if err != nil {
		return err
	}
	defer client.Close()
	s := &session{client: client, cancel: cancel, prefix: "/sluice/" + set.Name + "/", node: set.Node, set: set, limit: m.opt.Request}
	err = s.do(ctx, func(ctx context.Context) error {
		l, err := client.Grant(ctx, int64(m.opt.Lease/time.Second))
		if err == nil {
			s.lease = l.ID
		}
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		if err == nil { // After an error, the next session writes the key with a new lease.
			s.leave()
		}
	}()
	alive, err := client.KeepAlive(ctx, s.lease)
	if err != nil {
		return err
	}
	if err := m.readAll(ctx, s); err != nil {
		return err
	}
	if !m.begin(s) {
		return nil
	}
	watch := client.Watch(clientv3.WithRequireLeader(ctx), s.prefix, clientv3.WithPrefix(), clientv3.WithRev(s.read+1))
	again := time.NewTicker(readEvery)
	defer again.Stop()
	signal(m.put)
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-alive:
			if !ok {
				return errors.New("the lease of the node has ended")
			}
			m.heard()
		case w, ok := <-watch:
			if err := w.Err(); err != nil || !ok {
				return fmt.Errorf("watch of the store: %w", errors.Join(err, ctx.Err()))
			}
			m.events(s, w)
		case <-again.C:
			if s.behind > s.delivered {
				return fmt.Errorf("the watch of the store did not deliver revision %d", s.behind)
			}
			if err := m.readAll(ctx, s); err != nil {
				return err
			}
			m.retry()
		case <-m.put:
			if err := m.writeReport(ctx, s); err != nil {
				return err
			}
		}
	}
}

// isOld reports whether the settings have changed since the session began: its store may be another one. The caller
// holds the lock.
func (m *Member) isOld(s *session) bool { return !reflect.DeepEqual(m.local.Settings, s.set) }

// begin publishes a session, unless it is old.
func (m *Member) begin(s *session) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isOld(s) {
		return false
	}
	if m.failure != nil {
		m.opt.Log.Info("connected to the store of the cluster")
	}
	m.session, m.failure = s, nil
	m.counts.Connections++
	m.notify()
	return true
}

// leave ends the lease, so that the others see the end at once.
func (s *session) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = s.client.Revoke(ctx, s.lease) // without an answer, it ends by itself
}

func (m *Member) heard() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.contact = time.Now()
}

// retry lets a refused document be tried again.
func (m *Member) retry() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refused != nil {
		m.refused = nil
		m.Kick()
	}
}

// writeReport writes the node's own key.
func (m *Member) writeReport(ctx context.Context, s *session) error {
	m.mu.Lock()
	r := report{Instance: m.instance, Version: m.opt.Version, Revision: m.local.InForce.Revision, Refused: m.refused, Drains: m.local.Drains}
	m.mu.Unlock()
	value, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return s.do(ctx, func(ctx context.Context) error {
		_, err := s.client.Put(ctx, s.prefix+"nodes/"+s.node, string(value), clientv3.WithLease(s.lease))
		return err
	})
}

// readAll reads all keys.
func (m *Member) readAll(ctx context.Context, s *session) (err error) {
	var got *clientv3.GetResponse
	err = s.do(ctx, func(ctx context.Context) error {
		got, err = s.client.Get(ctx, s.prefix, clientv3.WithPrefix())
		return err
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isOld(s) {
		return nil // the session ends
	}
	if id := got.Header.ClusterId; id != m.id {
		m.forget()
		m.id = id
	}
	m.doc, m.plan, m.request = stored{}, nil, nil
	clear(m.answers)
	there := map[string]bool{}
	for _, kv := range got.Kvs {
		key := strings.TrimPrefix(string(kv.Key), s.prefix)
		there[key] = true
		m.take(s, key, kv.Value, kv.ModRevision)
		if s.read != 0 {
			s.behind = max(s.behind, kv.ModRevision)
		}
	}
	for name := range m.peers {
		if !there["nodes/"+name] {
			m.lost(name)
		}
	}
	if s.read == 0 {
		s.delivered = got.Header.Revision
	}
	s.read, m.contact = got.Header.Revision, time.Now()
	m.notify()
	m.Kick()
	return nil
}

// events takes changes of the store.
func (m *Member) events(s *session, w clientv3.WatchResponse) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isOld(s) {
		return
	}
	m.contact = time.Now()
	for _, e := range w.Events {
		key := strings.TrimPrefix(string(e.Kv.Key), s.prefix)
		s.delivered = e.Kv.ModRevision
		if e.Kv.ModRevision <= s.read { // a complete read was faster
			continue
		}
		if e.Type == clientv3.EventTypeDelete {
			m.removed(s, key)
		} else {
			m.take(s, key, e.Kv.Value, e.Kv.ModRevision)
		}
	}
	m.notify()
	m.Kick()
}

// take notes the value of a key. The caller holds the lock.
func (m *Member) take(s *session, key string, value []byte, revision int64) {
	kind, name, _ := strings.Cut(key, "/")
	switch {
	case key == keyDocument:
		m.doc = stored{revision, value}
	case key == keyPlan:
		p := &plan{}
		if json.Unmarshal(value, p) == nil {
			m.plan = p
		}
	case kind == "answers":
		a := answer{}
		if json.Unmarshal(value, &a) == nil && (len(m.answers) < maxPeers || m.answers[name] != answer{}) {
			m.answers[name] = a
		}
	case key == "drains/"+s.node:
		m.request = &request{revision: revision}
		_ = json.Unmarshal(value, m.request) // a damaged request ends the drain
	case kind == "nodes":
		r := report{}
		if _, known := m.peers[name]; json.Unmarshal(value, &r) != nil || !known && len(m.peers) >= maxPeers {
			return
		}
		if name == s.node {
			m.twin = r.Instance != m.instance && s.read != 0 // the first read may find the key of an earlier process
		}
		since := time.Now()
		if p := m.peers[name]; p.Live && p.Revision == r.Revision {
			since = p.Since
		}
		m.peers[name] = Peer{Live: true, Revision: r.Revision, Refused: r.Refused, Drains: r.Drains, Version: r.Version, Since: since}
	}
}

// removed notes that a key is gone. The caller holds the lock.
func (m *Member) removed(s *session, key string) {
	kind, name, _ := strings.Cut(key, "/")
	switch {
	case key == keyDocument:
		m.doc = stored{}
	case key == keyPlan:
		m.plan = nil
	case kind == "answers":
		delete(m.answers, name)
	case key == "drains/"+s.node:
		m.request = nil
	case kind == "nodes":
		m.lost(name)
		if name == s.node {
			signal(m.put)
		}
	}
}

// lost notes that a node is not live. The caller holds the lock.
func (m *Member) lost(name string) {
	if p, ok := m.peers[name]; ok && p.Live {
		p.Live, p.Since = false, time.Now()
		m.peers[name] = p
	}
}
