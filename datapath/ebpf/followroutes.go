// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

// setChecks writes some bits of control.checks.
func setChecks(t *table.Tables, which, to uint32) {
	flags := &t.Control.Values[0].Checks
	for {
		was := atomic.LoadUint32(flags)
		if atomic.CompareAndSwapUint32(flags, was, was&^which|to) {
			return
		}
	}
}

// sourceChecks returns how the kernel checks IPv4 packets that an interface receives. read
// returns the value of a setting.
func sourceChecks(read func(key string) string, iface string) (flags uint32) {
	number := func(of, name string) int {
		n, _ := strconv.Atoi(read("net.ipv4.conf." + netdev.SysctlName(of) + "." + name))
		return n
	}
	switch max(number("all", "rp_filter"), number(iface, "rp_filter")) { // IN_DEV_RPFILTER
	case 0:
	case 1:
		flags = wire.SourceStrict
	default:
		flags = wire.SourceLoose
	}
	if number(iface, "forwarding") == 0 {
		flags |= wire.SourceForwardingOff
	}
	if number("all", "accept_local") != 0 || number(iface, "accept_local") != 0 { // IN_DEV_ACCEPT_LOCAL
		flags |= wire.SourceAcceptLocal
	}
	return flags
}

// putSources writes the data by which the programs refuse IPv4 sources like the kernel: settings of
// the interfaces and the host's own addresses.
func putSources(t *table.Tables, routes netdev.RouteFacts) error {
	interfaces, err := netdev.Interfaces()
	if err != nil {
		return err
	}
	own, whole4, whole6, err := netdev.OwnSources()
	if err != nil {
		return err
	}
	isOwn := func(a netip.Addr) bool { return slices.Contains(own, netdev.OwnSource{Addr: a}) }
	rules, err := netdev.Rules(unix.AF_INET, isOwn)
	if err != nil {
		return err
	}
	rules6, err := netdev.Rules(unix.AF_INET6, isOwn)
	if err != nil {
		return err
	}
	var checks uint32
	flags := map[uint32]uint32{}
	for _, i := range interfaces {
		f := sourceChecks(kernel.Sysctl, i.Name)
		if f == 0 || i.Loopback || len(flags) == int(t.Maps["source_checks"].MaxEntries()) {
			continue
		}
		flags[uint32(i.Index)] = f
		if f&wire.SourceForwardingOff != 0 {
			checks |= wire.CheckForwarding
		}
		switch {
		case f&wire.SourceStrict != 0:
			checks |= wire.CheckRpFilter | wire.CheckStrict | wire.CheckEach
		case f&wire.SourceLoose != 0:
			checks |= wire.CheckRpFilter
			if !routes.Default { // with a default route, a loose filter refuses only broadcast addresses
				checks |= wire.CheckEach
			}
		}
	}
	if routes.Multipath {
		checks |= wire.CheckMultipath
	}
	if rules.Any {
		checks |= wire.CheckRules | checks&wire.CheckRpFilter/wire.CheckRpFilter*wire.CheckEach
	}
	if rules6.Any {
		checks |= wire.CheckRules6
	}
	if rules.Input || rules6.Input {
		checks |= wire.CheckInput
	}
	if rules.Class || rules6.Class || routes.Class {
		checks |= wire.CheckClass
	}
	if rules.Client || rules6.Client || routes.Class {
		checks |= wire.CheckClient
	}
	kinds, filter := map[uint32]uint32{}, wire.OwnFilter{}
	six, most6 := map[wire.Addr]uint32{}, int(t.Maps["own_addresses6"].MaxEntries())
	for _, o := range own {
		if o.Addr.Is6() {
			if len(six) == most6 {
				whole6 = false // a destination without a route is left to the kernel
				continue
			}
			six[wire.AddrOf(o.Addr)] = wire.OwnAddress
			continue
		}
		if len(kinds) == int(t.Maps["own_sources"].MaxEntries()) {
			err = fmt.Errorf("the host has more than %d IPv4 addresses", len(kinds))
			whole4 = false
			break
		}
		key := wire.AddrOf(o.Addr).W[0]
		kinds[key] = wire.OwnAddress
		if o.Broadcast {
			kinds[key] = wire.OwnBroadcast
		}
		bit := key * 0x9e3779b1 >> 20
		filter.Words[bit/64] |= 1 << (bit % 64)
	}
	if whole4 {
		whole4, err = onlyLocal(unix.AF_INET, rules, err)
	}
	if whole6 {
		whole6, err = onlyLocal(unix.AF_INET6, rules6, err)
	}
	if whole4 {
		checks |= wire.CheckOwn4
	}
	if whole6 {
		checks |= wire.CheckOwn6
	}
	zero := uint32(0)
	err = errors.Join(err, table.Equalise(t.Maps["source_checks"], flags, nil), table.Equalise(t.Maps["own_sources"], kinds, nil),
		table.Equalise(t.Maps["own_addresses6"], six, nil), t.Maps["own_filter"].Put(&zero, &filter))
	if err != nil {
		checks &^= wire.CheckOwn4 | wire.CheckOwn6
	}
	setChecks(t, ^uint32(wire.CheckRouteMtus), checks)
	return err
}

// onlyLocal reports whether the table "local" has all local destinations: no rule of "ip rule" may select another table
// with local routes, or by a mark that only the kernel sees.
func onlyLocal(family uint8, rules netdev.RuleFacts, before error) (bool, error) {
	if !rules.Any || rules.Hidden {
		return !rules.Any, before
	}
	found, err := netdev.HasLocalInOtherTables(family)
	return !found && err == nil, errors.Join(before, err)
}

// routesPause is the time during which route changes are collected before the tables are read.
const routesPause = 50 * time.Millisecond

// routeFollower updates the MTUs of routes and the sources that the kernel refuses, after each
// relevant change. It reads the routing tables only if the change can affect routes with an MTU,
// several next hops or no destination prefix.
type routeFollower struct {
	mtus    atomic.Int64 // Number of routes with an MTU, and of routes inside their prefixes.
	scan    atomic.Bool  // The routing tables must be read.
	changed chan struct{}
}

func newRouteFollower() *routeFollower {
	f := &routeFollower{changed: make(chan struct{}, 1)}
	f.scan.Store(true)
	f.changed <- struct{}{} // triggers the first read of the routes
	return f
}

func (f *routeFollower) addEvent(e netdev.Event) {
	scan := e.Kind == netdev.Lost || e.Special || (e.Kind == netdev.Route || e.Kind == netdev.Link) && f.mtus.Load() > 0
	if scan {
		f.scan.Store(true)
	}
	if scan || e.Kind == netdev.Address || e.Kind == netdev.Link || e.Kind == netdev.Setting || e.Kind == netdev.Rule {
		select {
		case f.changed <- struct{}{}:
		default:
		}
	}
}

func (f *routeFollower) run(ctx context.Context, d *Datapath) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(d.ns); err != nil {
		d.opt.Log.Warn("mtus of routes and settings of rp_filter are not followed before the next start", "error", err)
		return
	}
	var facts netdev.RouteFacts
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.changed:
		}
		var err error
		if f.scan.Swap(false) {
			time.Sleep(routesPause)
			var mtus int
			if facts, mtus, err = putRoutes(d.t); err != nil {
				mtus++ // the next change triggers a retry
			}
			f.mtus.Store(int64(mtus))
		}
		if err = errors.Join(err, putSources(d.t, facts)); err != nil {
			d.opt.Log.Warn("the programs do not know the host's routes and addresses; they may forward what the kernel would not", "error", err)
		}
		bumpGeneration(d.t.Control)
	}
}

// putRoutes reads the routing tables and writes the MTUs of routes.
func putRoutes(t *table.Tables) (facts netdev.RouteFacts, mtus int, err error) {
	if facts, err = netdev.Routes(); err != nil {
		return facts, 0, err
	}
	mtus, err = putRouteMTUs(t, facts.MTUs)
	return facts, mtus, err
}

// putInitialRoutes writes the MTUs of routes and the refused sources while no routeFollower runs.
func (d *Datapath) putInitialRoutes() {
	if d.stop != nil {
		return
	}
	facts, _, err := putRoutes(d.t)
	if err = errors.Join(err, putSources(d.t, facts)); err != nil {
		d.opt.Log.Warn("the programs do not know the host's routes and addresses; they may forward what the kernel would not", "error", err)
	}
}
