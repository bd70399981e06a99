// SPDX-License-Identifier: Apache-2.0

package config

import "slices"

// Cluster configures this gateway as one of several behind the same routers.
type Cluster struct {
	// Announce writes the addresses of services, port-forwards and pools as kernel routes. A BGP
	// speaker on this host exports them. A route is removed while no backend of its services is
	// usable, an interface is down, or the rules of the datapath are missing.
	Announce *Announce `yaml:"announce,omitempty" json:"announce,omitempty" jsonschema:"required"`
}

// Announce are the routes of the announced addresses: "unreachable ADDRESS table TABLE proto
// PROTOCOL metric METRIC". All keys have defaults, so that "announce: {}" is enough.
type Announce struct {
	// Table is the number of the routing table. No routing rule may select it.
	Table int `yaml:"table,omitempty" json:"table,omitempty" jsonschema:"minimum=1,maximum=2147483647,default=5100"`
	// Protocol marks the routes. Sluice removes all other routes of this protocol from the table.
	Protocol int `yaml:"protocol,omitempty" json:"protocol,omitempty" jsonschema:"minimum=5,maximum=255,default=76"`
	// Metric of the routes. A speaker can export it as the MED: routers that compare it prefer the
	// gateway with the lowest one.
	Metric int `yaml:"metric,omitempty" json:"metric,omitempty" jsonschema:"minimum=1,maximum=2147483647,default=10"`
	// Interfaces that the gateway needs. While one of them is missing, is down or has no carrier,
	// no address is announced. The default is the interfaces of the key interfaces; if that is empty
	// too, interfaces do not matter.
	Interfaces []string `yaml:"interfaces,omitempty" json:"interfaces,omitempty" jsonschema:"maxItems=64"`
}

// Defaults of announcements.
const (
	defaultAnnounceTable    = 5100
	defaultAnnounceProtocol = 76
	defaultAnnounceMetric   = 10
)

// Announcements returns the settings of announcements, or nil if nothing is announced.
func (c *Config) Announcements() *Announce {
	if c.Cluster == nil {
		return nil
	}
	return c.Cluster.Announce
}

func (c *Cluster) setDefaults() {
	if a := c.Announce; a != nil {
		orElse(&a.Table, defaultAnnounceTable)
		orElse(&a.Protocol, defaultAnnounceProtocol)
		orElse(&a.Metric, defaultAnnounceMetric)
	}
}

// cluster checks the part of the configuration about several gateways.
func (v *validator) cluster() {
	a := v.c.Announcements()
	if a == nil {
		return
	}
	where := at("cluster").key("announce")
	if a.Table >= 253 && a.Table <= 255 {
		v.errorf(where.key("table"), "write the number of a table that no routing rule selects, such as 5100", "packets are routed by table %d, and would be refused by the announced routes", a.Table)
	}
	for i, name := range a.Interfaces {
		p := where.key("interfaces").index(i)
		v.ifname(p, name)
		if slices.Contains(a.Interfaces[:i], name) {
			v.errorf(p, "keep one of them", "interface %s is listed twice", name)
		}
	}
}
