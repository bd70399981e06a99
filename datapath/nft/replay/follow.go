// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/nfnl"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// addTraces converts traces to steps.
func (a *Answer) addTraces(list []nfnl.Trace, conn *nfnl.Conn, rules *ruleset.Ruleset) error {
	type owned struct {
		chain *ruleset.Chain
		owner string
	}
	chains := map[ruleset.ID]owned{}
	for _, f := range rules.Fragments {
		for _, c := range f.Chains {
			chains[c.ID] = owned{c, f.Owner}
		}
	}
	handles := map[ruleset.ID][]uint64{}
	for _, t := range list {
		if t.Table != ruleset.TableName || a.addMarkedPoint(t) || t.Kind != nfnl.TraceRule {
			continue
		}
		if handles[t.Chain] == nil {
			of, err := conn.Handles(t.Chain)
			if err != nil {
				return err
			}
			handles[t.Chain] = of
		}
		at, c := slices.Index(handles[t.Chain], t.Handle), chains[t.Chain]
		if c.chain == nil || at < 0 || at >= len(c.chain.Rules) {
			continue
		}
		a.Steps = append(a.Steps, Step{Chain: t.Chain, Rule: c.chain.Rules[at], Owner: c.owner, Verdict: t.Verdict, Goes: t.Verdict.Code == verdictContinue})
	}
	return nil
}

// addMarkedPoint records that the packet has reached a marked point, and reports whether the trace belongs to one.
func (a *Answer) addMarkedPoint(t nfnl.Trace) bool {
	switch t.Chain.Name {
	case chainStart:
	case chainRouted:
		if r, ok := tracedTuple(t); ok { // only the first trace of a chain contains the headers
			a.Routed = r
		}
	case chainLocal:
		a.Local = true
	default:
		return false
	}
	return true
}

// tracedTuple returns the addresses and ports in a trace.
func tracedTuple(t nfnl.Trace) (out flow.Tuple, ok bool) {
	at, size, protocol := 12, 4, 9 // of IPv4, RFC 791 section 3.1
	if len(t.Network) > 0 && t.Network[0]>>4 == 6 {
		at, size, protocol = 8, 16, 6 // RFC 8200 section 3
	}
	if len(t.Network) < at+2*size {
		return out, false
	}
	src, _ := netip.AddrFromSlice(t.Network[at : at+size])
	dst, _ := netip.AddrFromSlice(t.Network[at+size : at+2*size])
	out.Protocol = flow.Protocol(t.Network[protocol])
	var sport, dport uint16
	if out.Protocol.HasPorts() && len(t.Transport) >= 4 {
		sport, dport = binary.BigEndian.Uint16(t.Transport), binary.BigEndian.Uint16(t.Transport[2:])
	}
	out.Source, out.Dest = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return out, true
}

// route looks up the route of the packet at its routing decision.
func (a *Answer) route(in *link) {
	if !a.Routed.IsValid() || a.Local {
		return
	}
	index, hop, err := netdev.Routed(in.index, a.Routed)
	if err != nil {
		if a.NoRoute = err; a.wrongSide(in, a.Routed.Source.Addr()) {
			a.NoRoute = unix.EXDEV
		}
		return
	}
	a.Hop = hop
	if l, err := netlink.LinkByIndex(index); err == nil {
		a.HopOut = l.Attrs().Name
	}
}

// wrongSide reports whether the IPv4 reverse path filter drops the source. Before Linux 6.14 the route lookup returns
// EXDEV in this case, later kernels return EINVAL.
func (a *Answer) wrongSide(in *link, src netip.Addr) bool {
	filter := "0" // the higher of both settings applies: 1 is strict, 2 requires any route back
	for _, name := range []string{"all", in.name} {
		v, _ := os.ReadFile(sysctls + "ipv4/conf/" + name + "/rp_filter")
		filter = max(filter, strings.TrimSpace(string(v)))
	}
	back, err := netlink.RouteGet(src.AsSlice())
	return filter == "1" && src.Is4() && err == nil && len(back) > 0 && back[0].Type == unix.RTN_UNICAST && back[0].LinkIndex != in.index
}
