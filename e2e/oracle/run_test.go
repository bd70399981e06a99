// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/packet"
)

// run is a sequence of steps in several worlds. The first world is the oracle.
type run struct {
	testing.TB
	worlds   []*world
	ended    map[string]bool   // conversations that an exception has ended
	used     map[string]int    // exceptions, by name
	script   []string          // steps until now
	settings map[string]string // values written by sysctl steps
	slow     bool              // waits longer after each change, to exclude differences of timing
	verbose  bool              // logs the frames that each world sends
	began    time.Time         // start of the comparison of this step
}

// difference is a step after which a world differs from the oracle.
type difference struct {
	script  []string // steps up to the difference
	world   string
	missing []string // lines of the oracle alone
	extra   []string // lines of the other world alone
}

func (d *difference) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s differs from the kernel's own forwarding after the last of these steps:\n", d.world)
	for _, s := range d.script {
		fmt.Fprintf(&b, "    %s\n", s)
	}
	for _, l := range d.missing {
		fmt.Fprintf(&b, "  nftables alone: %s\n", l)
	}
	for _, l := range d.extra {
		fmt.Fprintf(&b, "  %s alone: %s\n", d.world, l)
	}
	return b.String()
}

func newRun(t testing.TB, names ...string) *run {
	r := &run{TB: t, ended: map[string]bool{}, settings: map[string]string{}, used: map[string]int{}}
	for _, name := range names {
		r.worlds = append(r.worlds, newWorld(t, name))
	}
	return r
}

func (r *run) close() {
	for _, w := range r.worlds {
		w.close(r.TB)
	}
}

// step does one step in all worlds, waits until they have the same outcome and returns nil, or how they differ.
func (r *run) step(line string) (*difference, error) {
	r.script = append(r.script, line)
	verb, rest, _ := strings.Cut(line, " ")
	do, ok := verbs[verb]
	if !ok {
		return nil, fmt.Errorf("step %q: no such verb", line)
	}
	said := make([][]string, len(r.worlds))
	for i, w := range r.worlds {
		w.sent, w.talk = nil, 0
		clear(w.wire.arrived)
		w.wire.arrived = w.wire.arrived[:0]
		out, err := do(r, w, rest)
		if err != nil {
			return nil, fmt.Errorf("%s: step %q: %w", w.name, line, err)
		}
		if out != "" {
			said[i] = []string{out}
		}
	}
	if verb == "sysctl" || verb == "ip" && !strings.Contains(rest, "neigh ") {
		time.Sleep(routesTime)
	}
	return r.compare(line, said)
}

// compare waits until all worlds have the same outcome.
func (r *run) compare(line string, said [][]string) (*difference, error) {
	r.began = time.Now()
	for round := 0; ; round++ {
		var found *difference
		for i, w := range r.worlds {
			if err := w.wire.drain(); err != nil {
				return nil, fmt.Errorf("%s: %w", w.name, err)
			}
			said[i] = append(said[i], w.received()...)
		}
		outcomes := make([]outcome, len(r.worlds))
		for i, w := range r.worlds {
			outcomes[i] = w.outcome(said[i], line)
		}
		excepted := map[string]int{}
		for i, w := range r.worlds[1:] {
			missing, extra := outcomes[0].against(outcomes[i+1], r.worlds[0], w)
			if time.Since(r.began) > 30*time.Millisecond {
				missing, extra = r.except(line, w, missing, extra, excepted)
			}
			if len(missing)+len(extra) > 0 && found == nil {
				found = &difference{script: r.script, world: w.name, missing: missing, extra: extra}
			}
		}
		if found == nil && round >= 1 && !r.outstanding(outcomes) {
			if len(excepted) > 0 {
				r.end(line)
			}
			for name, n := range excepted {
				r.used[name] += n
			}
			return nil, r.remember(line, outcomes)
		}
		if found != nil && time.Since(r.began) > patience {
			found.script = slices.Clone(found.script)
			return found, r.remember(line, outcomes)
		}
		for _, w := range r.worlds {
			w.wire.await(200 * time.Microsecond)
		}
	}
}

// end ends the conversation of a step: the worlds are no longer equal in it.
func (r *run) end(line string) {
	if f := strings.Fields(line); len(f) > 1 && slices.Contains(conversing, f[0]) {
		r.ended[f[1]] = true
	}
}

// remember stores the latest packet of a conversation, which its next packet depends on.
func (r *run) remember(line string, outcomes []outcome) error {
	f := strings.Fields(line)
	for i, w := range r.worlds {
		if r.verbose {
			r.Logf("%s, %v after %s:\n%s", w.name, time.Since(r.began).Round(time.Millisecond), line, strings.Join(append(outcomes[i].lines, outcomes[i].asked...), "\n"))
		}
		now := time.Now()
		for _, l := range outcomes[i].asked {
			w.asked[l] = now
			if f, ok := parse(l); ok {
				if a, ok := f.asksFor(); ok {
					w.asked[f.link+" "+a.String()] = now
				}
			}
		}
		if len(f) > 1 && (f[0] == "send" || f[0] == "reply" || f[0] == "again") && outcomes[i].passed != nil {
			w.seen[f[1]] = *outcomes[i].passed
		}
	}
	return nil
}

// outcome is the visible effect of a step on the gateway of a world.
type outcome struct {
	lines  []string // sent frames, and data received by its sockets
	asked  []string // address resolution requests, without repetitions
	passed *frame   // the forwarded packet
}

func (w *world) outcome(said []string, line string) outcome {
	o := outcome{lines: slices.Clone(said)}
	verb, _, _ := strings.Cut(line, " ")
	for _, f := range w.wire.arrived {
		p := packet.Parse(f.bytes)
		if timed(p) {
			continue
		}
		text := f.link + " " + w.text(p, f.bytes)
		if asks(p) {
			if !slices.Contains(o.asked, text) {
				o.asked = append(o.asked, text)
			}
			continue
		}
		o.lines = append(o.lines, text)
		if slices.Contains(conversing, verb) && w.sent != nil && passes(w.sent, p) {
			o.passed = &f
		}
	}
	slices.Sort(o.lines)
	return o
}

// timed reports whether the kernel sends a frame at a random time of its own: membership reports.
func timed(p packet.Packet) bool {
	if i, ok := packet.Find[*packet.ICMP](p); ok && i.V6 && (i.Type >= 130 && i.Type <= 133 || i.Type == 143) {
		return true
	}
	ip, ok := packet.Find[*packet.IPv4](p)
	return ok && ip.Protocol.Set && ip.Protocol.Value == unix.IPPROTO_IGMP
}

// asks reports whether a frame asks for a hardware address: the kernel repeats it when its timer ends.
func asks(p packet.Packet) bool {
	if a, ok := packet.Find[*packet.ARP](p); ok {
		return a.Operation == 1
	}
	i, ok := packet.Find[*packet.ICMP](p)
	return ok && i.V6 && i.Type == 135
}

// passes reports whether a packet is one that was sent, translated or not.
func passes(sent, p packet.Packet) bool {
	if i, ok := packet.Find[*packet.ICMP](p); ok && i.IsError() {
		return false
	}
	if a, ok := packet.Find[*packet.TCP](sent); ok {
		b, ok := packet.Find[*packet.TCP](p)
		return ok && a.Seq == b.Seq && a.Flags == b.Flags
	}
	a, _ := packet.Find[*packet.Data](sent)
	b, _ := packet.Find[*packet.Data](p)
	return a != nil && b != nil && slices.Equal(a.Bytes, b.Bytes)
}

// against returns what one outcome has and the other has not. A question that either world asked a moment
// ago is repeated when a timer ends, not at the same time in all worlds.
func (o outcome) against(other outcome, w, v *world) (missing, extra []string) {
	missing, extra = subtract(o.lines, other.lines), subtract(other.lines, o.lines)
	recent := func(l string) bool { return min(time.Since(w.asked[l]), time.Since(v.asked[l])) < 4*time.Second }
	for _, l := range subtract(o.asked, other.asked) {
		if !recent(l) {
			missing = append(missing, l)
		}
	}
	for _, l := range subtract(other.asked, o.asked) {
		if !recent(l) {
			extra = append(extra, l)
		}
	}
	return missing, extra
}

// subtract returns the elements of a without the elements of b. An element is removed as often as it occurs in b.
func subtract(a, b []string) (rest []string) {
	count := map[string]int{}
	for _, l := range b {
		count[l]++
	}
	for _, l := range a {
		if count[l] > 0 {
			count[l]--
			continue
		}
		rest = append(rest, l)
	}
	return rest
}

// text writes a frame with the choices that a datapath is free to make replaced by their order.
func (w *world) text(p packet.Packet, b []byte) string {
	wrong := ""
	if err := packet.Verify(b); err != nil {
		wrong = " WRONG: " + err.Error()
	}
	var src, dst netip.Addr
	for _, l := range p {
		switch l := l.(type) {
		case *packet.IPv4:
			src, dst = l.Src, l.Dst
			if sent, ok := packet.Find[*packet.IPv4](w.sent); !ok || l.ID != sent.ID {
				l.ID = 0 // of a packet that the gateway made
			}
		case *packet.IPv6:
			src, dst = l.Src, l.Dst
			if sent, ok := packet.Find[*packet.IPv6](w.sent); !ok || l.FlowLabel != sent.FlowLabel {
				l.FlowLabel = 0
			}
		case *packet.Fragment:
			l.ID = 0 // chosen by chance where a packet is fragmented
		case *packet.TCP:
			w.number(src, dst, "tcp", &l.SrcPort, &l.DstPort, &l.Checksum)
		case *packet.UDP:
			w.number(src, dst, "udp", &l.SrcPort, &l.DstPort, &l.Checksum)
		case *packet.ICMP:
			if l.IsQuery() {
				id := l.ID()
				to := id
				w.number(src, dst, "icmp", &id, &to, &l.Checksum)
				if id == l.ID() {
					id = to
				}
				l.Rest = uint32(id)<<16 | l.Rest&0xffff
			}
		}
	}
	return p.String() + wrong
}

// injectedID begins the range of the IPv4 identifications of the packets of all steps.
const injectedID = 0x5a00

// Range of the ports that the datapath chooses. Hosts and listeners use other ports.
const firstChosen, lastChosen = 20000, 29999

// number replaces ports that the datapath has chosen of a pool's address by their order of appearance.
func (w *world) number(src, dst netip.Addr, protocol string, sport, dport *uint16, sum *packet.Forced) {
	for _, e := range []struct {
		a netip.Addr
		p *uint16
	}{{src, sport}, {dst, dport}} {
		inside := *e.p >= firstChosen && *e.p <= lastChosen || protocol == "icmp" || strings.HasSuffix(e.a.String(), "2.100") || e.a == sourcePool6
		if !inside || !pooled[e.a] {
			continue
		}
		n := w.numberOf(fmt.Sprintf("%s %s %d", protocol, e.a, *e.p), fmt.Sprintf("%s %s", protocol, e.a))
		if sum.Set { // of a packet that is quoted in part
			before, after := []byte{byte(*e.p >> 8), byte(*e.p)}, []byte{byte(n >> 8), byte(n)}
			sum.Value = uint32(packet.UpdateChecksum(uint16(sum.Value), before, after))
		}
		*e.p = uint16(n)
	}
}

// numberOf returns a number for a port: the number of the conversation that first used it. If the conversation already
// has another port of the pool address, the number is higher.
func (w *world) numberOf(port, pool string) int {
	n, ok := w.ports[port]
	for n = max(n, w.talk); !ok; n += 1000 {
		if key := fmt.Sprintf("%s number %d", pool, n); w.ports[key] == 0 {
			w.ports[port], w.ports[key] = n, 1
			return n
		}
	}
	return w.ports[port]
}

// except takes out lines that a named exception covers.
func (r *run) except(line string, w *world, missing, extra []string, used map[string]int) ([]string, []string) {
	for _, e := range exceptions {
		if len(missing)+len(extra) == 0 {
			break
		}
		m, x := e.covers(&situation{run: r, line: line, world: w, missing: missing, extra: extra})
		if len(m)+len(x) == 0 {
			continue
		}
		missing, extra = subtract(missing, m), subtract(extra, x)
		used[e.name]++
	}
	return missing, extra
}

// conversing are the verbs with a conversation as their second word.
var conversing = []string{"send", "reply", "again", "error"}

// verbs execute a step in a world, and return a text that must be equal in all worlds.
var verbs map[string]func(r *run, w *world, rest string) (string, error)

func init() {
	verbs = map[string]func(r *run, w *world, rest string) (string, error){
		"ip": func(r *run, w *world, rest string) (string, error) {
			out, err := w.ip.run(rest)
			if err != nil {
				return "", err
			}
			if strings.Contains(rest, "neigh del") { // address resolution shows whether the neighbour existed
				out = ""
			}
			return out, r.changed(w)
		},
		"sysctl": func(r *run, w *world, rest string) (string, error) {
			key, value, _ := strings.Cut(rest, "=")
			r.settings[key] = value
			if err := w.setting(key, value); err != nil {
				return "refused", nil
			}
			// The kernel sends no event for a setting, and a datapath may notice it a second later. The event of a neighbour
			// makes it read the settings now.
			_, err := w.ip.run("neigh replace 203.0.113.250 lladdr 02:00:00:00:01:fa dev wan0 nud permanent\nneigh del 203.0.113.250 dev wan0")
			return "", errors.Join(err, r.changed(w))
		},
		"known": func(r *run, w *world, _ string) (string, error) {
			for _, link := range linkNames {
				for _, a := range neighbours[link] {
					mac, _ := hostMAC(link, netip.MustParseAddr(a))
					if out, err := w.ip.run(fmt.Sprintf("neigh replace %s lladdr %s dev %s0 nud reachable", a, mac, link)); err != nil || out != "" {
						return out, err
					}
				}
			}
			return "", r.changed(w)
		},
		"far":    func(_ *run, w *world, rest string) (string, error) { return "", w.farStep(rest) },
		"config": func(_ *run, w *world, rest string) (string, error) { return "", w.configure(scenes[rest].yaml) },
		"wait": func(_ *run, w *world, rest string) (string, error) {
			d, err := time.ParseDuration(rest)
			if w.name == "nftables" {
				time.Sleep(d)
			}
			return "", err
		},
		"send":     conversation((*world).opening),
		"reply":    conversation((*world).reply),
		"again":    conversation((*world).again),
		"error":    conversation((*world).icmpError),
		"listen":   func(_ *run, w *world, rest string) (string, error) { return w.listenStep(rest), nil },
		"unlisten": func(_ *run, w *world, rest string) (string, error) { w.closeSocket(rest); return "", nil },
		"emit":     func(_ *run, w *world, rest string) (string, error) { return w.emit(rest), nil },
	}
}

// changed has the datapath follow a change of the network.
func (r *run) changed(w *world) error {
	if err := w.follow(false); err != nil {
		return err
	}
	if r.slow {
		time.Sleep(50 * time.Millisecond)
		if err := w.follow(false); err != nil {
			return err
		}
	}
	return w.settle()
}

// farStep changes a host on a link: "silent LINK ADDRESS", "answers LINK ADDRESS", "moves LINK ADDRESS MAC".
func (w *world) farStep(rest string) error {
	f := strings.Fields(rest)
	if len(f) < 3 {
		return fmt.Errorf("far %q: no link and address", rest)
	}
	a, err := netip.ParseAddr(f[2])
	if err != nil {
		return err
	}
	s := station{f[1], a}
	switch f[0] {
	case "silent":
		w.wire.silent[s] = true
	case "answers":
		delete(w.wire.silent, s)
	case "moves":
		mac, err := packet.ParseMAC(f[3])
		if err != nil {
			return err
		}
		w.wire.moved[s] = mac
	default:
		return fmt.Errorf("far %q: no such change", rest)
	}
	return nil
}

func (w *world) listenStep(rest string) string {
	name, at, _ := strings.Cut(rest, " ")
	a, err := netip.ParseAddrPort(at)
	if err == nil {
		err = w.listen(name, a)
	}
	if err != nil {
		return "listen: " + err.Error()
	}
	return ""
}

// emit sends from a socket of the gateway: "NAME ADDRESS:PORT TEXT".
func (w *world) emit(rest string) string {
	f := strings.SplitN(rest, " ", 3)
	s := w.sockets[f[0]]
	if s == nil {
		return ""
	}
	to, err := netip.ParseAddrPort(f[1])
	if err == nil {
		err = unix.Sendto(s.fd, []byte(f[2]), 0, sockaddr(to))
	}
	if err != nil {
		return "emit: " + err.Error()
	}
	return ""
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
