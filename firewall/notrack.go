// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// readUntracked counts notrack rules that match at most a protocol, a source and an interface. Rules with ports or
// destinations, as for DNS and stateless services, concern traffic without translation.
func (f *Forwards) readUntracked(rules []*nftables.Rule) {
	for _, rule := range rules {
		if isNotrackRule(rule.Exprs) && !isNarrow(rule.Exprs) {
			family := rule.Table.Family
			for i, e := range rule.Exprs {
				if cmp, is := e.(*expr.Cmp); is && family == nftables.TableFamilyINet {
					if of, known := protocolFamily(rule.Exprs[:i], cmp); known {
						family = of
					}
				}
			}
			f.add(family)
		}
	}
}

// isNotrackRule reports whether a rule excludes packets from connection tracking.
func isNotrackRule(exprs []expr.Any) bool {
	return slices.ContainsFunc(exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Notrack:
			return true
		case *expr.Target:
			return e.Name == "NOTRACK" || e.Name == "CT" && ctNotrack(e)
		}
		return false
	})
}

// ctNotrack reports whether the iptables target CT has --notrack: XT_CT_NOTRACK in the flags at the beginning of
// struct xt_ct_target_info_v1.
func ctNotrack(e *expr.Target) bool {
	info, ok := e.Info.(*xt.Unknown)
	return ok && len(*info) > 1 && binary.NativeEndian.Uint16(*info)&1 != 0
}

// isNarrow reports whether a rule has conditions beyond a protocol, a source, and an interface other than lo.
func isNarrow(exprs []expr.Any) bool {
	var asked expr.Any // the header field that was loaded last
	return slices.ContainsFunc(exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Notrack, *expr.Target, *expr.Counter, *expr.Verdict, *expr.Bitwise:
			return false
		case *expr.Match:
			return e.Name != "comment"
		case *expr.Meta:
			asked = e
			return !slices.Contains([]expr.MetaKey{expr.MetaKeyNFPROTO, expr.MetaKeyL4PROTO, expr.MetaKeyIIF, expr.MetaKeyIIFNAME, expr.MetaKeyPROTOCOL}, e.Key)
		case *expr.Payload:
			asked = e
			return e.Base != expr.PayloadBaseNetworkHeader || e.Offset != 12 && e.Offset != 8 // the source of IPv4, of IPv6
		case *expr.Cmp:
			meta, is := asked.(*expr.Meta)
			if !is {
				return e.Op != expr.CmpOpEq
			}
			switch meta.Key {
			case expr.MetaKeyL4PROTO:
				return len(e.Data) == 1 && (e.Data[0] == unix.IPPROTO_ICMP || e.Data[0] == unix.IPPROTO_ICMPV6)
			case expr.MetaKeyIIFNAME:
				return bytes.HasPrefix(e.Data, []byte("lo\x00"))
			case expr.MetaKeyIIF:
				return len(e.Data) == 4 && binary.NativeEndian.Uint32(e.Data) == 1
			}
			return e.Op != expr.CmpOpEq
		}
		return true
	})
}

// legacyUntracked adds a line of iptables-legacy-save.
func (f *Forwards) legacyUntracked(family nftables.TableFamily, words []string) {
	at := slices.Index(words, "-j")
	if words[1] == "OUTPUT" || at < 0 || at+1 >= len(words) ||
		words[at+1] != "NOTRACK" && (words[at+1] != "CT" || !slices.Contains(words, "--notrack")) {
		return
	}
	for i := 2; i < at; i += 2 {
		value := words[min(i+1, at)]
		if option := words[i]; option != "-i" && option != "-s" && option != "-p" ||
			option == "-i" && value == "lo" || option == "-p" && (value == "icmp" || value == "ipv6-icmp") {
			return
		}
	}
	f.add(family)
}
