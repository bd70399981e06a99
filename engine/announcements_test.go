// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// routers is an Announcer that stores the last request.
type routers struct {
	request *announce.Request
	end     string
	note    func(*announce.Request) // called by Set; may be nil
}

func (r *routers) Set(q *announce.Request) (*datapath.Change, error) {
	r.request = q
	if r.note != nil {
		r.note(q)
	}
	return &datapath.Change{Datapath: "announcements", Objects: datapath.Count{Added: 1}}, nil
}

func (r *routers) Plan(q *announce.Request) (*datapath.Change, error) {
	return &datapath.Change{Datapath: "announcements", Lines: []string{text(q)}, Objects: datapath.Count{Added: 1}}, nil
}

func (r *routers) Statuses() []announce.Status { return nil }
func (r *routers) Release(keep bool) error     { r.end = fmt.Sprint(keep); return nil }

// text lists the addresses of a request with the reasons for their withdrawal.
func text(q *announce.Request) string {
	if q == nil {
		return "nothing"
	}
	var list []string
	for _, a := range q.Addresses {
		line := announce.Short(a.Prefix)
		if a.Unknown {
			line += "?"
		}
		if a.Why != "" {
			line += " (" + a.Why + ")"
		}
		list = append(list, line)
	}
	return strings.Join(list, ", ")
}

const announced = `
cluster: {announce: {}}
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1}, {name: c, address: 10.0.0.3}], check: {type: tcp, port: 80}}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: v6, address: "fd00::1"}], check: {type: tcp, port: 80}}
  - {name: api, listen: [{address: 192.0.2.10, ports: [81]}], protocol: tcp, mode: fullnat, source-pool: [192.0.2.64-192.0.2.70], backends: [{name: b, address: 10.0.0.2}], check: {type: tcp, port: 80}}
  - {name: own, listen: [{interface: wan0, ports: [82]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1}]}
nat:
  - {name: out, type: snat, source: [10.0.0.0/8], to: [198.51.100.0-198.51.100.9]}
`

func announcing(t *testing.T, text string, up ...string) (*Engine, *routers, health, *fake, func(string) *config.Config) {
	t.Helper()
	fast, slow := pair()
	h, r := all(up...), &routers{}
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Health: h, Announcer: r, Settle: 1})
	decode := func(text string) *config.Config {
		t.Helper()
		c, err := config.Decode("test.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if _, err := e.Apply(t.Context(), decode(text)); err != nil {
		t.Fatal(err)
	}
	return e, r, h, fast, decode
}

// TestAnnouncements follows backends, the operator's states and the datapath.
func TestAnnouncements(t *testing.T) {
	const pools = ", 192.0.2.64/30, 192.0.2.68/31, 192.0.2.70, 198.51.100.0/29, 198.51.100.8/31, 2001:db8::10"
	down := func(why string) string {
		return strings.NewReplacer("/30", "/30"+why, "/31, 192", "/31"+why+", 192", ".70", ".70"+why).Replace(pools)
	}
	e, r, h, fast, _ := announcing(t, announced, "a", "b", "c", "v6")
	check := func(what, want string) {
		t.Helper()
		if err := e.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := text(r.request); got != want {
			t.Errorf("%s:\n got %s\nwant %s", what, got, want)
		}
	}
	check("all are up", "192.0.2.10"+pools)
	if r.request.Table != 5100 || r.request.Protocol != 76 || r.request.Metric != 10 || len(r.request.Interfaces) > 0 {
		t.Errorf("request %+v", r.request)
	}
	h.set("b", false)
	check("one of two services of an address is down", "192.0.2.10"+down(" (no backend of service api is usable)"))
	h.set("a", false)
	check("one backend is left", "192.0.2.10"+down(" (no backend of service api is usable)"))
	settle := func(want time.Duration) {
		t.Helper()
		if got := r.request.Addresses[0].Settle; got != want {
			t.Errorf("settle %s, want %s", got, want)
		}
	}
	settle(3 * time.Second) // the interval and the timeout of the check
	h.set("c", false)
	h.set("v6", false)
	check("all are down", "192.0.2.10 (no backend of service web is usable; no backend of service api is usable)"+
		strings.Replace(down(" (no backend of service api is usable)"), "::10", "::10 (no backend of service web6 is usable)", 1))
	for _, b := range []string{"a", "b", "c", "v6"} {
		h.set(b, true)
	}
	for _, b := range []string{"a", "c"} {
		if err := e.SetState(t.Context(), "web", b, datapath.Drain); err != nil {
			t.Fatal(err)
		}
	}
	check("backends that drain have connections", "192.0.2.10"+pools)
	if _, err := e.ApplyStates(t.Context(), e.Config(), []Override{{State: datapath.Drain, Why: "drain"}}); err != nil {
		t.Fatal(err)
	}
	check("the gateway drains", "192.0.2.10 (the gateway drains)"+strings.Replace(down(" (the gateway drains)"), "::10", "::10 (the gateway drains)", 1))
	if _, err := e.ApplyStates(t.Context(), e.Config(), nil); err != nil {
		t.Fatal(err)
	}
	check("after the drain", "192.0.2.10"+pools)
	settle(0) // all backends are up
	if _, err := e.ApplyStates(t.Context(), e.Config(), []Override{{Node: true}}); err != nil {
		t.Fatal(err)
	}
	if got := e.View(); !got.NodeDrains || got.Services[0].State[0] != datapath.Up {
		t.Errorf("a draining node: %+v", got)
	}
	check("the node drains", "192.0.2.10 (the node drains)"+strings.Replace(down(" (the node drains)"), "::10", "::10 (the node drains)", 1))
	h.set("v6", false)
	if r.request.Addresses[len(r.request.Addresses)-1].Unknown {
		t.Error("the state of backends decides about an address of a draining node")
	}
	h.set("v6", true)
	if _, err := e.ApplyStates(t.Context(), e.Config(), nil); err != nil {
		t.Fatal(err)
	}
	if got := text(r.request); got != "192.0.2.10"+pools { // without a refresh
		t.Errorf("after the drain of the node: %s", got)
	}

	// A datapath that cannot be repaired once may still carry packets.
	for i, want := range []bool{true, false, false} {
		fast.touched, fast.fail = true, errors.New("out of memory")
		if e.repair(t.Context()) == nil {
			t.Error("the repair succeeded")
		}
		if got := !strings.Contains(text(r.request), "missing"); got != want {
			t.Errorf("repair %d: %s", i, text(r.request))
		}
	}
	if got := text(r.request); !strings.HasSuffix(got, "2001:db8::10 (the rules of datapath ebpf are missing and cannot be put back)") || strings.Count(got, "(") != 7 || !strings.HasPrefix(got, "192.0.2.10 (the rules") {
		t.Errorf("without rules: %s", got)
	}
	if err := e.repair(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("after the repair", "192.0.2.10"+pools)
	for range 3 { // if the apply after a network change fails, the present rules remain
		fast.fail = errors.New("no such device")
		_ = e.reapplyWhere(t.Context(), 0, "", func(datapath.Datapath) (bool, error) { return true, nil })
	}
	check("after failed applies", "192.0.2.10"+pools)
}

// TestAnnouncementsOfUnprobedBackends are unknown: after a restart the routes stay.
func TestAnnouncementsOfUnprobedBackends(t *testing.T) {
	_, r, _, _, _ := announcing(t, announced, "b")
	if got, want := text(r.request), "192.0.2.10"; !strings.HasPrefix(got, want+",") {
		t.Errorf("an address with a usable service: %s", got)
	}
	if got, want := text(r.request), "2001:db8::10? (no backend of service web6 is usable)"; !strings.HasSuffix(got, want) {
		t.Errorf("an address without a probe: %s", got)
	}
}

// TestAnnouncementsOfTheConfiguration are planned, follow the file, and end with the engine.
func TestAnnouncementsOfTheConfiguration(t *testing.T) {
	e, r, _, _, decode := announcing(t, strings.Replace(announced, "{}", "{interfaces: [lan0], metric: 100}", 1)+"interfaces: [wan0]\n", "a", "b", "c", "v6")
	if got := fmt.Sprint(r.request.Interfaces, r.request.Metric); got != "[lan0] 100" {
		t.Errorf("interfaces and metric: %s", got)
	}
	f, err := e.Forecast(t.Context(), decode("cluster: {announce: {}}\ninterfaces: [wan0]\nservices:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: []}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(f.Changes, func(c *datapath.Change) bool { return c.Datapath == "announcements" }); i < 0 || f.Changes[i].Lines[0] != "192.0.2.10 (no backend of service web is usable)" {
		t.Errorf("forecast %+v", f.Changes)
	}
	applied, err := e.Apply(t.Context(), decode("cluster: {announce: {}}\ninterfaces: [wan0]\n"))
	if err != nil || !slices.Equal(r.request.Interfaces, []string{"wan0"}) || applied.Changes[len(applied.Changes)-1].Datapath != "announcements" {
		t.Errorf("%v: request %+v, changes %v", err, r.request, applied.Changes)
	}
	if _, err := e.Apply(t.Context(), decode("{}")); err != nil || r.request != nil {
		t.Errorf("%v: without the key: %s", err, text(r.request))
	}
	if err := e.Stop(context.Background(), true); err != nil || r.end != "true" {
		t.Errorf("stop: %v, keep %s", err, r.end)
	}
}

// TestDrainWithdrawsFirst: the routers use other gateways before the datapath refuses new flows. A drain that the
// datapath refuses withdraws nothing.
func TestDrainWithdrawsFirst(t *testing.T) {
	e, r, _, fast, _ := announcing(t, announced, "a", "b", "c", "v6")
	drain := []Override{{State: datapath.Drain}}
	applied, first := len(fast.applied), ""
	r.note = func(q *announce.Request) {
		if first == "" {
			first = fmt.Sprintf("%d %s", len(fast.applied)-applied, text(q))
		}
	}
	fast.fail = errRefused
	if _, err := e.ApplyStates(t.Context(), e.Config(), drain); !errors.Is(err, errRefused) || strings.Contains(text(r.request), "drains") {
		t.Errorf("%v: after a refused drain: %s", err, text(r.request))
	}
	applied, first = len(fast.applied), ""
	if _, err := e.ApplyStates(t.Context(), e.Config(), drain); err != nil || !strings.HasPrefix(first, "0 192.0.2.10 (the gateway drains") {
		t.Errorf("%v: the first announcement is %s", err, first)
	}
}

// TestNodes applies one configuration at two nodes. Each uses its own pool addresses, and announces the ones of the
// other with a higher metric. A host that is no node changes nothing.
func TestNodes(t *testing.T) {
	cfg, err := config.Decode("test.yaml", []byte(`
cluster: {announce: {}, nodes: [{name: n1, address: 10.0.0.1}, {name: n2, address: 10.0.0.2}]}
nat: [{name: out, type: snat, source: [10.0.0.0/8], to: [198.51.100.0/30], out: wan0}]
`))
	if err != nil {
		t.Fatal(err)
	}
	owner := map[string]string{}
	for _, node := range []string{"n1", "n2"} {
		fast, slow := pair()
		r := &routers{}
		e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Announcer: r, Node: func(*config.Config) (string, error) { return node, nil }})
		if _, err := e.Apply(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		applied := e.inForce[e.plan.nat[0].Datapaths[0]].NAT[0]
		for _, a := range r.request.Addresses {
			own := slices.ContainsFunc(applied.To.Addresses, func(p config.AddressRange) bool { return p.Contains(a.Prefix.Addr()) })
			if metric := cmp.Or(a.Metric, r.request.Metric); own && metric != 10 || !own && metric != 100 {
				t.Errorf("%s announces %s with metric %d, own: %v", node, a.Prefix, metric, own)
			}
			for x := a.Prefix.Addr(); own && a.Prefix.Contains(x); x = x.Next() {
				owner[x.String()] += node
			}
		}
		if v := e.View(); v.Node != node || len(v.Config.NAT[0].To.Addresses) != 1 {
			t.Errorf("the view of %s: node %q, pool %v", node, v.Node, v.Config.NAT[0].To.Addresses)
		}
	}
	for i := range 4 {
		if n := owner[fmt.Sprintf("198.51.100.%d", i)]; len(n) != 2 {
			t.Errorf("address %d belongs to %q", i, n)
		}
	}
	fast, slow := pair()
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Node: func(*config.Config) (string, error) { return "", errors.New("no node") }})
	if _, err := e.Apply(t.Context(), cfg); err == nil || e.Config() != nil {
		t.Errorf("a host that is no node applies the configuration: %v", err)
	}
	if _, err := e.Forecast(t.Context(), cfg); err == nil {
		t.Error("a host that is no node plans the configuration")
	}
}
