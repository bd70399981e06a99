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

// Documented defaults of persistence.
const (
	defaultPersistTimeout = 5 * time.Minute
	defaultPersistSize    = 65536
)

// clientKey returns the fields that identify a client.
func (p *servicePart) clientKey() []rs.Selector {
	key, _ := p.keyFields(packetFields(p.family))
	return key
}

// quotedKey returns the same fields of a client's packet, read from the reply that an ICMP error
// quotes. It returns false if the key has a hardware address, because it is not quoted.
func (p *servicePart) quotedKey() ([]rs.Selector, bool) {
	key, hardware := p.keyFields(quotedFields(p.family))
	return key, !hardware
}

func (p *servicePart) keyFields(at fields) (sel []rs.Selector, hardware bool) {
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

func (p *servicePart) persistTimeout() time.Duration {
	if t := p.persist.Timeout.D(); t > 0 {
		return t
	}
	return defaultPersistTimeout
}

// persistentBackends returns the backends that remembered clients return to. A draining backend is
// excluded, so that its clients are scheduled again. In mode dsr the memory is the only flow state,
// and flows continue during a drain, so that the backend is included.
func (p *servicePart) persistentBackends() []int {
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

// recallRules returns the rules that send a packet to the client's backend. If draining backends are
// included, a SYN is a new connection and uses only the backends that take new flows.
func (p *servicePart) recallRules() []rs.Rule {
	from := func(when *rs.Builder, set string) rs.Rule {
		return when.Recall(p.prefix+"/clients", p.clientKey()...).VerdictFrom(p.prefix+set, rs.Priority).Rule("")
	}
	if !p.newFlowsDiffer() {
		return []rs.Rule{from(p.rule(), "/backends")}
	}
	const mask, syn, text = 0x16, 0x02, "tcp flags & (syn|rst|ack) == syn"
	return []rs.Rule{from(p.rule().TCPFlags(mask, syn, text), "/open"),
		from(p.rule().TCPFlagsNot(mask, syn, "tcp flags & (syn|rst|ack) != syn"), "/backends")}
}

// newFlowsDiffer reports whether new connections of remembered clients may use fewer backends than
// existing ones.
func (p *servicePart) newFlowsDiffer() bool {
	return p.svc.Protocol == flow.TCP && len(p.persistentBackends()) > len(p.active)
}

// memory makes the map from clients to backend numbers, and the map from these numbers to chains.
func (p *servicePart) memory() {
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
	p.addBackends(backends, p.persistentBackends())
	if p.newFlowsDiffer() {
		open := rs.ID{Table: p.table, Name: p.prefix + "/open"}
		p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: open, Key: []rs.Type{rs.Mark}, Verdicts: true})
		p.addBackends(open, p.active)
	}
}

// addBackends adds the elements that map the numbers of backends to their chains.
func (p *servicePart) addBackends(set rs.ID, backends []int) {
	for _, i := range backends {
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
			Set: set, Key: rs.Number(p.backendID(i)).Raw, Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
		})
	}
}

// backendID returns the number of a backend in the map of clients. It is a hash of the backend's
// key, so that the memory survives reloads. If two backends have the same hash, the later one in
// the file gets the next number.
func (p *servicePart) backendID(i int) uint32 {
	taken := make(map[uint32]bool, len(p.svc.Backends))
	for n, b := range p.svc.Backends {
		id := number(b.Key()) | 1<<31 // differs from every priority of an incoming packet
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

// storeBackend returns the rule that stores or refreshes the client's backend.
func (p *servicePart) storeBackend(i int) rs.Rule {
	return p.rule().Remember(p.prefix+"/clients", p.persistTimeout(), rs.Number(p.backendID(i)), p.clientKey()...).ResetPriority().Rule("")
}

// sessions returns the rule that pins clients by prefix. A client is scheduled as usual if its
// backend takes no new flows.
func (p *servicePart) sessions() (rs.Rule, bool) {
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
		for _, r := range subtractRanges(whole, taken) {
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

// longestFirst orders sessions by decreasing prefix length. The longest prefix has precedence, and
// the kernel's interval maps reject overlaps.
func longestFirst(sessions []config.Session) []config.Session {
	sorted := slices.Clone(sessions)
	slices.SortStableFunc(sorted, func(a, b config.Session) int { return b.Client.Bits() - a.Client.Bits() })
	return sorted
}

// subtractRanges returns the parts of a range that are in none of the others.
func subtractRanges(r config.AddressRange, others []config.AddressRange) []config.AddressRange {
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
