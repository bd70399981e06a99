// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// IPsecPolicy is an entry of "ip xfrm policy" that encrypts or drops forwarded packets.
type IPsecPolicy struct {
	Source, Dest         netip.Prefix
	Protocol             flow.Protocol // flow.Any: all.
	SourcePort, DestPort uint16        // in host byte order; 0: any
	Blocks               bool          // The packets are dropped; otherwise they leave encrypted.
}

// String returns the policy in the notation of operators.
func (p IPsecPolicy) String() string {
	does := "encrypts"
	if p.Blocks {
		does = "blocks"
	}
	return fmt.Sprintf("%s to %s: %s", p.Source, p.Dest, does)
}

// IPsecPolicies returns the policies of the calling thread's network namespace. It omits policies of XFRM interfaces
// and policies with a mark, because the routed interface or a netfilter mark selects them.
func IPsecPolicies() ([]IPsecPolicy, error) {
	return Whole(func() (list []IPsecPolicy, err error) {
		req := nl.NewNetlinkRequest(nl.XFRM_MSG_GETPOLICY, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		messages, err := req.Execute(unix.NETLINK_XFRM, nl.XFRM_MSG_NEWPOLICY)
		if withoutIPsec(err) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("IPsec policies: %w", err)
		}
		for _, m := range messages {
			if p, ok := ipsecPolicy(m); ok {
				list = append(list, p)
			}
		}
		return list, nil
	})
}

// withoutIPsec reports whether an error means that the kernel has no IPsec (CONFIG_XFRM_USER).
func withoutIPsec(err error) bool { return errors.Is(err, unix.EPROTONOSUPPORT) }

// ipsecPolicy decodes struct xfrm_userpolicy_info with its attributes; false if the policy does not apply to
// forwarded packets.
func ipsecPolicy(message []byte) (p IPsecPolicy, ok bool) {
	if len(message) < nl.SizeofXfrmUserpolicyInfo {
		return p, false
	}
	info := nl.DeserializeXfrmUserpolicyInfo(message)
	attributes, err := nl.ParseRouteAttr(message[nl.SizeofXfrmUserpolicyInfo:])
	if err != nil {
		return p, false
	}
	p.Blocks = netlink.PolicyAction(info.Action) == netlink.XFRM_POLICY_BLOCK
	dir, encrypts := netlink.Dir(info.Dir), false
	for _, a := range attributes {
		switch {
		case a.Attr.Type == nl.XFRMA_TMPL:
			encrypts = dir == netlink.XFRM_DIR_OUT && len(a.Value) > 0
		case a.Attr.Type == nl.XFRMA_IF_ID && len(a.Value) >= 4 && binary.NativeEndian.Uint32(a.Value) != 0,
			a.Attr.Type == nl.XFRMA_MARK && len(a.Value) >= 8 && binary.NativeEndian.Uint64(a.Value) != 0:
			return p, false
		}
	}
	if !encrypts && (!p.Blocks || dir != netlink.XFRM_DIR_OUT && dir != netlink.XFRM_DIR_FWD) {
		return p, false
	}
	s := &info.Sel
	p.Source, ok = selectorPrefix(s.Family, s.Saddr, s.PrefixlenS)
	if !ok {
		return p, false
	}
	p.Dest, ok = selectorPrefix(s.Family, s.Daddr, s.PrefixlenD)
	p.Protocol = flow.Protocol(s.Proto)
	if s.SportMask == 0xffff {
		p.SourcePort = nl.Swap16(s.Sport)
	}
	if s.DportMask == 0xffff {
		p.DestPort = nl.Swap16(s.Dport)
	}
	return p, ok
}

func selectorPrefix(family uint16, a nl.XfrmAddress, bits uint8) (netip.Prefix, bool) {
	addr := netip.AddrFrom16(a)
	if family == unix.AF_INET {
		addr = netip.AddrFrom4([4]byte(a[:4]))
	}
	p, err := addr.Prefix(int(bits))
	return p, err == nil
}
