// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netns"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

// Warnings returns the problems of this host that prevent the active snapshot from working, each
// with the remedy.
func (d *Datapath) Warnings() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.snapshot == nil {
		return nil
	}
	v4, v6 := d.snapshot.Forwards()
	out := kernel.ForwardingWarnings(d.host.sysctl, v4, v6, nil, nil)
	carries := len(d.snapshot.Services)+len(d.snapshot.NAT) > 0
	if !d.flowtables && carries && d.snapshot.Config.Flowtable != config.SwitchOff {
		out = append(out, "the kernel has no flowtables (CONFIG_NF_FLOW_TABLE): established flows take the full path")
	} else if what := compile.SeesEveryPacket(d.snapshot); what != "" && carries && d.snapshot.Config.Flowtable == config.SwitchAuto {
		out = append(out, "flowtable auto: established flows take the full path, because "+what+" must see every packet")
	}
	if !d.timeouts && carries {
		out = append(out, "the kernel has no timeouts of single connections (CONFIG_NF_CONNTRACK_TIMEOUT): timeouts: is not applied, "+
			"the sysctls net.netfilter.nf_conntrack_*_timeout are in force")
	}
	if d.mismatch != nil {
		out = append(out, fmt.Sprintf("%v; its packets are still sent to the last known place", d.mismatch))
	}
	if d.compiled != nil {
		for _, u := range d.compiled.Unreached() {
			out = append(out, u+": it gets no connections until there is one; dsr reaches only neighbours, on a network of one of this host's interfaces")
		}
	}
	if d.endError != nil {
		out = append(out, d.endError.Error())
	}
	there := func(name string) bool {
		return slices.ContainsFunc(d.interfaces, func(i compile.Interface) bool { return config.Interfaces(name).Has(i.Name) })
	}
	out = append(out, d.loopbacks()...)
	if w := hairpinWarning(d.snapshot, d.host.bridges()); w != "" {
		out = append(out, w)
	}
	names := make([]string, len(d.interfaces))
	for i := range d.interfaces {
		names[i] = d.interfaces[i].Name
	}
	out = append(out, datapath.Bypassed(d.resolveAddresses(d.snapshot), d.networks)...)
	out = append(out, datapath.Broadcasts(d.snapshot, d.networks, names, d.host.sysctl)...)
	return append(out, datapath.Waiting(d.snapshot, there, d.host.hasUsableAddress, d.host.hasSource)...)
}

// loopbacks returns warnings about loopback backends and targets, which only the host itself can
// reach.
func (d *Datapath) loopbacks() (out []string) {
	note := func(owner, what string, a netip.Addr) {
		if a.IsLoopback() && !d.acceptsLoopback() {
			out = append(out, fmt.Sprintf("%s: %s %s is a loopback address, and the kernel drops what other hosts send there; "+
				"name another address of this host, or write \"sysctl -w net.ipv4.conf.all.route_localnet=1\"", owner, what, a))
		}
	}
	for _, svc := range d.snapshot.Services {
		for i := range svc.Backends {
			note("service "+svc.Name, "backend", svc.Backends[i].Address)
		}
	}
	for _, n := range d.snapshot.NAT {
		if n.Type.Forwards() {
			note("nat "+n.Name, "target", n.To.Address)
		}
	}
	return out
}

// acceptsLoopback reports whether interfaces accept packets to loopback addresses.
func (d *Datapath) acceptsLoopback() bool {
	on := func(name string) bool {
		return d.host.sysctl("net.ipv4.conf."+strings.ReplaceAll(name, ".", "/")+".route_localnet") == "1"
	}
	return on("all") || slices.ContainsFunc(d.interfaces, func(i compile.Interface) bool { return on(i.Name) })
}

// sysctl reads a setting of the datapath's network namespace. /proc/sys depends on the namespace of
// the reading thread.
func (h *host) sysctl(key string) (value string) {
	_ = netdev.Within(netns.NsHandle(h.netns), func() { value = kernel.Sysctl(key) })
	return value
}
