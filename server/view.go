// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/flow"
)

// taggedConfig is a configuration and its entity tag.
type taggedConfig struct {
	config *config.Config
	tag    string
}

// etag identifies a configuration. The engine never modifies a configuration, so the tag of the one
// in force is computed once.
func (s *server) etag(c *config.Config) string {
	if last := s.tagged.Load(); last != nil && last.config == c {
		return last.tag
	}
	tag := tagOf(c)
	s.tagged.Store(&taggedConfig{c, tag})
	return tag
}

// tagOf returns the entity tag of a configuration.
func tagOf(c *config.Config) string {
	raw, err := config.Marshal(c)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(raw)
	return `"` + hex.EncodeToString(sum[:8]) + `"`
}

func (s *server) services(ctx context.Context, _ *struct{}) (*body[[]api.Service], error) {
	v := s.opt.Engine.View()
	counters, err := s.opt.Engine.Counters(ctx)
	if err != nil {
		return nil, err
	}
	count, drains := byName(counters), s.drains()
	list := make([]api.Service, 0, len(v.Services))
	for _, sv := range v.Services {
		list = append(list, serviceOf(sv, count, drains))
	}
	return &body[[]api.Service]{list}, nil
}

// serviceKey names a service of a datapath.
type serviceKey struct{ datapath, service string }

// byName finds the counters of services.
func byName(counters map[string]*datapath.Counters) map[serviceKey]*datapath.ServiceCounters {
	all := map[serviceKey]*datapath.ServiceCounters{}
	for name, c := range counters {
		for i := range c.Services {
			all[serviceKey{name, c.Services[i].Name}] = &c.Services[i]
		}
	}
	return all
}

func serviceOf(sv engine.ServiceView, counters map[serviceKey]*datapath.ServiceCounters, drains map[engine.Backend]control.Drain) api.Service {
	out := api.Service{
		Name: sv.Name, Protocol: sv.Protocol.String(), Mode: string(sv.Mode), Scheduler: string(sv.Scheduler),
		Datapath: strings.Join(sv.Place.Datapaths, ","), Why: sv.Place.Why, Active: -1,
	}
	for _, l := range sv.Listen {
		out.Listen = append(out.Listen, listenText(l))
	}
	count := map[string]datapath.BackendCounters{}
	if sc := counters[serviceKey{out.Datapath, sv.Name}]; sc != nil {
		out.Connections, out.Packets, out.Bytes, out.Refused, out.Active = sc.Connections, sc.Packets, sc.Bytes, sc.Refused, sc.Active
		for _, b := range sc.Backends {
			count[b.Name] = b
		}
	}
	active := sv.Service.Active()
	for i, b := range sv.Backends {
		bc := count[b.Name]
		out.Backends = append(out.Backends, api.Backend{
			Service: sv.Name, Name: b.Name, Address: netip.AddrPortFrom(b.Address, b.Port), Weight: b.Weight, Priority: b.Priority,
			State: sv.State[i].String(), InUse: slices.Contains(active, i), Why: sv.Why[i],
			Connections: bc.Connections, Active: bc.Active, Packets: bc.Packets, Bytes: bc.Bytes,
		})
		if d, ok := drains[engine.Backend{Service: sv.Name, Name: b.Name}]; ok {
			out.Backends[i].Drain = drainOf(d)
		}
	}
	return out
}

// followedText describes a listener on any address of an interface.
func followedText(l config.Listen) string {
	ports := make([]string, len(l.Ports))
	for i, p := range l.Ports {
		ports[i] = p.String()
	}
	if len(ports) == 0 {
		return "address of " + l.Interface
	}
	return fmt.Sprintf("address of %s:%s", l.Interface, strings.Join(ports, ","))
}

func listenText(l config.Listen) string {
	on := ""
	if !l.Address.IsValid() {
		return followedText(l)
	}
	if l.Interface != "" {
		on = " on " + l.Interface
	}
	if len(l.Ports) == 0 {
		return l.Address.String() + on
	}
	ports := make([]string, len(l.Ports))
	for i, p := range l.Ports {
		ports[i] = p.String()
	}
	address := l.Address.String()
	if l.Address.Is6() {
		address = "[" + address + "]"
	}
	return address + ":" + strings.Join(ports, ",") + on
}

type serviceInput struct {
	Service string `path:"service"`
}

func (s *server) service(ctx context.Context, in *serviceInput) (*body[api.Service], error) {
	all, err := s.services(ctx, nil)
	if err != nil {
		return nil, err
	}
	for _, sv := range all.Body {
		if sv.Name == in.Service {
			return &body[api.Service]{sv}, nil
		}
	}
	return nil, huma.Error404NotFound("there is no service " + in.Service)
}

func (s *server) backends(ctx context.Context, _ *struct{}) (*body[[]api.Backend], error) {
	all, err := s.services(ctx, nil)
	if err != nil {
		return nil, err
	}
	list := []api.Backend{}
	for _, sv := range all.Body {
		list = append(list, sv.Backends...)
	}
	return &body[[]api.Backend]{list}, nil
}

func (s *server) natRules(ctx context.Context, _ *struct{}) (*body[[]api.NATRule], error) {
	v := s.opt.Engine.View()
	counters, err := s.opt.Engine.Counters(ctx)
	if err != nil {
		return nil, err
	}
	list := []api.NATRule{}
	if v.Config == nil {
		return &body[[]api.NATRule]{list}, nil
	}
	for i := range v.Config.NAT {
		n := &v.Config.NAT[i]
		rule := api.NATRule{Name: n.Name, Type: string(n.Type), Summary: summary(n), Datapath: strings.Join(v.NAT[i].Datapaths, ","), Why: v.NAT[i].Why}
		if c := counters[rule.Datapath]; c != nil {
			for _, rc := range c.NAT {
				if rc.Name == n.Name {
					rule.Packets, rule.Bytes = rc.Packets, rc.Bytes
				}
			}
		}
		list = append(list, rule)
	}
	return &body[[]api.NATRule]{list}, nil
}

func (s *server) interfaces(context.Context, *struct{}) (*body[[]api.Interface], error) {
	list := []api.Interface{}
	for _, a := range s.opt.Engine.View().Attachments {
		list = append(list, api.Interface{Name: a.Interface, Kind: a.Kind, Hooks: append([]string{}, a.Hooks...), Why: a.Why})
	}
	return &body[[]api.Interface]{list}, nil
}

func (s *server) addresses(context.Context, *struct{}) (*body[[]api.Address], error) {
	list := []api.Address{}
	for _, a := range s.opt.Engine.View().Addresses {
		list = append(list, api.Address{Address: a.Range(), Owners: a.Owners, State: string(a.State), Interface: a.Interface, Station: a.Station, Why: a.Why})
	}
	return &body[[]api.Address]{list}, nil
}

func (s *server) nodes(context.Context, *struct{}) (*body[[]api.Node], error) {
	view := s.opt.Engine.View()
	list := []api.Node{}
	if view.Config == nil {
		return &body[[]api.Node]{list}, nil
	}
	texts := func(ranges []config.AddressRange) []string {
		list := []string{}
		for _, r := range ranges {
			list = append(list, r.String())
		}
		return list
	}
	pools := view.Config.DividedPools()
	for i, n := range view.Config.Nodes() {
		node := api.Node{Name: n.Name, Address: n.Address.String(), This: n.Name == view.Node, Pools: []api.NodeShare{}}
		switch node.Shared = s.sharedNode(n.Name); {
		case node.This:
			node.State = nodeState(view)
		case node.Shared != nil && node.Shared.Live:
			node.State = drainText(s.opt.Cluster.Peers()[n.Name].Drains)
		}
		for _, p := range pools {
			node.Pools = append(node.Pools, api.NodeShare{Owner: p.Owner, Addresses: texts(p.Shares[i].Own), Backup: texts(p.Shares[i].Backup)})
		}
		list = append(list, node)
	}
	return &body[[]api.Node]{list}, nil
}

func (s *server) uplinks(context.Context, *struct{}) (*body[[]api.Uplink], error) {
	return &body[[]api.Uplink]{uplinkList(s.opt.Engine.View())}, nil
}

func uplinkList(v engine.View) []api.Uplink {
	list := []api.Uplink{}
	for _, u := range v.Uplinks {
		list = append(list, api.Uplink{Name: u.Name, Interface: u.Interface, State: string(u.State), Priority: u.Priority, Weight: u.Weight,
			Addresses: append([]netip.Addr{}, u.Addresses...), Gateways: append([]netip.Addr{}, u.Gateways...), Table: u.Table, Mark: u.Mark,
			ShareIPv4: u.Share[0], ShareIPv6: u.Share[1], Since: u.Since, Why: u.Why})
	}
	return list
}

func (s *server) announcements(context.Context, *struct{}) (*body[[]api.Announcement], error) {
	list := []api.Announcement{}
	for _, a := range s.opt.Engine.View().Announcements {
		list = append(list, api.Announcement{Address: announce.Short(a.Prefix), Owners: a.Owners, State: string(a.State), Table: a.Table, Metric: a.Metric, Since: a.Since, Why: a.Why})
	}
	return &body[[]api.Announcement]{list}, nil
}

func (s *server) mappings(context.Context, *struct{}) (*body[[]api.Mapping], error) {
	list := []api.Mapping{}
	if s.opt.Mappings != nil {
		for _, m := range s.opt.Mappings() {
			list = append(list, api.Mapping{Rule: m.Rule, Protocol: m.Protocol.String(), Inside: m.Inside, Outside: m.Outside, Expires: m.Expires.Seconds()})
		}
	}
	return &body[[]api.Mapping]{list}, nil
}

// summary describes a NAT rule in one line.
func summary(n *config.NATRule) string {
	join := func(list any) string { return strings.Trim(strings.ReplaceAll(fmt.Sprint(list), " ", ","), "[]") }
	switch {
	case n.Type.Forwards():
		to := n.To.Address.String()
		if n.To.Port != 0 {
			to = netip.AddrPortFrom(n.To.Address, n.To.Port).String()
		}
		if n.Shift() != 0 {
			to += fmt.Sprintf("-%d", n.Target(n.Listen.Ports[0].Last).Port())
		}
		return fmt.Sprintf("%s %s -> %s", n.Protocol, listenText(*n.Listen), to)
	case n.Type.OneToOne():
		return fmt.Sprintf("%s <-> %s", n.Internal, n.External)
	case n.Type.CrossesStateful():
		return fmt.Sprintf("%s via %s -> %s", cmp.Or(join(n.Source), "any source"), n.Prefix, join(n.Pool))
	case n.Type.CrossesStateless():
		if !n.Prefix.IsValid() {
			return countExplicit(len(n.EAM))
		}
		return fmt.Sprintf("%s, %s", n.Prefix, countExplicit(len(n.EAM)))
	case n.Type == config.NATSNAT:
		return fmt.Sprintf("%s -> %s", cmp.Or(join(n.Source), "any source"), join(n.To.Addresses))
	}
	return fmt.Sprintf("%s out %s", cmp.Or(join(n.Source), "any source"), cmp.Or(string(n.Out), "of any interface"))
}

// countExplicit counts the explicit address mappings of a siit rule.
func countExplicit(n int) string {
	if n == 1 {
		return "1 explicit mapping"
	}
	return fmt.Sprintf("%d explicit mappings", n)
}

// listPlacements lists the datapath of each object in a view.
func listPlacements(v engine.View) []api.Placement {
	var list []api.Placement
	if v.Config == nil {
		return list
	}
	add := func(kind, name string, p engine.Place) {
		list = append(list, api.Placement{Kind: kind, Name: name, Datapath: strings.Join(p.Datapaths, ","), Why: p.Why})
	}
	for i, s := range v.Config.Services {
		add("service", s.Name, v.Services[i].Place)
	}
	for i, n := range v.Config.NAT {
		add("nat", n.Name, v.NAT[i])
	}
	for i, r := range v.Config.Firewall.Rules {
		name := r.Name
		if name == "" {
			name = fmt.Sprintf("%d (%s)", i+1, r.Action)
		}
		add("rule", name, v.Rules[i])
	}
	return list
}

// Outcome returns the wire form of a forecast. The command line uses it without a daemon.
func Outcome(f *engine.Forecast) api.Outcome {
	return api.Outcome{Changes: f.Changes, Places: listPlacements(f.Places), FlowsMoved: f.Flows, FlowsTotal: f.FlowsTotal}
}

type explainInput struct {
	Protocol  string `query:"protocol" required:"true" minLength:"1"`
	Source    string `query:"source" required:"true" minLength:"1" doc:"address:port; of a protocol without ports an address"`
	Dest      string `query:"destination" required:"true" minLength:"1" doc:"the same"`
	Interface string `query:"interface" doc:"where the packet arrives; default the one by which its source would be answered"`
	Size      int    `query:"size" minimum:"0" maximum:"65535"`
}

func (s *server) explain(ctx context.Context, in *explainInput) (*body[*datapath.Explanation], error) {
	q := datapath.Question{Interface: in.Interface, Size: in.Size}
	var err error
	if q.Tuple.Protocol, err = flow.ParseProtocol(in.Protocol); err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	if q.Tuple.Source, err = q.Tuple.Protocol.ParseEnd(in.Source); err != nil {
		return nil, huma.Error422UnprocessableEntity("source " + err.Error())
	}
	if q.Tuple.Dest, err = q.Tuple.Protocol.ParseEnd(in.Dest); err != nil {
		return nil, huma.Error422UnprocessableEntity("destination " + err.Error())
	}
	answer, err := s.opt.Engine.Explain(ctx, q)
	if err != nil {
		return nil, statusError(err)
	}
	return &body[*datapath.Explanation]{answer}, nil
}
