// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// table emulates a datapath. It assigns ports from 40000 on if it cannot assign the suggested one.
type table struct {
	allowed  []datapath.MappingRule
	mappings map[endpoint]datapath.Mapping
	taken    map[netip.AddrPort]bool
	next     uint16
	epoch    time.Duration
	err      error
}

func (t *table) MappingRules() []datapath.MappingRule { return t.allowed }

func (t *table) Mappings() (list []datapath.Mapping, err error) {
	for _, m := range t.mappings {
		list = append(list, m)
	}
	return list, t.err
}

func (t *table) Map(m datapath.Mapping, exact bool) (datapath.Mapping, error) {
	if t.err != nil {
		return m, t.err
	}
	i := slices.IndexFunc(t.allowed, func(r datapath.MappingRule) bool { return r.Name == m.Rule })
	if r := t.allowed[i]; r.PortsPerClient > 0 && len(t.mappings) >= r.PortsPerClient {
		return m, datapath.ErrQuota
	}
	suggested := m.Outside
	m.Outside = netip.AddrPortFrom(t.allowed[i].Outside[0], suggested.Port())
	if suggested.Port() == 0 || t.taken[m.Outside] {
		t.next++
		m.Outside = netip.AddrPortFrom(m.Outside.Addr(), 40000+t.next)
	}
	if exact && !matchesSuggestion(m.Outside, suggested) {
		return m, datapath.ErrNoPort
	}
	t.taken[m.Outside] = true
	t.mappings[endpoint{m.Protocol, m.Inside}] = m
	return m, nil
}

func (t *table) Renew(m datapath.Mapping) error {
	if _, there := t.mappings[endpoint{m.Protocol, m.Inside}]; !there {
		return fmt.Errorf("mappings: %w", fs.ErrNotExist)
	}
	t.mappings[endpoint{m.Protocol, m.Inside}] = m
	return t.err
}

func (t *table) Unmap(m datapath.Mapping) error {
	delete(t.mappings, endpoint{m.Protocol, m.Inside})
	return t.err
}

func (t *table) Epoch() time.Duration { return t.epoch }

const (
	alice, bob = "10.0.0.2", "10.0.0.3"
	six        = "fd00::2"
	outer      = "203.0.113.1"
	start      = 1000 * time.Second // on the clock
)

// bench is a server over a table, with a clock that tests set.
type bench struct {
	*Server
	*table
	t   *testing.T
	now time.Duration
}

func newBench(t *testing.T, more ...datapath.MappingRule) *bench {
	b := &bench{t: t, now: start, table: &table{mappings: map[endpoint]datapath.Mapping{}, taken: map[netip.AddrPort]bool{}, epoch: start - 7*time.Second}}
	b.allowed = append([]datapath.MappingRule{rule("office", outer, "10.0.0.0/24")}, more...)
	b.Server = newServer(b.table, slog.New(slog.DiscardHandler), func() time.Duration { return b.now })
	b.networks = map[string][]netip.Prefix{"wan1": nil}
	for iface, network := range map[string]string{"lan0": "10.0.0.0/23", "guest0": "10.3.0.0/24", "lan1": "10.8.0.0/24", "wan0": "10.0.0.0/8"} {
		b.networks[iface] = []netip.Prefix{netip.MustParsePrefix("fd00::/64"), netip.MustParsePrefix(network)}
	}
	if err := b.load(); err != nil {
		t.Fatal(err)
	}
	return b
}

func rule(name, outside string, sources ...string) datapath.MappingRule {
	r := datapath.MappingRule{NATRule: &config.NATRule{Name: name, Out: "wan0"}, Outside: []netip.Addr{netip.MustParseAddr(outside)}}
	for _, s := range sources {
		r.Source = append(r.Source, netip.MustParsePrefix(s))
	}
	return r
}

// message is a MAP request; edits change its bytes.
func message(client string, n byte, protocol flow.Protocol, internal uint16, lifetime uint32, suggested string, options ...byte) []byte {
	b := make([]byte, headerSize+mapSize, headerSize+mapSize+len(options))
	b[0], b[1] = version, byte(mapOp)
	binary.BigEndian.PutUint32(b[4:], lifetime)
	a := netip.MustParseAddr(client).As16()
	copy(b[8:], a[:])
	b[24], b[36] = n, byte(protocol)
	binary.BigEndian.PutUint16(b[40:], internal)
	s := netip.MustParseAddrPort(suggested)
	binary.BigEndian.PutUint16(b[42:], s.Port())
	a = s.Addr().As16()
	copy(b[44:], a[:])
	return append(b, options...)
}

const (
	anyPort = "0.0.0.0:0"
	hour    = 3600
)

func plain(lifetime uint32) []byte { return message(alice, 1, flow.TCP, 80, lifetime, anyPort) }

// ask sends a message as client and returns result, lifetime and outside endpoint.
func (b *bench) ask(client string, m []byte) string {
	b.t.Helper()
	out := b.answerMessage(m, netip.MustParseAddr(client), "lan0", true)
	switch {
	case out == nil:
		return "silence"
	case out[0] != version || out[1] != m[1]|0x80 || out[2] != 0 || len(out) > max(len(m), headerSize) || len(out)%4 != 0 && len(out) != len(m):
		b.t.Fatalf("answer to % x:\n% x", m, out)
	case binary.BigEndian.Uint32(out[8:]) != uint32(max(b.now-b.epoch, 0)/time.Second):
		b.t.Fatalf("epoch of % x", out)
	}
	text := fmt.Sprintf("%s %d", result(out[3]), binary.BigEndian.Uint32(out[4:]))
	if out[3] == byte(success) && m[1] == byte(mapOp) {
		if !bytes.Equal(out[headerSize:headerSize+18], m[headerSize:headerSize+18]) {
			b.t.Fatalf("nonce, protocol or port of the answer are not those of the request:\n% x\n% x", m, out)
		}
		text += " " + netip.AddrPortFrom(netip.AddrFrom16([16]byte(out[44:60])).Unmap(), binary.BigEndian.Uint16(out[42:])).String()
	}
	return text
}

// edit returns a message with a byte changed.
func edit(m []byte, at int, to byte) []byte {
	m = slices.Clone(m)
	m[at] = to
	return m
}
