// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// Run runs the case on the subject and returns every deviation, each with its file, line and a field-level
// difference. It stops at the first step that fails in the subject.
func (c *Case) Run(s Subject) error {
	if err := s.Reset(c.Config, c.Host); err != nil {
		return fmt.Errorf("%s: %s: reset: %w", c.Path, s.Name(), err)
	}
	r := run{c: c, s: s, host: c.Host, names: map[string]string{}, reasons: map[datapath.ReasonCounter]uint64{}}
	var errs []error
	for _, step := range c.Steps {
		err := r.runStep(step)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", c.Path, step.Line, s.Name(), err))
		}
		if errors.Is(err, errStop) {
			return errors.Join(errs...)
		}
	}
	if err := r.checkCounts(); err != nil {
		errs = append(errs, fmt.Errorf("%s: %s: %w", c.Path, s.Name(), err))
	}
	return errors.Join(errs...)
}

var errStop = errors.New("the case cannot go on")

// run is one case on one subject.
type run struct {
	c     *Case
	s     Subject
	host  model.Host        // The current host.
	names map[string]string // Values of $names.
	// reasons counts each reason; Packets of the key is 0.
	reasons map[datapath.ReasonCounter]uint64
}

// checkCounts compares a datapath's counts by reason with the results of the packets. The model and subjects that observe
// only the wires have no such counts.
func (r *run) checkCounts() error {
	if len(r.reasons) == 0 {
		return nil
	}
	c, err := r.s.Counters()
	if err != nil || c.Reasons == nil {
		return err
	}
	var errs []error
	for _, got := range c.Reasons {
		n := got.Packets
		got.Packets = 0
		if want := r.reasons[got]; want != n {
			errs = append(errs, fmt.Errorf("%s %s %s: want %d packets counted, got %d", got.Family, got.Action, got.Reason, want, n))
		}
		delete(r.reasons, got)
	}
	for k, n := range r.reasons {
		errs = append(errs, fmt.Errorf("%s %s %s: want %d packets counted, got none", k.Family, k.Action, k.Reason, n))
	}
	return errors.Join(errs...)
}

// Family returns the family under which a datapath counts a frame with that reason.
func Family(frame []byte, reason model.Reason) string {
	if frame = model.Untagged(frame); len(frame) >= 14 && reason != model.ReasonNotIP {
		switch binary.BigEndian.Uint16(frame[12:]) {
		case packet.TypeIPv4:
			return "ipv4"
		case packet.TypeIPv6:
			return "ipv6"
		}
	}
	return "other"
}

func (r *run) runStep(s Step) error {
	switch s.Kind {
	case StepPacket:
		return r.packet(s)
	case StepWait:
		return r.s.Advance(s.Wait)
	case StepFlows:
		flows, err := r.s.Flows()
		if err == nil && len(flows) != s.Count {
			err = fmt.Errorf("want %d flows, got %d", s.Count, len(flows))
			for _, f := range flows {
				err = fmt.Errorf("%w\n  %s / %s %s", err, f.Original, f.Reply, f.State)
			}
		}
		return err
	case StepBackend:
		return r.backend(s.Words)
	case StepHost:
		next, err := Changed(r.host, strings.Join(s.Words, " "))
		if err != nil {
			return err
		}
		r.host = next
		return r.s.SetHost(next)
	case StepApply:
		return r.s.Apply(r.c.Later[strings.Join(s.Words, " ")])
	case StepMap:
		return mapping(s.Words, r.s.Map)
	case StepUnmap:
		return mapping(s.Words, r.s.Unmap)
	case StepCount:
		return r.count(s.Words)
	case StepWhere:
		return r.checkCondition(s.Words)
	}
	return nil
}

func (r *run) packet(s Step) error {
	frame, err := r.buildFrame(s)
	if err != nil {
		return errors.Join(err, errStop)
	}
	got, err := r.s.Step(model.Arrival{Interface: s.Interface, Frame: frame})
	if err != nil {
		return errors.Join(err, errStop)
	}
	var errs []error
	if got.Action != "" {
		r.reasons[datapath.ReasonCounter{Family: Family(frame, got.Reason), Action: string(got.Action), Reason: string(got.Reason)}]++
	}
	if s.passed {
		return nil
	}
	if s.Action != "" && got.Action != s.Action || s.Reason != "" && got.Reason != s.Reason {
		errs = append(errs, fmt.Errorf("want %s %s, got %s %s", s.Action, s.Reason, got.Action, got.Reason))
	}
	if len(got.Out) != len(s.Out) {
		errs = append(errs, fmt.Errorf("want %d packets out, got %d", len(s.Out), len(got.Out)))
		for _, d := range got.Out {
			errs = append(errs, fmt.Errorf("  %s: %s", d.Interface, packet.Parse(d.Frame)))
		}
	}
	for i := range min(len(got.Out), len(s.Out)) {
		errs = append(errs, r.compare(s.Out[i], got.Out[i], frame))
	}
	return errors.Join(errs...)
}

// buildFrame builds the frame of a step.
func (r *run) buildFrame(s Step) ([]byte, error) {
	text, missing := r.expand(s.Text)
	if len(missing) > 0 {
		return nil, fmt.Errorf("%v: no packet showed a value yet", missing)
	}
	p, err := packet.Text(text)
	if err != nil {
		return nil, err
	}
	iface, ok := r.host.Interface(s.Interface)
	if !ok {
		return nil, fmt.Errorf("no interface %s", s.Interface)
	}
	if _, ok := p[0].(*packet.Ethernet); !ok {
		p = append(packet.Packet{&packet.Ethernet{Src: r.sender(p, s.Interface), Dst: iface.MAC}}, p...)
	}
	frame := p.Build()
	if s.Piece.size == 0 {
		return frame, nil
	}
	pieces, err := packet.Fragments(frame, s.Piece.size, s.Piece.id)
	if err == nil && (s.Piece.n < 1 || s.Piece.n > len(pieces)) {
		err = fmt.Errorf("fragment %d of %d", s.Piece.n, len(pieces))
	}
	if err != nil {
		return nil, err
	}
	return pieces[s.Piece.n-1], nil
}

// sender returns the MAC of the neighbour that the packet's source is routed to. If that is not on the interface, it
// returns the MAC of the interface's first neighbour.
func (r *run) sender(p packet.Packet, iface string) packet.MAC {
	if src, _ := ends(p); src.IsValid() {
		if i, m, ok := r.host.NextHop(src); ok && i.Name == iface {
			return m
		}
	}
	for _, n := range r.host.Neighbours {
		if n.Interface == iface {
			return n.MAC
		}
	}
	return packet.MAC{2}
}

// ends returns the addresses of the outermost IP layer.
func ends(p packet.Packet) (src, dst netip.Addr) {
	for _, l := range p {
		switch ip := l.(type) {
		case *packet.IPv4:
			return ip.Src, ip.Dst
		case *packet.IPv6:
			return ip.Src, ip.Dst
		}
	}
	return
}

// compare compares one outgoing packet with the expected one.
func (r *run) compare(want Expected, got model.Departure, in []byte) error {
	p, err := r.buildExpected(want, got, in)
	if err != nil {
		return err
	}
	var errs []error
	if want.Interface != got.Interface {
		errs = append(errs, fmt.Errorf("want the packet out of %s, got it out of %s", want.Interface, got.Interface))
	}
	if d := packet.Diff(p.Build(), got.Frame); d != "" {
		errs = append(errs, fmt.Errorf("packet out of %s:\n  %s\n  got %s", got.Interface, strings.ReplaceAll(d, "\n", "\n  "), packet.Parse(got.Frame)))
	} else if err := packet.Verify(got.Frame); err != nil && packet.Verify(in) == nil {
		errs = append(errs, fmt.Errorf("packet out of %s: %w", got.Interface, err))
	}
	return errors.Join(errs...)
}

var variable = regexp.MustCompile(`(\$[a-z][a-z0-9]*)(\+[0-9]+)?`)

// expand replaces the $names that have a value and returns the others.
func (r *run) expand(text string) (string, []string) {
	var missing []string
	text = variable.ReplaceAllStringFunc(text, func(word string) string {
		name, more, _ := strings.Cut(word, "+")
		v, ok := r.names[name]
		if !ok {
			missing = append(missing, name)
			return word
		}
		a, err := strconv.ParseUint(v, 10, 32)
		b, err2 := strconv.ParseUint(more, 10, 32)
		if err != nil || err2 != nil {
			return v
		}
		return strconv.FormatUint(uint64(uint32(a)+uint32(b)), 10)
	})
	return text, missing
}

// buildExpected builds the expected packet and takes unknown $names from the actual one.
func (r *run) buildExpected(want Expected, got model.Departure, in []byte) (packet.Packet, error) {
	text, missing := r.expand(want.Text)
	if len(missing) > 0 {
		r.learn(text, packet.Parse(got.Frame))
		if text, missing = r.expand(want.Text); len(missing) > 0 {
			return nil, fmt.Errorf("%v: not in the packet that left: %s", missing, packet.Parse(got.Frame))
		}
	}
	incoming := packet.Parse(in)
	var p packet.Packet
	var err error
	if edit, ok := strings.CutPrefix(text, "same"); ok {
		p = incoming
		if edit = strings.TrimSpace(edit); edit != "" {
			if p, err = p.Edit(edit); err != nil {
				return nil, err
			}
		}
		if strings.Contains(edit, "eth(") {
			return p, nil
		}
		p = withoutLink(p)
	} else {
		text = strings.ReplaceAll(text, "{in}", withoutLink(incoming).String())
		if p, err = packet.Text(text); err != nil {
			return nil, err
		}
	}
	if _, ok := p[0].(*packet.Ethernet); ok {
		return p, nil
	}
	return append(r.link(p, want.Interface), p...), nil
}

func withoutLink(p packet.Packet) packet.Packet {
	for i, l := range p {
		switch l.(type) {
		case *packet.Ethernet, *packet.VLAN:
		default:
			return p[i:]
		}
	}
	return nil
}

// link returns the Ethernet header of p on the interface.
func (r *run) link(p packet.Packet, name string) packet.Packet {
	iface, _ := r.host.Interface(name)
	e := &packet.Ethernet{Src: iface.MAC}
	if _, dst := ends(p); dst.IsValid() {
		if out, m, ok := r.host.NextHop(dst); ok && out.Name == name {
			e.Dst = m
		}
	}
	return packet.Packet{e}
}

// learn takes the values of the $names in text from the same fields of got. With "same", a layer in text means the
// nth layer of that name.
func (r *run) learn(text string, got packet.Packet) {
	text = strings.TrimSpace(strings.TrimPrefix(text, "same"))
	for name, value := range packet.Match(text, got) {
		if _, known := r.names[name]; !known {
			r.names[name] = value
		}
	}
}

// mapping runs "map RULE PROTOCOL INSIDE OUTSIDE" and "unmap". The mapping must be created as requested, unless
// "refused" follows.
func mapping(w []string, do func(datapath.Mapping) error) error {
	if len(w) != 4 && (len(w) != 5 || w[4] != "refused") {
		return fmt.Errorf("map RULE PROTOCOL INSIDE OUTSIDE [refused]")
	}
	m := datapath.Mapping{Rule: w[0]}
	err := m.Protocol.UnmarshalText([]byte(w[1]))
	if err == nil {
		m.Inside, err = netip.ParseAddrPort(w[2])
	}
	if err == nil {
		m.Outside, err = netip.ParseAddrPort(w[3])
	}
	if err != nil {
		return err
	}
	if err = do(m); len(w) == 4 {
		return err
	}
	if err == nil {
		return fmt.Errorf("%s was mapped to %s", m.Inside, m.Outside)
	}
	return nil
}

// backend runs "backend SERVICE/NAME STATE".
func (r *run) backend(w []string) error {
	if len(w) != 2 {
		return fmt.Errorf("backend SERVICE/NAME up|drain|down")
	}
	service, name, _ := strings.Cut(w[0], "/")
	for _, s := range []datapath.State{datapath.Up, datapath.Drain, datapath.Down} {
		if s.String() == w[1] {
			return r.s.SetState(service, name, s)
		}
	}
	return fmt.Errorf("%q: not up, drain or down", w[1])
}

// checkCondition runs "where $p even", "odd", "A-B", "= X", "!= X", "same-parity X".
func (r *run) checkCondition(w []string) error {
	if len(w) < 2 {
		return fmt.Errorf("where $NAME even | odd | FIRST-LAST | = VALUE | != VALUE")
	}
	v, ok := r.names[w[0]]
	if !ok {
		return fmt.Errorf("%s has no value", w[0])
	}
	n, _ := strconv.Atoi(v)
	other := ""
	if len(w) > 2 {
		other, _ = r.expand(w[2])
	}
	fail := fmt.Errorf("%s is %s: not %s", w[0], v, strings.Join(w[1:], " "))
	switch {
	case w[1] == "even" && n%2 == 0, w[1] == "odd" && n%2 == 1, w[1] == "=" && v == other, w[1] == "!=" && v != other:
		return nil
	case w[1] == "even" || w[1] == "odd" || w[1] == "=" || w[1] == "!=":
		return fail
	}
	var lo, hi int
	if _, err := fmt.Sscanf(w[1], "%d-%d", &lo, &hi); err != nil {
		return err
	}
	if n < lo || n > hi {
		return fail
	}
	return nil
}

// count compares counters with the expected values of a line: "count service NAME key=N ...", "count backend
// SERVICE/NAME ...", "count nat NAME ..." and "count reason FAMILY ACTION REASON N".
func (r *run) count(w []string) error {
	c, err := r.s.Counters()
	if err != nil {
		return err
	}
	if len(w) < 3 {
		return fmt.Errorf("count service|backend|nat NAME key=N")
	}
	have := map[string]uint64{}
	service, backend, _ := strings.Cut(w[1], "/")
	switch w[0] {
	case "service", "backend":
		for _, s := range c.Services {
			if s.Name != service {
				continue
			}
			have = map[string]uint64{"connections": s.Connections, "packets": s.Packets, "bytes": s.Bytes, "refused": s.Refused}
			for _, b := range s.Backends {
				if b.Name == backend {
					have = map[string]uint64{"connections": b.Connections, "packets": b.Packets, "bytes": b.Bytes}
				}
			}
		}
	case "nat":
		for _, n := range c.NAT {
			if n.Name == w[1] {
				have = map[string]uint64{"packets": n.Packets, "bytes": n.Bytes}
			}
		}
	default:
		return fmt.Errorf("%q: not service, backend or nat", w[0])
	}
	var errs []error
	for _, pair := range w[2:] {
		key, value, _ := strings.Cut(pair, "=")
		got, ok := have[key]
		if want, err := strconv.ParseUint(value, 10, 64); err != nil || !ok || got != want {
			errs = append(errs, fmt.Errorf("count %s %s: want %s, got %d", w[0], w[1], pair, got))
		}
	}
	return errors.Join(errs...)
}
