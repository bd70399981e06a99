// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

const (
	localRange    = "net.ipv4.ip_local_port_range"
	localReserved = "net.ipv4.ip_local_reserved_ports"
)

// portRange widens the range of outgoing connections to 1024-65535. Ports on
// which programs listen are reserved first, or a restarted program might find
// its port taken by an outgoing connection.
func portRange(s *System) []Setting {
	var list []Setting
	if reserved := s.reserve(); reserved != "" {
		list = append(list, Setting{Key: localReserved, Value: reserved,
			Why: "ports on which programs listen now stay free for them"})
	}
	return append(list, Setting{Key: localRange, Value: "1024\t65535",
		Why:  "28,232 ports to one destination become 64,512",
		Risk: "a program that is not running now may find its port taken: reserve it"})
}

// reserve joins the reserved list, which a write replaces, with the ports that
// are listened on now.
func (s *System) reserve() string {
	now, err := s.Get(localReserved)
	if err != nil {
		return ""
	}
	var ports []flow.Ports
	for _, part := range strings.Split(strings.TrimSpace(now), ",") {
		if r, err := flow.ParsePorts(part); err == nil {
			ports = append(ports, r)
		}
	}
	before := len(ports)
	for _, p := range s.listening() {
		if p >= 1024 && !slices.ContainsFunc(ports, func(r flow.Ports) bool { return r.Contains(p) }) {
			ports = append(ports, flow.Ports{First: p, Last: p})
		}
	}
	if len(ports) == before {
		return ""
	}
	slices.SortFunc(ports, func(a, b flow.Ports) int { return cmp.Compare(a.First, b.First) })
	var merged []flow.Ports
	for _, p := range ports {
		if n := len(merged); n > 0 && uint32(p.First) <= uint32(merged[n-1].Last)+1 {
			merged[n-1].Last = max(merged[n-1].Last, p.Last)
			continue
		}
		merged = append(merged, p)
	}
	var words []string
	for _, p := range merged {
		words = append(words, p.String())
	}
	return strings.Join(words, ",")
}

// listening returns the ports of listening TCP and bound UDP sockets of the
// namespace.
func (s *System) listening() (ports []uint16) {
	_ = s.Namespace.Do(func() error {
		for _, table := range []struct{ path, state string }{
			{"/proc/thread-self/net/tcp", "0A"}, {"/proc/thread-self/net/tcp6", "0A"}, {"/proc/thread-self/net/udp", "07"}, {"/proc/thread-self/net/udp6", "07"},
		} {
			text, err := os.ReadFile(table.path)
			if err != nil {
				continue // the family is off
			}
			ports = append(ports, portsIn(string(text), table.state)...)
		}
		return nil
	})
	return ports
}

// portsIn reads the local ports of the sockets in a state from the text of
// /proc/net/tcp or udp: "sl local_address rem_address st ...".
func portsIn(text, state string) (ports []uint16) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 || f[3] != state {
			continue
		}
		_, port, ok := strings.Cut(f[1], ":")
		if n, err := strconv.ParseUint(port, 16, 16); ok && err == nil && n > 0 {
			ports = append(ports, uint16(n))
		}
	}
	return ports
}

// validRange refuses what the kernel would refuse or warn about: the ends of the
// range must be of different parity (Documentation/networking/ip-sysctl.rst).
func validRange(value string) error {
	f := strings.Fields(value)
	if len(f) != 2 {
		return fmt.Errorf("%s: want two numbers, got %q", localRange, value)
	}
	lo, e1 := strconv.ParseUint(f[0], 10, 16)
	hi, e2 := strconv.ParseUint(f[1], 10, 16)
	switch {
	case e1 != nil || e2 != nil || lo >= hi:
		return fmt.Errorf("%s: %q is no range of ports", localRange, value)
	case lo%2 == hi%2:
		return fmt.Errorf("%s: %d and %d have the same parity: use one even and one odd end", localRange, lo, hi)
	}
	return nil
}
