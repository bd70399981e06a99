// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Mapper is a datapath that maps outside ports to inside endpoints at the request of
// inside hosts (PCP, RFC 6887). Mappings survive the process; those whose rule or
// outside address an Apply takes away end with it.
type Mapper interface {
	// MappingRules lists the rules in force that allow mappings.
	MappingRules() []MappingRule
	// Mappings lists the mappings.
	Mappings() ([]Mapping, error)
	// Map makes a mapping. Outside is the suggested endpoint; its address and port may be zero. The
	// result has the assigned one. exact: fail rather than assign another one.
	Map(m Mapping, exact bool) (Mapping, error)
	// Renew sets the time at which a mapping expires; fs.ErrNotExist when there is none.
	Renew(Mapping) error
	// Unmap ends a mapping. Its flows live on.
	Unmap(Mapping) error
	// Epoch is since when no mapping was lost, as kernel.SinceBoot counts.
	Epoch() time.Duration
}

// Why a mapping is not made.
var (
	ErrQuota  = errors.New("the client's quota of ports is used up")
	ErrNoPort = errors.New("no such outside port is free")
)

// Mapping lets everybody outside reach an inside endpoint by an outside one.
type Mapping struct {
	Rule     string
	Protocol flow.Protocol // TCP or UDP
	Inside   netip.AddrPort
	Outside  netip.AddrPort
	Nonce    [12]byte // by which the client proves that the mapping is its own
	// Expires is when the mapping ends, as kernel.SinceBoot counts.
	Expires time.Duration
}

// MappingRule is a rule in force that allows mappings, with its outside addresses.
type MappingRule struct {
	*config.NATRule
	Outside []netip.Addr
}
