// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
)

// kernelChecks report the kernel's features for the doctor.
func kernelChecks() []Check {
	return []Check{
		{ID: "KV01", Name: "kernel-features", About: "what this kernel can tell", Host: true, Weight: 1, Run: checkKernel},
	}
}

func checkKernel(_ context.Context, c *Case) Finding {
	major, minor := release(c.After.Release)
	if major == 0 {
		return unknown("kernel release %q", c.After.Release)
	}
	at := func(x, y int) bool { return major > x || major == x && minor >= y }
	var missing []string
	for _, feature := range []struct {
		there bool
		lack  string
	}{
		{c.After.BTF, "no BTF: drops are shown by place and number only"},
		{at(5, 17), "before 5.17: drops carry no reason"},
		{at(6, 7), "before 6.7: without backports drops by nftables rules look like those by iptables-legacy"},
		{at(6, 11), "before 6.11: drops in TCP may lack their namespace"},
		{at(6, 6), "before 6.6: no TCX links"},
	} {
		if !feature.there {
			missing = append(missing, feature.lack)
		}
	}
	f := found(Info, "kernel %s: %s", c.After.Release, strings.Join(missing, "; "))
	if len(missing) == 0 {
		f = ok("kernel %s: drop reasons, namespaces and nftables drops are all visible", c.After.Release)
	}
	// Nothing here uses them; other tools do.
	for _, feature := range []struct{ what, symbol string }{{"kprobes", observe.SymbolKprobes}, {"BPF netfilter programs", observe.SymbolBPFNetfilter}} {
		value := "not known"
		if c.After.Symbols != nil {
			value = map[bool]string{true: "yes", false: "no"}[c.After.Symbols[feature.symbol]]
		}
		f.Summary += "; " + feature.what + ": " + value
	}
	return f
}
