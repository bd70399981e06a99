// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// amend compiles only the services that differ from the previous result, and takes over the rest. A
// change of backends then does not collect the shared parts of thousands of other services again.
// It returns nil if the shared sets or rules change, so that everything has to be compiled.
func (c *compiler) amend(previous *Result) (*Result, error) {
	if previous == nil || !c.sameButServices(previous) {
		return nil, nil
	}
	is := c.snapshot.Services
	r := *previous
	r.from = c.source()
	fragments := slices.Clone(previous.Ruleset.Fragments)
	r.Services, r.Ruleset = slices.Clone(previous.Services), &rs.Ruleset{Fragments: fragments}
	serversChanged := false // the set of servers changes
	for i := range is {
		old := previous.Services[i]
		if old.Name != is[i].Name {
			return nil, nil
		}
		if old.isCurrent(&is[i]) {
			continue
		}
		if !sameListeners(&old.source, is[i].Service) || !previous.ids.keepsNumbers(&old.source, is[i].Service) {
			return nil, nil
		}
		compiled, err := c.service(i, old.id)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", is[i].Name, err)
		}
		if !compiled.sharesAs(old) {
			return nil, nil
		}
		serversChanged = serversChanged || !samePeers(&old.source, is[i].Service)
		r.Services[i], fragments[firstService+i] = compiled, compiled.Fragment
	}
	p := *previous.peers
	p.snapshot = c.snapshot
	if serversChanged {
		if err := c.checkReplies(r.base); err != nil {
			return nil, err
		}
		had := len(p.used)
		p.servers = c.servers(r.base)
		p.indexSets()
		if len(p.used) != had || !slices.EqualFunc(p.servers.Sets, previous.peers.servers.Sets, (*rs.Set).Equal) {
			return nil, nil // rules depend on the sets that exist
		}
		fragments[2] = p.servers
	}
	r.peers = &p
	return &r, nil
}

// firstService is the index of the fragment of the first service. The shared fragments precede it.
const firstService = 3

// sharesAs reports whether two services add the same elements, marks and replies to the shared
// parts.
func (s *Service) sharesAs(o *Service) bool {
	return slices.Equal(s.uses, o.uses) && slices.Equal(s.marks, o.marks) && slices.Equal(s.reply, o.reply) && slices.Equal(s.members, o.members)
}

// source is the input of a compilation without the services of the configuration.
type source struct {
	snapshot *datapath.Snapshot // Listeners have resolved addresses.
	resolved bool               // The address of a listener was resolved.
	config   config.Config      // A copy without services.
	env      Env
}

func (c *compiler) source() source {
	s := source{c.snapshot, c.resolved, *c.snapshot.Config, c.env}
	s.config.Services = nil
	return s
}

// sameButServices reports whether the input differs from the previous one in services only. If
// another datapath has services too, all services must also have kept their listeners.
func (c *compiler) sameButServices(previous *Result) bool {
	was, is := previous.from, c.source()
	if len(was.snapshot.Services) != len(is.snapshot.Services) || !sameHosts(&was.env, &is.env) ||
		!datapath.SameUplinks(was.snapshot.Uplinks, is.snapshot.Uplinks) || !sameRules(was.snapshot.NAT, is.snapshot.NAT) || !sameRules(was.snapshot.Rules, is.snapshot.Rules) {
		return false
	}
	if slices.ContainsFunc(is.snapshot.NAT, func(n *config.NATRule) bool { return n.Type.ChecksumNeutral() }) {
		return false // npt66 depends on the IPv6 addresses of services and backends
	}
	all := is.snapshot.Config.Services
	carriesAll := len(is.snapshot.Services) == len(all) && !was.resolved && !is.resolved
	return len(was.snapshot.Config.Services) == len(all) && (carriesAll || sameOfAll(was.snapshot.Config, is.snapshot.Config, sameListeners)) &&
		reflect.DeepEqual(was.config, is.config)
}

// sameHosts reports whether two hosts compile to the same ruleset.
func sameHosts(a, b *Env) bool {
	return slices.Equal(a.Interfaces, b.Interfaces) && slices.Equal(a.Networks, b.Networks) && reflect.DeepEqual(a.Sources, b.Sources) &&
		a.Flowtable == b.Flowtable && a.Defragments == b.Defragments && a.FIB == b.FIB && a.Timeouts == b.Timeouts
}
