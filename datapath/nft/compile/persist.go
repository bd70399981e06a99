// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"time"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Defaults of persistence, as the configuration documents them.
const (
	defaultPersistTimeout = 5 * time.Minute
	defaultPersistSize    = 65536
)

// persistKey are the fields that identify a client.
func (p *part) persistKey() []rs.Selector {
	keys := p.persist.Key
	if len(keys) == 0 {
		keys = []config.PersistenceKey{config.KeySourceAddress}
	}
	sel := make([]rs.Selector, 0, len(keys))
	for _, k := range keys {
		switch k {
		case config.KeySourceAddress:
			sel = append(sel, rs.Source(p.family))
		case config.KeySourcePort:
			sel = append(sel, rs.SourcePort)
		case config.KeySourceMAC:
			sel = append(sel, rs.SourceMAC)
		case config.KeyDestAddress:
			sel = append(sel, rs.Dest(p.family))
		case config.KeyDestPort:
			sel = append(sel, rs.DestPort)
		case config.KeyDestMAC:
			sel = append(sel, rs.DestMAC)
		}
	}
	return sel
}

func (p *part) persistTimeout() time.Duration {
	if t := p.persist.Timeout.D(); t > 0 {
		return t
	}
	return defaultPersistTimeout
}

// memory makes the map of clients and the entries by which the number of a
// backend leads to its chain. Backends that take no new flows have none, so a
// client of theirs is scheduled again.
func (p *part) memory() {
	size := p.persist.Size
	if size == 0 {
		size = defaultPersistSize
	}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{
		ID: rs.ID{Table: p.table, Name: p.prefix + "/clients"}, Key: rs.Types(p.persistKey()), Data: []rs.Type{rs.Mark},
		Dynamic: true, Timeout: p.persistTimeout(), Size: size,
	})
	backends := rs.ID{Table: p.table, Name: p.prefix + "/backends"}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: backends, Key: []rs.Type{rs.Mark}, Verdicts: true})
	for _, i := range p.active {
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
			Set: backends, Key: rs.Number(p.backendID(i)).Raw,
			Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
		})
	}
}

// backendID is the number that the map of clients keeps for a backend: a hash of
// its key, so that memory survives reloads; of two backends with the same hash
// the later in the file takes the next number.
func (p *part) backendID(i int) uint32 {
	taken := make(map[uint32]bool, len(p.svc.Backends))
	for n, b := range p.svc.Backends {
		id := number(Key(b))
		for taken[id] {
			id++
		}
		if n == i {
			return id
		}
		taken[id] = true
	}
	return 0
}

// remember notes the client's backend, or renews the note.
func (p *part) remember(i int) rs.Rule {
	return p.rule().Remember(p.prefix+"/clients", p.persistTimeout(), rs.Number(p.backendID(i)), p.persistKey()...).Rule("")
}

// sessions pins clients by prefix; a client pinned to a backend that takes no
// new flows is scheduled like any other.
func (p *part) sessions() (rs.Rule, bool) {
	set := rs.ID{Table: p.table, Name: p.prefix + "/sessions"}
	found := false
	usable := make(map[string]int)
	for i, b := range p.svc.Backends {
		if p.svc.State[i] == 0 && familyOf(b.Address) == p.family {
			usable[backendName(b)] = i
		}
	}
	for _, s := range p.svc.Sessions {
		if familyOf(s.Client.Addr()) != p.family {
			continue
		}
		found = true
		i, ok := usable[s.Backend]
		if !ok {
			continue
		}
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
			Set: set, Key: rs.Addr(s.Client.Masked().Addr()).Raw, End: rs.Addr(rs.LastAddr(s.Client)).Raw,
			Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
		})
	}
	if !found {
		return rs.Rule{}, false
	}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{addrType(p.family)}, Verdicts: true, Interval: true})
	return p.rule().VerdictFrom(set.Name, rs.Source(p.family)).Rule(""), true
}
