// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"strings"

	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// InSlots reports whether the element is a slot of a plain service.
func (s *Service) InSlots(e rs.Element) bool {
	return strings.HasPrefix(e.Set.Name, mapTargets+"-") || strings.HasPrefix(e.Set.Name, mapHosts+"-")
}

// SlotOwner returns the key of the backend in a slot of a plain service.
func (s *Service) SlotOwner(e rs.Element) string {
	owners := s.Slots[e.Set.Table]
	if n := int(binary.NativeEndian.Uint32([]byte(e.Key)) - s.id); n < len(owners) {
		return owners[n]
	}
	return ""
}

// ChainOwner returns the key of the backend with a chain.
func (s *Service) ChainOwner(chain string) (string, bool) {
	_, rest, ok := strings.Cut(chain, "/"+identifier(s.Name)+"/")
	if !ok {
		return "", false
	}
	for _, b := range s.source.Backends {
		if identifier(backendName(b)) == rest {
			return b.Key(), true
		}
	}
	return "", false
}

// IsDown reports whether the chain is the service's chain while it has no usable backend. Its rules
// then count refused connections.
func (s *Service) IsDown(c *rs.Chain) bool {
	svc := datapath.Service{Service: &s.source, State: s.state}
	return len(svc.Active()) == 0 && strings.HasSuffix(c.Name, "/"+identifier(s.Name))
}

// RuleCounter returns the name of the counter of a firewall rule.
func RuleCounter(rule string) string { return counterPrefix + identifier(rule) }
