// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// addressFields are configurations with one address or prefix at ADDRESS, by the path of its type's field. ok is an
// accepted address of each family.
var addressFields = []struct {
	field, yaml string
	ok          []string
	accepts     []string // special addresses that have a use here
	matches     bool     // the field only compares, with any address
}{
	{"Listen.Address", `services: [{name: a, listen: [{address: "ADDRESS", ports: [80]}], protocol: tcp, mode: fullnat, backends: [{address: 10.0.0.2}]}]`,
		[]string{"192.0.2.1", "2001:db8::1", "169.254.1.1"}, []string{"fe80::1"}, false},
	{"Listen.Address", `nat: [{name: a, type: port-forward, listen: {address: "ADDRESS"}, protocol: any, to: {address: "10.0.0.2"}}]`,
		[]string{"192.0.2.1", "169.254.1.1"}, nil, false},
	{"Backend.Address", `services: [{name: a, listen: [{address: 192.0.2.1, ports: [80]}], protocol: tcp, mode: fullnat, backends: [{address: "ADDRESS"}]}]`,
		[]string{"10.0.0.2", "fd00::2", "169.254.1.1"}, []string{"127.0.0.1", "127.8.8.8"}, false},
	{"Service.SourcePool", `services: [{name: a, listen: [{address: 192.0.2.1, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: ["ADDRESS", 10.0.0.1, "fd00::1"], backends: [{address: 10.0.0.2}]}]`,
		[]string{"10.0.0.3", "fd00::3", "169.254.1.1"}, nil, false},
	{"Session.Client", `services: [{name: a, listen: [{address: 192.0.2.1, ports: [80]}], protocol: tcp, mode: dnat, sessions: [{client: "ADDRESS", backend: b}], backends: [{name: b, address: 10.0.0.2}]}]`,
		[]string{"10.0.0.3", "0.0.0.0/0"}, nil, false},
	{"NATRule.Source", `nat: [{name: a, type: masquerade, source: ["ADDRESS"], out: wan0}]`, []string{"10.0.0.0/8", "fd00::/8", "0.0.0.0/0", "::/0"}, nil, false},
	{"NATRule.Source", `nat: [{name: a, type: snat, source: ["ADDRESS"], to: [192.0.2.1, "2001:db8::1"]}]`, []string{"10.0.0.0/8", "fd00::/8"}, nil, false},
	{"NATRule.Source", `nat: [{name: a, type: nat64, source: ["ADDRESS"], prefix: "64:ff9b::/96", pool: [192.0.2.1]}]`, []string{"fd00::/8"}, nil, false},
	{"NATRule.Except", `nat: [{name: a, type: masquerade, source: [10.0.0.0/8], except: ["ADDRESS"], out: wan0}]`, []string{"10.0.0.0/8"}, nil, true},
	{"NATRule.External", `nat: [{name: a, type: static, external: "ADDRESS", internal: 10.0.0.2/32}]`, []string{"192.0.2.1/32"}, nil, false},
	{"NATRule.External", `nat: [{name: a, type: static, external: "ADDRESS", internal: "fd00::2/128"}]`, []string{"2001:db8::1/128"}, nil, false},
	{"NATRule.Internal", `nat: [{name: a, type: static, external: 192.0.2.1/32, internal: "ADDRESS"}]`, []string{"10.0.0.2/32"}, nil, false},
	{"NATRule.Internal", `nat: [{name: a, type: static, external: "2001:db8::1/128", internal: "ADDRESS"}]`, []string{"fd00::2/128"}, nil, false},
	{"NATRule.Prefix", `nat: [{name: a, type: nat64, source: ["fd00::/8"], prefix: "ADDRESS", pool: [192.0.2.1]}]`, []string{"64:ff9b::/96"}, nil, false},
	{"NATRule.Prefix", `nat: [{name: a, type: siit, prefix: "ADDRESS", in: lan0, pool: [192.0.2.1]}]`, []string{"64:ff9b::/96"}, nil, false},
	{"NATRule.Pool", `nat: [{name: a, type: nat64, source: ["fd00::/8"], prefix: "64:ff9b::/96", pool: ["ADDRESS"]}]`, []string{"192.0.2.1"}, nil, false},
	{"NATRule.Pool", `nat: [{name: a, type: siit, prefix: "64:ff9b::/96", in: lan0, pool: ["ADDRESS"]}]`, []string{"192.0.2.1"}, nil, false},
	{"EAMEntry.IPv4", `nat: [{name: a, type: siit, eam: [{ipv4: "ADDRESS", ipv6: "2001:db8::/96"}]}]`, []string{"192.0.2.1/32", "0.0.0.0/0"}, nil, false},
	{"EAMEntry.IPv6", `nat: [{name: a, type: siit, eam: [{ipv4: 192.0.2.1/32, ipv6: "ADDRESS"}]}]`, []string{"2001:db8::1/128"}, nil, false},
	{"Target.Addresses", `nat: [{name: a, type: snat, source: [10.0.0.0/8], to: ["ADDRESS", 192.0.2.1]}]`, []string{"192.0.2.9", "2001:db8::9", "169.254.1.1"}, nil, false},
	{"Target.Address", `nat: [{name: a, type: port-forward, listen: {address: 192.0.2.1}, protocol: any, to: {address: "ADDRESS"}}]`,
		[]string{"10.0.0.2", "169.254.1.1"}, []string{"127.0.0.1", "127.8.8.8"}, false},
	{"Firewall.Sets", `firewall: {sets: {a: ["ADDRESS"]}}`, []string{"10.0.0.0/8"}, nil, true},
	{"Match.Prefix", `firewall: {rules: [{name: a, action: drop, source: "ADDRESS"}]}`, []string{"10.0.0.0/8"}, nil, true},
	{"Node.Address", `cluster: {nodes: [{name: n, address: "ADDRESS"}]}`, []string{"10.0.0.2", "fd00::2", "169.254.1.1"}, nil, false},
	{"Uplink.Gateway", `uplinks: [{name: a, interface: wan0, gateway: "ADDRESS"}]`, []string{"192.0.2.2", "2001:db8::2", "169.254.1.1"}, []string{"fe80::1"}, false},
	{"Uplink.Prefixes", `uplinks: [{name: a, interface: wan0, prefixes: ["ADDRESS"]}]`, []string{"192.0.2.0/24", "2001:db8::/48"}, nil, false},
	{"UplinkProbe.Targets", `uplinks: [{name: a, interface: wan0, probe: {type: icmp, targets: ["ADDRESS"]}}]`, []string{"9.9.9.9", "2620:fe::fe"}, nil, false},
}

// odd are addresses without a use, as addresses and ranges.
var odd = []string{"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.8.8.8", "224.0.0.1", "239.1.2.3", "255.255.255.255", "::", "::1", "ff02::1", "ff0e::5", "fe80::1",
	"::ffff:192.0.2.9", "::ffff:127.0.0.1", "fe80::1%eth0"}

// TestOddAddresses writes odd addresses to each field. They are refused with the object, the cause and the next step,
// unless the field has a use for them.
func TestOddAddresses(t *testing.T) {
	for _, f := range addressFields {
		for _, a := range slices.Concat(f.ok, odd) {
			text := strings.ReplaceAll(f.yaml, "ADDRESS", a)
			_, err := Decode("f.yaml", []byte(text))
			mapped := strings.Contains(a, "ffff") || strings.Contains(a, "%")
			if slices.Contains(f.ok, a) || slices.Contains(f.accepts, a) || f.matches && !mapped {
				if err != nil {
					t.Errorf("%s: %s is refused: %v", f.field, a, err)
				}
				continue
			}
			var errs Errors
			if !errors.As(err, &errs) {
				t.Errorf("%s: %s is accepted in\n%s (%v)", f.field, a, text, err)
				continue
			}
			if !slices.ContainsFunc(errs, func(e *Error) bool {
				return strings.Contains(e.Cause, strings.TrimSuffix(a, "%eth0")) && (e.Hint != "" || f.matches) && (e.Object != "" || strings.HasPrefix(e.Path, "cluster") || strings.HasPrefix(e.Path, "uplinks"))
			}) {
				t.Errorf("%s: no error names %s, its object and the next step:\n%v", f.field, a, err)
			}
		}
	}
}

// TestEveryAddressField finds the fields with addresses of a configuration. Each must be one of addressFields.
func TestEveryAddressField(t *testing.T) {
	tested := map[string]bool{}
	for _, f := range addressFields {
		tested[f.field] = true
	}
	addresses := []reflect.Type{reflect.TypeFor[netip.Addr](), reflect.TypeFor[netip.Prefix](), reflect.TypeFor[AddressRange](), reflect.TypeFor[netip.AddrPort]()}
	seen, found := map[reflect.Type]bool{}, 0
	var walk func(at reflect.Type)
	walk = func(at reflect.Type) {
		for at.Kind() == reflect.Pointer || at.Kind() == reflect.Slice || at.Kind() == reflect.Map || at.Kind() == reflect.Array {
			at = at.Elem()
		}
		if at.Kind() != reflect.Struct || seen[at] {
			return
		}
		seen[at] = true
		for i := range at.NumField() {
			f := at.Field(i)
			if !f.IsExported() {
				continue
			}
			e := f.Type
			for e.Kind() == reflect.Pointer || e.Kind() == reflect.Slice || e.Kind() == reflect.Map {
				e = e.Elem()
			}
			if !slices.Contains(addresses, e) {
				walk(e)
				continue
			}
			found++
			if name := at.Name() + "." + f.Name; !tested[name] {
				t.Errorf("%s has addresses, and addressFields has no case for it", name)
			}
		}
	}
	walk(reflect.TypeFor[Config]())
	if found < 10 {
		t.Errorf("only %d fields with addresses", found)
	}
}

// TestRangesWithOddAddresses: a pool that includes odd addresses is refused.
func TestRangesWithOddAddresses(t *testing.T) {
	for _, pool := range []string{"126.255.255.0-127.0.0.1", "223.0.0.0-224.0.0.0", "::/64", "0.0.0.0/0"} {
		text := `nat: [{name: a, type: snat, source: [192.168.0.0/24, "fd00::/64"], to: ["` + pool + `", 192.0.2.1, "2001:db8::1"]}]`
		if _, err := Decode("f.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), " includes ") {
			t.Errorf("%s: %v", pool, err)
		}
	}
}
