// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
)

const several = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]}
  - {name: full, listen: [{address: 192.0.2.10, ports: [81]}], protocol: tcp, mode: fullnat, source-pool: [10.1.0.1-10.1.0.9], backends: [{name: a, address: 10.0.0.1}]}
  - {name: less, listen: [{address: 192.0.2.11, ports: [53]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]}
  - {name: more, listen: [{address: 192.0.2.12, ports: [53]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.0.3}]}
  - {name: follows, listen: [{interface: wan0, ports: [53]}], protocol: udp, mode: dnat, allow: [staff], backends: [{name: a, address: 10.0.0.3}]}
nat:
  - {name: out, type: masquerade, source: [10.0.0.0/16], out: wan0}
  - {name: in, type: port-forward, protocol: tcp, listen: {address: 192.0.2.10, ports: [90]}, to: {address: 10.0.0.9}}
firewall:
  sets: {staff: [198.51.100.0/24]}
`

// randomEdit returns a random edit by an operator; some are invalid.
func randomEdit(r *rand.Rand) (path, value string) {
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	service := "services/" + pick("web", "full", "less", "more", "follows", "new")
	address := fmt.Sprintf("10.%d.0.%d", r.IntN(2), 1+r.IntN(4))
	switch r.IntN(12) {
	case 0:
		return service + "/backends/" + pick("a", "b", "c"), "{address: " + address + "}"
	case 1:
		return service + "/backends/" + pick("a", "b", "c") + "/weight", pick("1", "7", "0", "700", "x")
	case 2:
		return service + "/backends/" + pick("a", "b", "c"), ""
	case 3:
		return service + "/listen", fmt.Sprintf("[{address: 192.0.2.%d, ports: [%s]}]", 10+r.IntN(3), pick("80", "81", "53", "80-90"))
	case 4:
		return service + "/mode", pick("dnat", "fullnat", "stateless", "dsr", "tunnel", "nonsense")
	case 5:
		return service, ""
	case 6:
		return service, fmt.Sprintf("{listen: [{address: 192.0.2.%d, ports: [%d]}], protocol: %s, mode: dnat, backends: [{address: %s}]}", 10+r.IntN(9), 80+r.IntN(3), pick("tcp", "udp"), address)
	case 7:
		return service + "/name", pick("web", "other")
	case 8:
		return service + "/source-pool", "[" + address + "]"
	case 9:
		return service + "/" + pick("allow", "deny"), pick("[staff]", "[nobody]", "[]")
	case 10:
		return "firewall/sets/" + pick("staff", "banned"), pick("[198.51.100.0/24]", "[198.51.100.1/24]", "")
	default:
		return "nat/" + pick("out", "in"), pick("", "{type: masquerade, source: [10.1.0.0/16], out: wan1}")
	}
}

// whole applies an edit to a copy and validates all of it.
func whole(c *Config, e Edit) (*Config, error) {
	next := &Config{}
	clone(reflect.ValueOf(next).Elem(), reflect.ValueOf(c).Elem())
	next.draft = false
	if err := next.mustEdit(e); err != nil {
		return nil, err
	}
	next.SetDefaults()
	if err := next.Validate(); err != nil {
		return nil, err
	}
	return next, nil
}

// TestEditsOfPartsEqualThoseOfTheWhole applies random edits in both ways, and in a draft. Results and errors are
// equal, and other references do not change.
func TestEditsOfPartsEqualThoseOfTheWhole(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	refused, made := 0, 0
	for range 200 {
		c, err := Decode("f.yaml", []byte(several))
		if err != nil {
			t.Fatal(err)
		}
		draft, base := c.Draft(), c
		var edits []Edit // edits that change base to c
		for range 20 {
			path, value := randomEdit(r)
			e := Edit{Path: path}
			if old, err := find(reflect.ValueOf(c).Elem(), Split(path)); err == nil {
				e.Before = inlineYAML(old)
			} else if value == "" {
				continue
			}
			typ, err := typeAt(reflect.TypeOf(c).Elem(), Split(path))
			if err != nil {
				t.Fatal(err)
			}
			v := reflect.New(typ).Elem()
			if read(v, value) != nil {
				continue
			}
			if name, ok := nameOf(v); ok && value != "" {
				name.SetString(Split(path)[len(Split(path))-1])
			}
			e.After = inlineYAML(v)
			before, _ := Marshal(c)
			want, wantErr := whole(c, e)
			got, gotErr := c.withEdit(e)
			if fmt.Sprint(wantErr) != fmt.Sprint(gotErr) {
				t.Fatalf("%s:\n%v\nof the whole:\n%v", e, gotErr, wantErr)
			}
			if after, _ := Marshal(c); string(after) != string(before) {
				t.Fatalf("%s: it changed what it was made of", e)
			}
			inPlace, draftErr := draft.withEdit(e)
			if fmt.Sprint(draftErr) != fmt.Sprint(wantErr) || draftErr == nil && inPlace != draft {
				t.Fatalf("%s: in a draft: %v, want %v", e, draftErr, wantErr)
			}
			if wantErr != nil {
				refused++
				got = c
			} else {
				made++
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("%s: got\n%s\nof the whole:\n%s", e, must(Marshal(got)), must(Marshal(want)))
				}
			}
			if d, again := Diff(base, got), DiffAgain(base, got, c, edits); !reflect.DeepEqual(d, again) {
				t.Fatalf("%s: differs from the first one by %v, with what was known by %v", e, d, again)
			} else {
				edits = d
			}
			if d := Diff(draft, got); len(d) > 0 {
				t.Fatalf("%s: the draft differs by %v", e, d)
			}
			merged, _, conflicts, err := Merge(c, Diff(c, got))
			if err != nil || len(conflicts) > 0 || !reflect.DeepEqual(merged, got) {
				t.Fatalf("%s: the differences %v do not lead there: %v %v", e, Diff(c, got), conflicts, err)
			}
			c = got
		}
	}
	if refused < 500 || made < 500 {
		t.Errorf("%d edits were refused, %d made", refused, made)
	}
}

func must(text []byte, err error) string {
	if err != nil {
		panic(err)
	}
	return string(text)
}

// TestShare: equal services are shared afterwards, others are not.
func TestShare(t *testing.T) {
	a, errA := Decode("f.yaml", []byte(several))
	b, errB := Decode("f.yaml", []byte(several))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	b.Services[1].Backends[0].Weight = 9
	b.Share(a)
	for i := range b.Services {
		if is := b.Services[i].Is(&a.Services[i]); is != (i != 1) {
			t.Errorf("service %s: the same %t", b.Services[i].Name, is)
		}
	}
	if b.Services[1].Backends[0].Weight != 9 || a.Services[1].Backends[0].Weight != 1 {
		t.Error("a service that differs was changed")
	}
}
