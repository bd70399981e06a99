// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
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
	ports, err := s.listening()
	if reserved := s.reserve(ports); reserved != "" {
		risk := ""
		if err != nil {
			risk = fmt.Sprintf("ports of services may be missing: %v", err)
		}
		list = append(list, Setting{Key: localReserved, Value: reserved,
			Why: "ports on which programs listen now stay free for them", Risk: risk})
	}
	return append(list, Setting{Key: localRange, Value: "1024\t65535",
		Why:  "28,232 ports to one destination become 64,512",
		Risk: "a program that is not running now may find its port taken: reserve it"})
}

// reserve joins the reserved list, which a write replaces, with the ports that
// are listened on now.
func (s *System) reserve(listening []uint16) string {
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
	for _, p := range listening {
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

// listening returns the service ports of the namespace: TCP listeners and UDP sockets without a
// remote side that exist at two moments. Ports chosen by the kernel or a resolver are excluded,
// because they change and would be reserved permanently. Without permission to identify them, TCP
// ports are included and UDP ports are not, as in the doctor's PT07.
func (s *System) listening() (ports []uint16, err error) {
	before, err := s.sockets()
	if err != nil || len(before.Listeners) == 0 {
		return nil, err
	}
	if s.between != nil {
		s.between()
	} else {
		time.Sleep(socketsApart)
	}
	after, err := s.sockets()
	list, _ := observe.Lasting(before, after)
	for _, l := range list {
		ports = append(ports, l.Port)
	}
	if err = errors.Join(err, after.AskedErr); after.Cut {
		err = errors.Join(err, observe.ErrSocketsCut)
	}
	return ports, err
}

// socketsApart is the time between the two moments: longer than most queries to a resolver.
const socketsApart = 500 * time.Millisecond

// sockets reads the listeners of the namespace.
func (s *System) sockets() (now observe.Sockets, err error) {
	err = s.Namespace.Do(func() error {
		if now.Listeners, now.Cut = observe.ReadListeners(os.DirFS("/")); len(now.Listeners) > 0 {
			now.Asked, now.AskedErr = trace.AskedPorts()
		}
		return nil
	})
	return now, err
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
