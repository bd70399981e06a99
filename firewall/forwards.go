// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Forwards counts rules with translated packets that the host must forward. Redirects, the host's own packets, and
// targets on the host need no forwarding.
type Forwards struct {
	IPv4, IPv6 int
	Either     int // in tables of both families
}

func (f *Forwards) add(family nftables.TableFamily) {
	switch family {
	case nftables.TableFamilyIPv4:
		f.IPv4++
	case nftables.TableFamilyIPv6:
		f.IPv6++
	default:
		f.Either++
	}
}

// fromOutside returns the rules of chains that packets from outside can reach.
func fromOutside(chains []*nftables.Chain, rules map[string][]*nftables.Rule, w *chainGraph) (met []*nftables.Rule) {
	sent, others := map[string]bool{}, map[string]bool{}
	for _, c := range chains {
		switch {
		case c.Hooknum == nil:
		case *c.Hooknum == *nftables.ChainHookOutput:
			w.markReachable(chainKey(c.Table, c.Name), sent)
		default:
			w.markReachable(chainKey(c.Table, c.Name), others)
		}
	}
	for key, list := range rules {
		if sent[key] && !others[key] {
			continue
		}
		met = append(met, list...)
	}
	return met
}

// readNft adds the rules that require forwarding.
func (f *Forwards) readNft(rules []*nftables.Rule, local []netip.Addr) {
	for _, rule := range rules {
		if family, needed := needsForwarding(rule, local); needed {
			f.add(family)
		}
	}
}

// needsForwarding reports whether a rule translates packets such that the host must forward them, and their family.
func needsForwarding(rule *nftables.Rule, local []netip.Addr) (family nftables.TableFamily, needed bool) {
	family = rule.Table.Family
	for i, e := range rule.Exprs {
		switch e := e.(type) {
		case *expr.Cmp:
			if of, ok := protocolFamily(rule.Exprs[:i], e); ok && family == nftables.TableFamilyINet {
				family = of
			}
		case *expr.Masq:
			return family, true
		case *expr.NAT:
			if family == nftables.TableFamilyINet && e.Family != 0 {
				family = nftables.TableFamily(e.Family)
			}
			return family, e.Type == expr.NATTypeSourceNAT || e.RegAddrMin != 0 && !loadsLocal(rule.Exprs[:i], e.RegAddrMin, local)
		case *expr.Target:
			return family, targetForwards(e, local)
		}
	}
	return family, false
}

// protocolFamily returns the family of a condition "meta nfproto ipv4".
func protocolFamily(before []expr.Any, e *expr.Cmp) (nftables.TableFamily, bool) {
	if len(before) == 0 || len(e.Data) == 0 || e.Op != expr.CmpOpEq {
		return 0, false
	}
	m, ok := before[len(before)-1].(*expr.Meta)
	return nftables.TableFamily(e.Data[0]), ok && m.Key == expr.MetaKeyNFPROTO
}

// loadsLocal reports whether an immediate loads a local address into a register.
func loadsLocal(before []expr.Any, register uint32, local []netip.Addr) bool {
	for _, e := range slices.Backward(before) {
		if i, ok := e.(*expr.Immediate); ok && i.Register == register {
			addr, ok := netip.AddrFromSlice(i.Data)
			return ok && isLocal(addr, local)
		}
	}
	return false
}

// targetForwards evaluates a target of iptables-nft.
func targetForwards(e *expr.Target, local []netip.Addr) bool {
	switch e.Name {
	case "SNAT", "MASQUERADE", "NETMAP":
		return true
	case "DNAT":
		r := natRange(e)
		if r == nil {
			return true
		}
		addr, _ := netip.AddrFromSlice(r.MinIP)
		return !isLocal(addr, local)
	}
	return false
}

// natRange returns the translation range of an iptables target; nil if it is unknown.
func natRange(e *expr.Target) *xt.NatRange {
	switch info := e.Info.(type) {
	case *xt.NatRange:
		return info
	case *xt.NatRange2:
		return &info.NatRange
	}
	return nil
}

// addLegacyLine adds a line of iptables-legacy-save.
func (f *Forwards) addLegacyLine(family nftables.TableFamily, words []string, local []netip.Addr) {
	at := slices.Index(words, "-j")
	if words[1] == "OUTPUT" || at < 0 || at+1 >= len(words) {
		return
	}
	switch words[at+1] {
	case "SNAT", "MASQUERADE", "NETMAP":
		f.add(family)
	case "DNAT":
		if addr := legacyTarget(words); !isLocal(addr, local) {
			f.add(family)
		}
	}
}

// legacyTarget parses --to-destination; the zero Addr if it is not a single address.
func legacyTarget(words []string) netip.Addr {
	value := ""
	if at := slices.Index(words, "--to-destination"); at >= 0 && at+1 < len(words) {
		value = words[at+1]
	}
	if end, err := netip.ParseAddrPort(value); err == nil {
		return end.Addr()
	}
	if host, _, found := strings.Cut(value, ":"); found && strings.Count(value, ":") == 1 {
		value = host // the address is followed by ports
	}
	addr, _ := netip.ParseAddr(strings.Trim(value, "[]"))
	return addr
}

func isLocal(addr netip.Addr, local []netip.Addr) bool {
	return addr.IsLoopback() || addr.IsUnspecified() || slices.Contains(local, addr.Unmap())
}

// localAddresses returns the addresses of the calling thread's namespace.
func localAddresses() (local []netip.Addr) {
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, unix.AF_UNSPEC) })
	if err != nil {
		return nil
	}
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			local = append(local, addr.Unmap())
		}
	}
	return local
}
