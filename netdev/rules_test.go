// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRules: each selector and action of "ip rule" has its facts.
func TestRules(t *testing.T) {
	gw, _ := watched(t)
	own := func(a netip.Addr) bool {
		return a == netip.MustParseAddr("10.0.2.1") || a == netip.MustParseAddr("fd00:2::1")
	}
	for rule, want := range map[string]RuleFacts{
		"":                                    {},
		"lookup main":                         {},
		"lookup 100":                          {Any: true},
		"lookup main suppress_prefixlength 0": {Any: true},
		"goto 32766":                          {Any: true},
		"to 10.0.0.0/8 lookup main":           {Any: true},
		"from 10.0.2.1 lookup 100":            {Any: true},
		"not from 10.0.2.1 lookup 100":        {Any: true, Client: true},
		"from 10.0.2.2 lookup 100":            {Any: true, Client: true},
		"from 10.0.2.0/24 lookup main":        {Any: true, Client: true},
		"ipproto udp lookup 100":              {Any: true, Client: true},
		"sport 53 lookup 100":                 {Any: true, Client: true},
		"dport 53-60 lookup 100":              {Any: true, Client: true},
		"tos 0x10 lookup main":                {Any: true, Client: true, Class: true},
		"iif lo lookup 100":                   {Any: true},
		"iif lan0 lookup 100":                 {Any: true, Client: true, Input: true},
		"fwmark 7 lookup main":                {Any: true, Hidden: true},
		"fwmark 0/7 lookup main":              {Any: true, Hidden: true},
		"blackhole":                           {Any: true},
		"from 10.0.2.2 prohibit":              {Any: true, Client: true},
	} {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			rule, want := rule, want
			which := "-4"
			if family == unix.AF_INET6 {
				rule, which = strings.NewReplacer("10.0.0.0/8", "fd00::/16", "10.0.2.0/24", "fd00:2::/64", "10.0.2.", "fd00:2::").Replace(rule), "-6"
				want.Hidden = want.Hidden || strings.HasSuffix(rule, "blackhole") || strings.HasSuffix(rule, "prohibit")
			}
			do(t, gw, func() error {
				if rule != "" {
					if out, err := exec.Command("ip", append([]string{which, "rule", "add", "priority", "100"}, strings.Fields(rule)...)...).CombinedOutput(); err != nil {
						return fmt.Errorf("%s: %w: %s", rule, err, out)
					}
				}
				got, err := Rules(family, own)
				if got != want {
					t.Errorf("%s %q: %+v, want %+v", which, rule, got, want)
				}
				if rule != "" && err == nil {
					err = exec.Command("ip", which, "rule", "del", "priority", "100").Run()
				}
				return err
			})
		}
	}
}

// TestLocalElsewhere: a local route of another table is found, in its family only.
func TestLocalElsewhere(t *testing.T) {
	gw, _ := watched(t)
	has := func(family uint8, want bool) error {
		got, err := HasLocalInOtherTables(family)
		if got != want {
			t.Errorf("family %d: %v, want %v", family, got, want)
		}
		return err
	}
	do(t, gw, func() error { return has(unix.AF_INET, false) })
	do(t, gw, func() error {
		return exec.Command("ip", "route", "add", "local", "default", "dev", "lo", "table", "1000").Run()
	})
	do(t, gw, func() error { return has(unix.AF_INET, true) })
	do(t, gw, func() error { return has(unix.AF_INET6, false) })
}
