// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/model"
)

// Datapath applies configurations in the network namespace in which it was opened.
type Datapath interface {
	Apply(context.Context, *config.Config) error
	// Close removes everything from the namespace.
	Close() error
}

// Pair is two gateways of one host: one with the original rules, one with their import.
type Pair struct {
	host               model.Host
	original, imported *gateway
	datapath           Datapath
	program            Program
	text               string // text of the original rules
	result             *draft.Result
	sourcePort         uint16 // of the last probe
	// anyPort is true where the imported gateway may choose source ports by itself.
	anyPort bool
}

// NewPair creates both gateways. It calls open in the namespace of the imported one.
func NewPair(h model.Host, open func() (Datapath, error)) (p *Pair, err error) {
	p = &Pair{host: h}
	if p.original, err = newGateway(h); err != nil {
		return nil, err
	}
	if p.imported, err = newGateway(h); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	err = p.imported.inNamespace(func() error {
		p.datapath, err = open()
		return err
	})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Close removes both gateways.
func (p *Pair) Close() error {
	var errs []error
	if p.datapath != nil {
		errs = append(errs, p.imported.inNamespace(p.datapath.Close))
	}
	for _, g := range []*gateway{p.original, p.imported} {
		if g != nil {
			errs = append(errs, g.close())
		}
	}
	return errors.Join(errs...)
}

// Load replaces the rules of both gateways: the text by the program, and its import. The rest is
// loaded before Sluice starts, as docs/guide/import.md advises.
func (p *Pair) Load(program Program, text string, r *draft.Result) error {
	p.result, p.text = r, text
	cfg, err := config.Decode("imported", []byte(r.YAML))
	if err != nil {
		return err
	}
	empty, err := config.Decode("empty", []byte("services: []\n"))
	if err != nil {
		return err
	}
	cfg.HoldAddresses = config.SwitchOff
	if cfg.Attach == "" {
		cfg.Attach = config.AttachTC
	}
	p.anyPort = cfg.Datapath != config.DatapathNftables || slices.ContainsFunc(cfg.NAT, func(n config.NATRule) bool { return n.FullyRandom })
	last := p.program
	p.program = program
	err = p.original.inNamespace(func() error {
		if last != "" {
			if err := last.flush(); err != nil {
				return err
			}
		}
		if program == Nftables {
			if p.text, err = withCounters(text); err != nil {
				return err
			}
		}
		return errors.Join(forget(), program.load(p.text))
	})
	if err != nil {
		return fmt.Errorf("original rules: %w", err)
	}
	return p.imported.inNamespace(func() error {
		if last != "" {
			if err := p.datapath.Apply(context.Background(), empty); err != nil {
				return err
			}
			if err := last.flush(); err != nil {
				return err
			}
		}
		if err := program.load(r.Rest); err != nil {
			return fmt.Errorf("rest of the rules: %w", err)
		}
		if err := p.datapath.Apply(context.Background(), cfg); err != nil {
			return fmt.Errorf("imported configuration: %w", err)
		}
		return forget()
	})
}

// forget removes all entries of connection tracking.
func forget() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }

// firstPort of the probes. Ports are not used again until all have been, because flows of eBPF outlast
// the rules that made them.
const firstPort = 20000

// Difference is a probe with different results on the two gateways.
type Difference struct {
	Probe Probe `json:"probe"`
	// Original and Imported are the frames that left, as text.
	Original []string `json:"original"`
	Imported []string `json:"imported"`
	// Lines have the original rules that matched.
	Lines []int `json:"lines"`
	// Known names a deliberate difference that docs/guide/import.md describes; empty for others.
	Known string `json:"known,omitempty"`
	// Announced reports whether a note of the import is about one of the lines, or about an object
	// that the probe concerns.
	Announced bool `json:"announced"`
}

// Compare sends the probes through both gateways and returns the differences.
func (p *Pair) Compare(ctx context.Context, probes []Probe) (list []Difference, err error) {
	for _, probe := range probes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if p.sourcePort++; p.sourcePort < firstPort {
			p.sourcePort = firstPort
		}
		if probe.SrcPort == 0 {
			probe.SrcPort = p.sourcePort
		}
		one, err := p.original.runProbe(probe, p.anyPort)
		if err != nil {
			return nil, err
		}
		other, err := p.imported.runProbe(probe, p.anyPort)
		if err != nil {
			return nil, err
		}
		if slices.Equal(one, other) {
			continue
		}
		d := Difference{Probe: probe, Original: one, Imported: other}
		if err := p.explain(&d); err != nil {
			return nil, err
		}
		list = append(list, d)
	}
	return list, nil
}

// explain repeats a probe with the original rules, to find the rules that match.
func (p *Pair) explain(d *Difference) error {
	var before, after ruleCounters
	count := func(c *ruleCounters) error {
		return p.original.inNamespace(func() (err error) {
			if *c, err = p.program.counters(p.text); err != nil {
				return err
			}
			return forget()
		})
	}
	if err := count(&before); err != nil {
		return err
	}
	if _, err := p.original.runProbe(d.Probe, false); err != nil {
		return err
	}
	if err := count(&after); err != nil {
		return err
	}
	lines := after.increasedLines(before)
	for l := range lines {
		d.Lines = append(d.Lines, l)
	}
	slices.Sort(d.Lines)
	about := p.concernedObjects(d.Probe)
	d.Known = p.knownDifference(d)
	d.Announced = slices.ContainsFunc(p.result.Notes, func(n draft.Note) bool {
		return n.Kind != draft.Implied && (lines[n.Line] || about[n.Object])
	})
	return nil
}

// knownDifference returns the name of a deliberate difference, or "".
func (p *Pair) knownDifference(d *Difference) string {
	switch asked := p.concernedObjects(d.Probe); {
	case p.anyPort && len(d.Original) > 0 && strings.Contains(d.Original[0], d.Probe.Src.String()+" > "+d.Probe.Dst.String()+" ") && (len(d.Imported) == 0 || d.Original[0] == d.Imported[0]):
		return "eBPF translates the reply of an inside host to a direct connection to its address"
	case len(asked) == 0:
	case d.Probe.In == "" && len(d.Lines) == 0:
		return "the nftables datapath translates connections of the gateway itself, too"
	case p.outputInterface(d.Probe.Dst) == d.Probe.In:
		return "a packet to the address of a listener would leave by its input interface"
	}
	return ""
}

// outputInterface returns the output interface of the host's route to an address, or "" for the host's own.
func (p *Pair) outputInterface(a netip.Addr) (name string) {
	bits := -1
	for _, i := range p.host.Interfaces {
		for _, x := range i.Addresses {
			if x.Addr() == a {
				return ""
			}
			if x.Contains(a) && x.Bits() > bits {
				name, bits = i.Name, x.Bits()
			}
		}
	}
	for _, r := range p.host.Routes {
		if r.To.Contains(a) && r.To.Bits() > bits {
			name, bits = r.Interface, r.To.Bits()
		}
	}
	return name
}

// concernedObjects returns the objects that a probe concerns: the ones with its destination, and the ones that
// may translate its source.
func (p *Pair) concernedObjects(probe Probe) map[string]bool {
	list := map[string]bool{}
	c := p.result.Config
	listens := func(l *config.Listen) bool { // also for other ports of the address
		if l == nil {
			return false
		}
		address := l.Address == probe.Dst || l.Address.IsValid() && l.Address == probe.Src
		if !l.Address.IsValid() {
			i, _ := p.host.Interface(l.Interface)
			address = slices.ContainsFunc(i.Addresses, func(x netip.Prefix) bool { return x.Addr() == probe.Dst })
		}
		return address
	}
	pool := func(list []config.AddressRange) bool {
		return slices.ContainsFunc(list, func(r config.AddressRange) bool {
			return r.First.Compare(probe.Dst) <= 0 && probe.Dst.Compare(r.Last) <= 0
		})
	}
	for i := range c.Services {
		s := &c.Services[i]
		if pool(s.SourcePool) {
			list["service "+s.Name] = true
		}
		for n := range s.Listen {
			if listens(&s.Listen[n]) {
				list["service "+s.Name] = true
			}
		}
		for _, b := range s.Backends {
			if b.Address == probe.Dst || b.Address == probe.Src {
				list["service "+s.Name] = true
			}
		}
	}
	for i := range c.NAT {
		n := &c.NAT[i]
		source := pool(n.To.Addresses) || len(n.Source) == 0 && n.Type.RewritesSource()
		for _, s := range n.Source {
			source = source || s.Contains(probe.Src)
		}
		static := n.External.IsValid() && n.External.Contains(probe.Dst) || n.Internal.IsValid() && n.Internal.Contains(probe.Src)
		if source || static || listens(n.Listen) || n.To.Address.IsValid() && (n.To.Address == probe.Dst || n.To.Address == probe.Src) {
			list["nat "+n.Name] = true
		}
	}
	for i := range c.Firewall.Rules {
		list["rule "+c.Firewall.Rules[i].Name] = true
	}
	return list
}
