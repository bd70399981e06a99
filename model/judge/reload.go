// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

// variants is the number of other configurations of a scenario. Each may need its own programs, and
// their verification takes about a second.
const variants = 12

// reload is another configuration of a scenario.
type reload struct {
	name   string // section name in a packet case
	yaml   string
	config *config.Config
}

// reloads returns typical changes of the scenario's configuration by an operator. The first entry
// is the configuration itself.
func (s Scenario) reloads(seed uint64) (list []reload, err error) {
	list = []reload{{name: "0", yaml: s.YAML}}
	if list[0].config, err = s.Config(); err != nil {
		return nil, err
	}
	r := rand.New(rand.NewPCG(seed, 11))
	for tries := 0; len(list) <= variants && tries < 20*variants; tries++ {
		text, err := s.mutate(r)
		if err != nil {
			return nil, err
		}
		c, err := config.Decode("scenario "+s.Name, []byte(text))
		if err == nil {
			list = append(list, reload{fmt.Sprint(len(list)), text, c})
		}
	}
	return list, nil
}

// document is a configuration as a tree.
type document struct {
	r    *rand.Rand
	root map[string]any
}

// mutate changes the configuration of a scenario in one to four ways. The result may be invalid.
func (s Scenario) mutate(r *rand.Rand) (string, error) {
	d := &document{r: r}
	if err := yaml.Unmarshal([]byte(s.YAML), &d.root); err != nil {
		return "", err
	}
	for range 1 + r.IntN(4) {
		if n := len(d.list("services")); n > 0 && (len(d.list("nat")) == 0 || r.IntN(2) == 0) {
			d.service(r.IntN(n))
		} else if n := len(d.list("nat")); n > 0 {
			d.rule(r.IntN(n))
		}
		if d.root["firewall"] != nil && r.IntN(2) == 0 {
			d.firewall(d.root["firewall"].(map[string]any))
		}
	}
	if r.IntN(3) == 0 {
		d.root["established"] = "end"
	}
	text, err := yaml.Marshal(d.root)
	return string(text), err
}

func (d *document) list(key string) []any { return listOf(d.root, key) }

func listOf(m map[string]any, key string) []any {
	l, _ := m[key].([]any)
	return l
}

// removeOne removes one element from a list with several elements.
func removeOne(r *rand.Rand, m map[string]any, key string) {
	if l := listOf(m, key); len(l) > 1 {
		n := r.IntN(len(l))
		m[key] = slices.Delete(slices.Clone(l), n, n+1)
	}
}

// service changes a service: its existence, backends, weights, listeners, limits or options.
func (d *document) service(n int) {
	r := d.r
	s := d.list("services")[n].(map[string]any)
	backends := listOf(s, "backends")
	b := pick(r, backends).(map[string]any)
	switch r.IntN(12) {
	case 0:
		if len(d.list("services"))+len(d.list("nat")) > 1 {
			d.root["services"] = slices.Delete(slices.Clone(d.list("services")), n, n+1)
		}
	case 1, 2:
		d.dropBackend(s)
	case 3, 4:
		b["drain"] = true
	case 5:
		b["weight"] = 1 + r.IntN(5)
	case 6, 7:
		d.moveBackend(b)
	case 8:
		removeOne(r, s, "listen")
	case 9:
		s["mss-clamp"] = s["protocol"] != "udp" && s["mss-clamp"] == nil
	case 10:
		s["when-down"] = pick(r, []string{"reset", "reject", "drop"})
	case 11:
		removeOne(r, s, "source-pool")
	}
}

// dropBackend removes a backend and its pinned sessions from a service.
func (d *document) dropBackend(s map[string]any) {
	before := listOf(s, "backends")
	removeOne(d.r, s, "backends")
	left := map[any]bool{}
	for _, b := range listOf(s, "backends") {
		left[b.(map[string]any)["name"]] = true
	}
	if len(left) == len(before) || s["sessions"] == nil {
		return
	}
	pins := slices.DeleteFunc(slices.Clone(listOf(s, "sessions")), func(p any) bool { return !left[p.(map[string]any)["backend"]] })
	if s["sessions"] = pins; len(pins) == 0 {
		delete(s, "sessions")
	}
}

// moveBackend changes the address of a backend to an unused one.
func (d *document) moveBackend(b map[string]any) {
	taken := map[any]bool{}
	for _, s := range d.list("services") {
		for _, other := range listOf(s.(map[string]any), "backends") {
			taken[other.(map[string]any)["address"]] = true
		}
	}
	format := "10.0.2.%d"
	if strings.Contains(b["address"].(string), ":") {
		format = "fd00:2::%d"
	}
	for _, n := range d.r.Perm(8) {
		if a := fmt.Sprintf(format, n+2); !taken[a] {
			b["address"] = a
			return
		}
	}
}

// rule changes a NAT rule: its existence, order, sources, addresses, exceptions, filter or target.
func (d *document) rule(n int) {
	r := d.r
	rules := d.list("nat")
	rule := rules[n].(map[string]any)
	switch r.IntN(12) {
	case 0, 1:
		if len(d.list("services"))+len(rules) > 1 {
			d.root["nat"] = slices.Delete(slices.Clone(rules), n, n+1)
		}
	case 2, 3:
		narrowSources(rule)
	case 4, 5:
		removeOne(r, rule, "to")
		removeOne(r, rule, "pool")
		removeOne(r, rule, "eam")
	case 6:
		if _, ok := rule["filtering"]; ok || rule["type"] == "snat" {
			rule["filtering"] = pick(r, []string{"endpoint-independent", "address-dependent", "address-and-port-dependent"})
		}
	case 7:
		d.addException(rule)
	case 8:
		other := r.IntN(len(rules))
		rules[n], rules[other] = rules[other], rules[n]
	case 9:
		if to, ok := rule["to"].(map[string]any); ok {
			to["address"] = pick(r, []string{"10.0.2.4", "10.0.2.5", "fd00:2::4"})
		}
	case 10:
		rule["mss-clamp"] = rule["mss-clamp"] == nil
	case 11:
		rule["hairpin"] = pick(r, []string{"on", "off"})
	}
}

// narrowSources reduces the sources of a rule, except where this would move deterministic blocks.
func narrowSources(rule map[string]any) {
	sources := listOf(rule, "source")
	if len(sources) == 0 || rule["deterministic"] != nil {
		return
	}
	p, err := netip.ParsePrefix(sources[0].(string))
	if err != nil {
		return
	}
	if bits := p.Addr().BitLen() - 2; p.Bits() < bits {
		p = netip.PrefixFrom(p.Addr().Next().Next(), bits).Masked()
	}
	rule["source"] = []any{p.String()}
}

// addException adds one exception to a rule.
func (d *document) addException(rule map[string]any) {
	far := "198.18.0.3/32"
	for _, p := range listOf(rule, "source") {
		if strings.Contains(p.(string), ":") && rule["prefix"] == nil {
			far = "2001:db8:9::3/128"
		}
	}
	if rule["type"] != "port-forward" {
		rule["except"] = append(slices.Clone(listOf(rule, "except")), far)
	}
}

// firewall removes a set member or a rule, or swaps two rules.
func (d *document) firewall(f map[string]any) {
	r := d.r
	sets, _ := f["sets"].(map[string]any)
	rules := listOf(f, "rules")
	switch r.IntN(3) {
	case 0:
		if len(sets) > 0 {
			names := make([]string, 0, len(sets))
			for name := range sets {
				names = append(names, name)
			}
			slices.Sort(names)
			removeOne(r, sets, pick(r, names))
		}
	case 1:
		removeOne(r, f, "rules")
	case 2:
		if len(rules) > 1 {
			n := r.IntN(len(rules) - 1)
			rules[n], rules[n+1] = rules[n+1], rules[n]
		}
	}
}

// reload activates another configuration. A fragmented packet must not span the change, as with a
// change of a backend's state.
func (t *trace) reload(s golden.Subject, model *model.Model, w *generatorState, r *rand.Rand) error {
	next := pick(r, t.reloads)
	if model.Undecidable(next.config) {
		return nil
	}
	w.dropUncertain()
	model.Apply(next.config)
	w.mapped = slices.DeleteFunc(w.mapped, func(m datapath.Mapping) bool { return !model.Mapped(m) })
	t.steps = append(t.steps, judgedStep{change: "apply " + next.name})
	if err := s.Apply(next.config); err != nil {
		return fmt.Errorf("%s: apply: %w\n%s", s.Name(), err, next.yaml)
	}
	return nil
}
