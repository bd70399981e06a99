// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Attributes and types of a trace; numbers of include/uapi/linux/netfilter/nf_tables.h.
const (
	traceTable, traceChain, traceHandle, traceType, traceVerdict = 1, 2, 3, 4, 5
	traceNetwork, traceTransport, traceOut                       = 8, 9, 12
	traceMark                                                    = 14
	tracePolicy                                                  = 16

	traceGroup = 9 // NFNLGRP_NFTRACE
)

// TraceKind is the subject of a trace.
type TraceKind uint32

// Kinds of traces.
const (
	TracePolicy TraceKind = 1 // The end of a base chain.
	TraceReturn TraceKind = 2 // The end of another chain.
	TraceRule   TraceKind = 3 // A rule that matched.
)

// Trace is one step of a packet with nftrace set.
type Trace struct {
	Table   string // its name; Chain has the family
	Chain   ruleset.ID
	Kind    TraceKind
	Handle  uint64          // of the rule
	Verdict ruleset.Verdict // of a rule, or the policy
	Out     uint32          // Index of the output interface; 0 if not known yet.
	Mark    uint32
	// Network and Transport are the first bytes of the headers at this step. The kernel sends them once per base
	// chain.
	Network, Transport []byte
}

// Tracer receives the traces of a network namespace.
type Tracer struct{ conn *Conn }

// OpenTrace receives traces in the network namespace of the calling thread.
func OpenTrace() (*Tracer, error) {
	c, err := Open()
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, traceGroup); err != nil {
		return nil, errors.Join(fmt.Errorf("nftables traces: %w", err), c.Close())
	}
	return &Tracer{c}, nil
}

// Close closes the socket.
func (t *Tracer) Close() error { return t.conn.Close() }

// Read returns the queued traces without waiting.
func (t *Tracer) Read() (list []Trace, err error) {
	for {
		b, err := t.conn.receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return list, nil
		}
		if err != nil {
			return nil, fmt.Errorf("nftables traces: %w", err)
		}
		for {
			m, rest, ok := nextMessage(b)
			if !ok {
				break
			}
			if b = rest; m.kind == kind(unix.NFT_MSG_TRACE) && len(m.body) >= genHeader {
				list = append(list, decodeTrace(m.body[0], m.body[genHeader:]))
			}
		}
	}
}

func decodeTrace(family uint8, attrs []byte) (t Trace) {
	t.Chain.Table = ruleset.Family(family)
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case traceTable:
			t.Table = cstring(v)
		case traceChain:
			t.Chain.Name = cstring(v)
		case traceHandle:
			t.Handle = be64(v)
		case traceType:
			t.Kind = TraceKind(be32(v))
		case traceVerdict:
			t.Verdict = decodeVerdict(v)
		case tracePolicy:
			t.Verdict.Code = int32(be32(v))
		case traceNetwork:
			t.Network = append([]byte(nil), v...)
		case traceTransport:
			t.Transport = append([]byte(nil), v...)
		case traceOut:
			t.Out = be32(v)
		case traceMark:
			t.Mark = be32(v)
		}
	})
	return t
}

// Handles returns the handles of a chain's rules in order.
func (c *Conn) Handles(id ruleset.ID) (list []uint64, err error) {
	var a ruleset.Attrs
	a.String(unix.NFTA_RULE_TABLE, ruleset.TableName)
	a.String(unix.NFTA_RULE_CHAIN, id.Name)
	err = c.retry(func() error {
		list = list[:0]
		return c.dump(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, uint8(id.Table), a, func(_ uint8, attrs []byte) {
			attrsOf(attrs, func(k uint16, v []byte) {
				if k == unix.NFTA_RULE_HANDLE {
					list = append(list, be64(v))
				}
			})
		})
	})
	return list, err
}
