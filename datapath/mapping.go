// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Mapper is a datapath that maps outside ports to inside endpoints at the request of inside hosts (PCP, RFC 6887).
// Mappings survive the process. An Apply that removes the rule or the outside address ends the mapping.
type Mapper interface {
	// MappingRules returns the active rules that allow mappings.
	MappingRules() []MappingRule
	// Mappings returns the mappings.
	Mappings() ([]Mapping, error)
	// Map creates a mapping. Outside is the suggested endpoint; its address and port may be zero. The result contains
	// the assigned one. With exact, Map fails if it cannot assign the suggested one.
	Map(m Mapping, exact bool) (Mapping, error)
	// Renew sets the expiry of a mapping; fs.ErrNotExist if there is none.
	Renew(Mapping) error
	// Unmap ends a mapping. Its flows remain.
	Unmap(Mapping) error
	// Epoch is the time since which no mapping was lost, on the clock of kernel.SinceBoot.
	Epoch() time.Duration
}

// Reasons why a mapping is not created.
var (
	ErrQuota  = errors.New("the client's quota of ports is used up")
	ErrNoPort = errors.New("no such outside port is free")
)

// Mapping lets every outside host reach an inside endpoint through an outside one.
type Mapping struct {
	Rule     string
	Protocol flow.Protocol // TCP or UDP
	Inside   netip.AddrPort
	Outside  netip.AddrPort
	Nonce    [12]byte // proves that the mapping belongs to the client
	// Expires is the expiry time on the clock of kernel.SinceBoot.
	Expires time.Duration
}

// MappingRule is an active rule that allows mappings, with its outside addresses.
type MappingRule struct {
	*config.NATRule
	Outside []netip.Addr
}
