// SPDX-License-Identifier: Apache-2.0

// Package balancer imports the configurations of load balancers: IPVS, keepalived, HAProxy in TCP
// mode and nftlb. It is pure.
package balancer

import (
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// Notes about the persistence engine of IPVS.
const (
	noEngine  = "no equivalent for a persistence engine"
	helperSIP = "helper: sip keeps the media of a call with it (nftables)"
)

// Options are facts that the text of a source lacks.
type Options struct {
	// Outside lists the interfaces with the public addresses. They are used where a listener
	// accepts all addresses.
	Outside []string
}

// object is an incomplete service. Its notes are written once its final name is known.
type object struct {
	d       *draft.Draft
	service config.Service
	lines   []int
	notes   []func(name string)
	// lost is the reason why the whole service has no equivalent; next is the next step.
	lost, next string
}

// sameMethod reports whether a server is reached in the same way as the servers before it. It notes a server that
// is not as lost.
func (o *object) sameMethod(line int, mode config.Mode, tunnel *config.Tunnel) bool {
	s := &o.service
	if len(s.Backends) == 0 {
		s.Mode, s.Tunnel = mode, tunnel
		return true
	}
	if s.Mode == mode && reflect.DeepEqual(s.Tunnel, tunnel) || o.lost != "" {
		return true
	}
	way := func(m config.Mode, t *config.Tunnel) string {
		if t == nil {
			return "mode " + string(m)
		}
		return fmt.Sprintf("mode %s by %s port %d", m, t.Type, t.Port)
	}
	o.d.Lost(line, "", "the service is in "+way(s.Mode, s.Tunnel)+", this server would need "+way(mode, tunnel), "make a service for each mode, or reach all servers in the same way")
	return false
}

// noteChanged adds a note that a line behaves differently.
func (o *object) noteChanged(line int, text, reason, next string) {
	o.addLines(line)
	o.notes = append(o.notes, func(name string) { o.d.Changed(name, line, text, reason, next) })
}

// noteMissing adds a note that a part of a line has no equivalent.
func (o *object) noteMissing(line int, text, reason, next string) {
	o.addLines(line)
	o.notes = append(o.notes, func(name string) { o.d.LostOf(name, line, text, reason, next) })
}

// addLines adds source lines of the service.
func (o *object) addLines(lines ...int) { o.lines = append(o.lines, lines...) }

// add adds the service and its notes to the draft, or a note that it has no equivalent.
func (o *object) add() {
	if o.lost != "" {
		for _, n := range o.lines {
			o.d.Lost(n, "", o.lost, o.next)
		}
		return
	}
	o.weights()
	name := o.d.Service(o.service, o.lines...)
	for _, say := range o.notes {
		say(name)
	}
}

// weights scales weights to at most 256, and omits them if all are 1.
func (o *object) weights() {
	most, common, uneven := 1, 0, false
	for _, b := range o.service.Backends {
		most = max(most, b.Weight)
		common = gcd(common, b.Weight)
		uneven = uneven || b.Weight > 1
	}
	if !uneven || most <= 256 {
		return
	}
	exact := most/common <= 256
	for i := range o.service.Backends {
		b := &o.service.Backends[i]
		if exact {
			b.Weight /= common
		} else if b.Weight > 0 {
			b.Weight = max(1, (b.Weight*256+most/2)/most)
		}
	}
	if !exact && len(o.lines) > 0 {
		o.noteChanged(o.lines[0], "", fmt.Sprintf("weights up to %d are scaled to at most 256 and rounded", most), "")
	}
}

// gcd returns the greatest common divisor.
func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// hasWeights reports whether the backends have different weights.
func (o *object) hasWeights() bool {
	seen := 0
	for _, b := range o.service.Backends {
		w := max(b.Weight, 1)
		if seen != 0 && w != seen {
			return true
		}
		seen = w
	}
	return false
}

// hostPort reads "192.0.2.1:80", "[2001:db8::1]:80" and addresses without a port, which is then 0.
func hostPort(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
	}
	a, err := netip.ParseAddr(strings.Trim(s, "[]"))
	if err != nil || a.Zone() != "" {
		return netip.AddrPort{}, fmt.Errorf("%q is not an address", s)
	}
	return netip.AddrPortFrom(a.Unmap(), 0), nil
}

// listen returns a listener; port 0 means all ports.
func listen(a netip.AddrPort) config.Listen {
	l := config.Listen{Address: a.Addr()}
	if a.Port() != 0 {
		l.Ports = []flow.Ports{{First: a.Port(), Last: a.Port()}}
	}
	return l
}

// portFor returns the port of a backend, or 0 if it equals the listener's port.
func portFor(s *config.Service, port uint16) uint16 {
	for _, l := range s.Listen {
		if len(l.Ports) != 1 || l.Ports[0].First != port || l.Ports[0].Last != port {
			return port
		}
	}
	if len(s.Listen) == 0 {
		return port
	}
	return 0
}

// seconds parses a number of seconds, possibly with a fraction.
func seconds(s string) (config.Duration, bool) {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f > 0 && f < 30*24*3600) {
		return 0, false
	}
	return config.Duration(time.Duration(f * float64(time.Second)).Round(time.Millisecond)), true
}

// number parses a non-negative integer.
func number(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 0, 31)
	return int(n), err == nil
}

// probe limits the interval and timeout of a check to accepted values, and notes the change.
func (o *object) probe(k *config.Check, line int) {
	const shortest = config.Duration(100 * time.Millisecond)
	if k.Interval != 0 && k.Interval < shortest {
		o.noteChanged(line, "", "the interval of checks is at least 100ms", "")
		k.Interval = shortest
	}
	interval := k.Interval
	if interval == 0 {
		interval = config.Duration(2 * time.Second)
	}
	if k.Timeout >= interval {
		longest := interval / 10 * 9
		o.noteChanged(line, "", fmt.Sprintf("a check must end within its interval of %s: the timeout is %s, not %s", interval, longest, k.Timeout), "write a longer interval")
		k.Timeout = longest
	}
	k.Rise, k.Fall = min(k.Rise, 100), min(k.Fall, 100)
}

// schedulers maps the schedulers of IPVS; changed describes the difference.
var schedulers = map[string]struct {
	ours    config.Scheduler
	changed string
}{
	"rr": {config.SchedulerRR, ""}, "wrr": {config.SchedulerWRR, ""}, "lc": {config.SchedulerLC, ""}, "wlc": {config.SchedulerWLC, ""},
	"sh": {config.SchedulerSourceHash, "clients are spread by another hash and move once"}, "mh": {config.SchedulerSourceHash, "clients are spread by another hash and move once"},
	"lblc":  {config.SchedulerLC, "lblc keeps a destination on one server; lc does not"},
	"lblcr": {config.SchedulerLC, "lblcr keeps a destination on a set of servers; lc does not"},
	"dh":    {config.SchedulerSourceHash, "dh spreads by the destination address; source-hash by that of the client"},
	"sed":   {config.SchedulerWLC, "sed also counts the new connection; wlc does not"},
	"nq":    {config.SchedulerWLC, "nq prefers an idle server; wlc the server with the fewest flows per weight"},
	"fo":    {config.SchedulerRR, ""}, "ovf": {config.SchedulerRR, ""},
}

// schedule sets the scheduler from its IPVS name, after the backends are known. portFlag is the line of
// the flag for hashes that include the client's port; 0 without it.
func (o *object) schedule(name string, line, portFlag int) {
	if name == "" {
		name = "wlc"
	}
	s, known := schedulers[name]
	if !known {
		o.noteChanged(line, name, "unknown scheduler, replaced by rr", "write another scheduler")
		return
	}
	o.service.Scheduler = s.ours
	switch {
	case portFlag == 0:
	case name == "sh" || name == "mh":
		o.service.Scheduler = config.SchedulerMaglev
	default:
		o.d.Implied(portFlag, "", "the flag has no effect with this scheduler")
	}
	if s.changed != "" {
		o.noteChanged(line, name, s.changed, "")
	}
	if !o.hasWeights() && s.ours == config.SchedulerWRR {
		o.service.Scheduler = config.SchedulerRR
	}
	if name == "fo" || name == "ovf" {
		o.failover(name, line)
	}
}

// failover sets priorities in the order of weights, highest first, as fo and ovf of IPVS do.
func (o *object) failover(name string, line int) {
	rank := map[int]int{}
	for _, b := range o.service.Backends {
		higher := map[int]bool{}
		for _, other := range o.service.Backends {
			if other.Weight > b.Weight {
				higher[other.Weight] = true
			}
		}
		rank[b.Weight] = len(higher) + 1
	}
	for i := range o.service.Backends {
		b := &o.service.Backends[i]
		b.Priority = min(rank[b.Weight], 9)
		b.Weight = 0
	}
	if len(rank) > 9 {
		o.noteChanged(line, name, "there are nine priorities; the lowest weights share the last", "")
	}
	if name == "ovf" {
		o.noteChanged(line, name, "a server that is full does not overflow to the next one: its new connections are refused", "write limits and priorities by hand")
	}
}
