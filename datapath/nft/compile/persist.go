// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Defaults of persistence, as the configuration documents them.
const (
	defaultPersistTimeout = 5 * time.Minute
	defaultPersistSize    = 65536
)

// clientKey are the fields that identify a client.
func (p *part) clientKey() []rs.Selector {
	key, _ := p.keyFields(packetFields(p.family))
	return key
}

// quotedKey are the same fields of a client's packet, by the answer to it that an ICMP error quotes; false if the key
// has a hardware address, which is not quoted.
func (p *part) quotedKey() ([]rs.Selector, bool) {
	key, hardware := p.keyFields(quotedFields(p.family))
	return key, !hardware
}

func (p *part) keyFields(at fields) (sel []rs.Selector, hardware bool) {
	keys := p.persist.Key
	if len(keys) == 0 {
		keys = []config.PersistenceKey{config.KeySourceAddress}
	}
	for _, k := range keys {
		switch k {
		case config.KeySourceAddress:
			sel = append(sel, at.source)
		case config.KeySourcePort:
			sel = append(sel, at.sourcePort)
		case config.KeySourceMAC:
			sel, hardware = append(sel, rs.SourceMAC), true
		case config.KeyDestAddress:
			sel = append(sel, at.dest)
		case config.KeyDestPort:
			sel = append(sel, at.destPort)
		case config.KeyDestMAC:
			sel, hardware = append(sel, rs.DestMAC), true
		}
	}
	return sel, hardware
}

func (p *part) persistTimeout() time.Duration {
	if t := p.persist.Timeout.D(); t > 0 {
		return t
	}
	return defaultPersistTimeout
}

// remembered are the backends that clients in the memory are sent to. One that takes no
// new flows is not among them, so that its clients are scheduled again; but in mode dsr
// the memory is all there is of a flow, and flows outlive a drain.
func (p *part) remembered() []int {
	if p.svc.Mode != config.ModeDSR {
		return p.active
	}
	var list []int
	for i, b := range p.svc.Backends {
		if familyOf(b.Address) == p.family && p.svc.State[i] != datapath.Down {
			list = append(list, i)
		}
	}
	return list
}

// recall are the rules that send a packet to its client's backend. Where flows outlive a drain, a
// SYN is a new connection, and goes to a backend that takes some.
func (p *part) recall() []rs.Rule {
	from := func(when *rs.Builder, set string) rs.Rule {
		return when.Recall(p.prefix+"/clients", p.clientKey()...).VerdictFrom(p.prefix+set, rs.Priority).Rule("")
	}
	if !p.opensApart() {
		return []rs.Rule{from(p.rule(), "/backends")}
	}
	const mask, syn, text = 0x16, 0x02, "tcp flags & (syn|rst|ack) == syn"
	return []rs.Rule{from(p.rule().TCPFlags(mask, syn, text), "/open"),
		from(p.rule().TCPFlagsNot(mask, syn, "tcp flags & (syn|rst|ack) != syn"), "/backends")}
}

// opensApart reports whether new connections of remembered clients go to fewer backends than the
// others.
func (p *part) opensApart() bool {
	return p.svc.Protocol == flow.TCP && len(p.remembered()) > len(p.active)
}

// memory makes the map of clients and the entries by which the number of a
// backend leads to its chain.
func (p *part) memory() {
	if p.persist == nil {
		return
	}
	size := p.persist.Size
	if size == 0 {
		size = defaultPersistSize
	}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{
		ID: rs.ID{Table: p.table, Name: p.prefix + "/clients"}, Key: rs.Types(p.clientKey()), Data: []rs.Type{rs.Mark},
		Dynamic: true, Timeout: p.persistTimeout(), Size: size,
	})
	backends := rs.ID{Table: p.table, Name: p.prefix + "/backends"}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: backends, Key: []rs.Type{rs.Mark}, Verdicts: true})
	p.lead(backends, p.remembered())
	if p.opensApart() {
		open := rs.ID{Table: p.table, Name: p.prefix + "/open"}
		p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: open, Key: []rs.Type{rs.Mark}, Verdicts: true})
		p.lead(open, p.active)
	}
}

// lead has the numbers of backends lead to their chains.
func (p *part) lead(set rs.ID, backends []int) {
	for _, i := range backends {
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
			Set: set, Key: rs.Number(p.backendID(i)).Raw, Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
		})
	}
}

// backendID is the number that the map of clients keeps for a backend: a hash of
// its key, so that memory survives reloads; of two backends with the same hash
// the later in the file takes the next number.
func (p *part) backendID(i int) uint32 {
	taken := make(map[uint32]bool, len(p.svc.Backends))
	for n, b := range p.svc.Backends {
		id := number(b.Key()) | 1<<31 // unlike any priority that a packet has on arrival
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
	return p.rule().Remember(p.prefix+"/clients", p.persistTimeout(), rs.Number(p.backendID(i)), p.clientKey()...).ResetPriority().Rule("")
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
	var taken []config.AddressRange
	for _, s := range longestFirst(p.svc.Sessions) {
		if familyOf(s.Client.Addr()) != p.family {
			continue
		}
		found = true
		i, ok := usable[s.Backend]
		whole := config.AddressRange{First: s.Client.Masked().Addr(), Last: rs.LastAddr(s.Client)}
		for _, r := range without(whole, taken) {
			if ok {
				p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
					Set: set, Key: rs.Addr(r.First).Raw, End: rs.Addr(r.Last).Raw,
					Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
				})
			}
		}
		taken = append(taken, whole)
	}
	if !found {
		return rs.Rule{}, false
	}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{addrType(p.family)}, Verdicts: true, Interval: true})
	return p.rule().VerdictFrom(set.Name, rs.Source(p.family)).Rule(""), true
}

// longestFirst orders sessions so that the more special prefix comes first: the
// kernel's interval maps take no overlaps, and it is the one that counts.
func longestFirst(sessions []config.Session) []config.Session {
	sorted := slices.Clone(sessions)
	slices.SortStableFunc(sorted, func(a, b config.Session) int { return b.Client.Bits() - a.Client.Bits() })
	return sorted
}

// without returns what is left of a range after others were taken out of it.
func without(r config.AddressRange, others []config.AddressRange) []config.AddressRange {
	left := []config.AddressRange{r}
	for _, o := range others {
		var next []config.AddressRange
		for _, l := range left {
			if o.Last.Less(l.First) || l.Last.Less(o.First) {
				next = append(next, l)
				continue
			}
			if l.First.Less(o.First) {
				next = append(next, config.AddressRange{First: l.First, Last: o.First.Prev()})
			}
			if o.Last.Less(l.Last) {
				next = append(next, config.AddressRange{First: o.Last.Next(), Last: l.Last})
			}
		}
		left = next
	}
	return left
}
