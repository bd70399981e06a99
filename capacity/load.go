// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// Load is the planned load of a gateway and its host. A zero field is unknown, and results that depend on it are not
// planned.
type Load struct {
	// Classes of clients with open connections.
	Classes []Class `yaml:"classes" json:"classes,omitempty"`
	// Requests are short-lived connections.
	Requests []Requests `yaml:"requests" json:"requests,omitempty"`
	// Headroom multiplies the entries; default 2.
	Headroom float64 `yaml:"headroom" json:"headroom,omitempty"`
	// Bandwidth of the line in one direction.
	Bandwidth BitRate `yaml:"bandwidth" json:"bandwidth,omitempty"`
	// Frame is the mean length of frames in bytes with FCS; default 512.
	Frame int `yaml:"frame" json:"frame,omitempty"`
	// Rules is the number of rules that each packet passes.
	Rules int `yaml:"rules" json:"rules,omitempty"`
	// BusiestDestination is the peak number of connections to the busiest destination address and port; default all
	// connections.
	BusiestDestination uint64 `yaml:"busiest-destination" json:"busiest_destination,omitempty"`
	// EndpointIndependent plans ports for mappings that do not depend on the destination (RFC 4787 REQ-1), like the
	// mappings of Sluice's eBPF datapath.
	EndpointIndependent bool `yaml:"endpoint-independent" json:"endpoint_independent,omitempty"`
	// PublicAddresses that exist; default as many as required.
	PublicAddresses uint64 `yaml:"public-addresses" json:"public_addresses,omitempty"`
	// Subscribers get a port block each. Mappings is a number that 99 % of the subscribers do not exceed; default the
	// connections of the largest class.
	Subscribers uint64 `yaml:"subscribers" json:"subscribers,omitempty"`
	Mappings    uint64 `yaml:"mappings" json:"mappings,omitempty"`
	// Helper reports that a helper (FTP, SIP) tracks the connections.
	Helper bool `yaml:"helper" json:"helper,omitempty"`
	// Host is the machine.
	Host Host `yaml:"host" json:"host"`
}

// Class is a number of clients with the same number of open connections.
type Class struct {
	Name        string `yaml:"name" json:"name"`
	Clients     uint64 `yaml:"clients" json:"clients"`
	Connections uint64 `yaml:"connections" json:"connections"` // connections per client
}

// Requests are connections that begin at a rate.
type Requests struct {
	Name     string        `yaml:"name" json:"name"`
	Protocol flow.Protocol `yaml:"protocol" json:"protocol"` // Default tcp.
	Rate     float64       `yaml:"rate" json:"rate"`         // New connections a second.
	Lifetime time.Duration `yaml:"lifetime" json:"lifetime"` // from first to last packet; ns in JSON
	// Linger is the lifetime of the entry after the last packet; default 120 s for TCP (TIME_WAIT), 30 s for UDP.
	Linger time.Duration `yaml:"linger" json:"linger"`
}

// Host is the machine that carries the load.
type Host struct {
	Memory Bytes `yaml:"memory" json:"memory,omitempty"`
	Cores  int   `yaml:"cores" json:"cores,omitempty"` // CPUs for packet processing
}

// Validate reports every error of l.
func (l *Load) Validate() error {
	var errs []error
	for i, c := range l.Classes {
		if c.Clients == 0 || c.Connections == 0 {
			errs = append(errs, fmt.Errorf("class %s: clients and connections must both be at least 1", name(c.Name, i)))
		}
	}
	for i, r := range l.Requests {
		switch {
		case !(r.Rate > 0): // also catches NaN
			errs = append(errs, fmt.Errorf("requests %s: rate %g: must be above 0", name(r.Name, i), r.Rate))
		case r.Lifetime < 0 || r.Linger < 0:
			errs = append(errs, fmt.Errorf("requests %s: lifetime and linger must not be negative", name(r.Name, i)))
		}
	}
	if l.Headroom != 0 && !(l.Headroom >= 1) {
		errs = append(errs, fmt.Errorf("headroom %g: below 1 the table is full before the load is there; use 1.5 to 3", l.Headroom))
	}
	if l.Frame != 0 && (l.Frame < 64 || l.Frame > 9216) {
		errs = append(errs, fmt.Errorf("frame %d: Ethernet frames have 64 to 9216 bytes", l.Frame))
	}
	if l.PublicAddresses > maxAddresses {
		errs = append(errs, fmt.Errorf("public addresses %d: there are %d in all", l.PublicAddresses, uint64(maxAddresses)))
	}
	if l.Rules < 0 || l.Host.Cores < 0 {
		errs = append(errs, errors.New("rules and cores must not be negative"))
	}
	return errors.Join(errs...)
}

func name(n string, i int) string {
	if n == "" {
		return fmt.Sprint(i + 1)
	}
	return n
}

// lingerOrDefault returns r.Linger or the default of its protocol.
func (r Requests) lingerOrDefault() time.Duration {
	switch {
	case r.Linger != 0:
		return r.Linger
	case r.Protocol == flow.UDP:
		return LingerUDP
	}
	return LingerTimeWait
}

// entries returns the number of concurrent entries of r in the kernel.
func (r Requests) entries() float64 { return Population(r.Rate, r.Lifetime, r.lingerOrDefault()) }

// flows returns the number of concurrent flows of r in Sluice's eBPF datapath.
func (r Requests) flows() float64 {
	kept := TimeoutTCPTransitory
	if r.Protocol == flow.UDP {
		kept = TimeoutUDP
	}
	return Population(r.Rate, r.Lifetime, max(kept, r.lingerOrDefault()))
}

// connections returns the number of concurrent entries at the peak, before headroom, and the number of their clients.
func (l *Load) connections() (entries float64, clients uint64) {
	for _, c := range l.Classes {
		entries += float64(c.Clients) * float64(c.Connections)
		clients += c.Clients
	}
	for _, r := range l.Requests {
		entries += r.entries()
	}
	return entries, clients
}

// ports returns the number of concurrent flows of one protocol at the peak, since TCP and UDP have separate ports.
// The protocols of classes are unknown, so all classes count for the busiest protocol.
func (l *Load) ports(held func(Requests) float64) (ports float64) {
	of := map[flow.Protocol]float64{}
	for _, r := range l.Requests {
		p := cmp.Or(r.Protocol, flow.TCP)
		of[p] += held(r)
		ports = max(ports, of[p])
	}
	for _, c := range l.Classes {
		ports += float64(c.Clients) * float64(c.Connections)
	}
	return ports
}

// flows returns the peak number of flows in Sluice's eBPF datapath, before headroom. Its own timeouts apply if they
// are longer.
func (l *Load) flows() (flows float64) {
	for _, c := range l.Classes {
		flows += float64(c.Clients) * float64(c.Connections)
	}
	for _, r := range l.Requests {
		flows += r.flows()
	}
	return flows
}

func (l *Load) headroom() float64 {
	if l.Headroom == 0 {
		return 2
	}
	return l.Headroom
}

func (l *Load) frame() int {
	if l.Frame == 0 {
		return 512
	}
	return l.Frame
}

// mappings returns the maximum number of mappings of a subscriber.
func (l *Load) mappings() uint64 {
	m := l.Mappings
	if m == 0 {
		for _, c := range l.Classes {
			m = max(m, c.Connections)
		}
	}
	return m
}
