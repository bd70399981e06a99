// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"net/netip"
	"slices"
	"strconv"
)

// Range of backend marks.
const (
	leastMark = 1
	mostMark  = 0xfff
)

func (s *store) changeBackend(key, value string) result {
	f, b := s.farm, s.backend
	if f != nil && b != nil && !b.changed(key, value) {
		return ok
	}
	after := none
	if f != nil && b != nil {
		after = s.beforeBackend(f, b, key)
	}
	r := s.setBackend(key, value)
	f, b = s.farm, s.backend
	if f == nil || b == nil {
		return r
	}
	switch after {
	case start:
		if s.setBackendAction(b, start) {
			s.setFarmAction(f, reload)
			f.setAddresses(reload)
			s.settleFarm(f)
		}
	case reload:
		s.setFarmAction(f, reload)
	case flush:
		s.setFarmAction(f, start)
		s.settleFarm(f)
	}
	return r
}

// beforeBackend removes state before the change of a key, and returns the action to perform afterwards.
func (s *store) beforeBackend(f *farm, b *backend, key string) action {
	if b.State != up && b.State != configError && key == "priority" { // other backends may become available
		s.setFarmAction(f, stop)
		f.setAddresses(stop)
		s.settleFarm(f)
		return flush
	}
	if b.State != up && key != "state" {
		return none
	}
	switch key {
	case "ether-addr", "ip-addr", "source-addr", "mark", "priority", "est-connlimit":
		if s.setBackendAction(b, stop) {
			s.setFarmAction(f, reload)
			f.setAddresses(reload)
			s.settleFarm(f)
		}
		return start
	case "port", "state", "weight", "est-connlimit-log-prefix":
		return reload
	}
	return none
}

func (b *backend) changed(key, value string) bool {
	switch key {
	case "name":
		return true
	case "newname":
		return b.Name != value
	case "ether-addr":
		return b.Ether != value
	case "mark":
		return b.Mark != int(leadingNumber(value, 16))
	case "state":
		return b.State != value
	case "action":
		return b.action != actionOf(value)
	case "ip-addr", "source-addr", "port", "weight", "priority", "est-connlimit", "est-connlimit-log-prefix":
		return b.Attributes[key] != value
	}
	return false
}

func (s *store) setBackend(key, value string) result {
	f, b := s.farm, s.backend
	if f == nil || key != "name" && b == nil {
		return unknown
	}
	switch key {
	case "name":
		if b = f.backend(value); b == nil {
			b = newBackend(f, value, s.freeMark())
			f.Backends = append(f.Backends, b)
		}
		s.backend = b
	case "newname":
		b.Name = value
	case "ip-addr":
		s.setBackendAddress(b, value)
	case "ether-addr":
		b.Ether = value
	case "port", "source-addr", "weight", "est-connlimit", "est-connlimit-log-prefix":
		b.Attributes[key] = value
	case "priority":
		b.Attributes[key] = value
		s.generatePriority(f)
	case "mark":
		if mark := int(leadingNumber(value, 16)); mark >= leastMark && mark <= mostMark {
			b.Mark, b.Chosen = mark, true
		}
	case "state":
		if value == configError {
			value = up
		}
		s.setBackendState(b, value)
	case "action":
		s.setBackendAction(b, actionOf(value))
	default:
		return wrong
	}
	return ok
}

// freeMark returns the lowest unused mark.
func (s *store) freeMark() int {
	used := map[int]bool{}
	for _, f := range s.farms {
		for _, b := range f.Backends {
			used[b.Mark] = true
		}
	}
	for mark := leastMark; mark <= mostMark; mark++ {
		if !used[mark] {
			return mark
		}
	}
	return 0
}

func (s *store) setBackendAddress(b *backend, value string) {
	_, had := b.Attributes["ip-addr"]
	b.Attributes["ip-addr"] = value
	b.Ether = ""
	found := s.findBackendOut(b) && s.findEther(b)
	if had {
		s.backendFound(b, found)
	}
}

// findBackendLinks finds the interface and hardware address of a backend.
func (s *store) findBackendLinks(b *backend) {
	s.backendFound(b, s.findBackendOut(b) && s.findEther(b))
}

func (s *store) backendFound(b *backend, found bool) {
	switch {
	case !found:
		s.setBackendState(b, configError)
	case b.State == configError:
		s.setBackendState(b, up)
	}
}

// needsLinks reports whether the farm currently needs hardware addresses.
func (f *farm) needsLinks() bool {
	return f.ingress() && (f.State == up || f.State == configError)
}

func (s *store) findBackendOut(b *backend) bool {
	f := b.farm
	if !f.needsLinks() {
		return true
	}
	if f.Out.Name == "lo" {
		f.Out.Index = 0
		return true
	}
	if b.Attributes["ip-addr"] == "" {
		return true
	}
	out, found := s.routeInterface(b.Attributes["ip-addr"])
	if !found {
		return false
	}
	if f.Out.Index == -1 {
		f.Out.Index = out.Index
	}
	if f.Out.Name == "" {
		f.Out.Name = out.Name
	}
	return true
}

func (s *store) findEther(b *backend) bool {
	f := b.farm
	if !f.needsLinks() {
		return true
	}
	if len(f.addresses) == 0 || f.addresses[0].address.In.MAC == "" || b.Attributes["ip-addr"] == "" || f.Out.Index == -1 {
		return false
	}
	to, err := netip.ParseAddr(b.Attributes["ip-addr"])
	if err != nil || to.Is4() != (f.addresses[0].address.Attributes["family"] != "ipv6") {
		return false
	}
	mac, found := s.network.Neighbour(to)
	if found {
		b.Ether = mac
	}
	return found
}

// refresh retries the lookups of farms, as nftlb does when a neighbour becomes known. It reports whether a lookup
// succeeded.
func (s *store) refresh() bool {
	any := false
	for _, f := range s.farms {
		if !f.needsLinks() {
			continue
		}
		for _, b := range f.Backends {
			if b.State == configError && b.Ether == "" && s.findEther(b) {
				s.setFarmAction(f, reload)
				s.settleFarm(f)
				any = true
			}
		}
	}
	return any
}

func (s *store) setBackendState(b *backend, value string) {
	was := b.State
	if value == up {
		if !b.isComplete() {
			value = configError
		}
		if !b.belowPriority() {
			value = available
		}
	}
	if was == value {
		return
	}
	b.State = value
	switch value {
	case configError:
		if was == up {
			b.action = stop
		}
	case off:
		switch was {
		case up:
			b.action = stop
		case down:
			b.action = start
		}
	case available:
		if was == up {
			b.action = stop
		}
		return
	case up:
		b.action = start
		if was == off {
			b.action = reload
		}
	case down:
		if was == up || was == off {
			b.action = stop
		}
	}
	if b.action != none {
		s.setFarmAction(b.farm, reload)
		s.generatePriority(b.farm)
	}
}

// setBackendAction reports whether the backend has new work.
func (s *store) setBackendAction(b *backend, a action) bool {
	switch a {
	case remove:
		s.deleteBackend(b)
		return true
	case stop:
		was := b.isAvailable()
		if was {
			b.action = a
		}
		s.setBackendState(b, down)
		return was
	case start:
		was := b.isAvailable()
		if !was {
			b.action = a
		}
		s.setBackendState(b, up)
		return !was
	}
	if b.action > a {
		b.action = a
		return true
	}
	return false
}

func (s *store) deleteBackend(b *backend) {
	f := b.farm
	s.setBackendAction(b, stop)
	if b.belowPriority() {
		s.generatePriority(f)
		s.runPending()
	}
	f.dropSessions(b)
	f.Backends = slices.DeleteFunc(f.Backends, func(other *backend) bool { return other == b })
	if s.backend == b {
		s.backend = nil
	}
	if s.generatePriority(f) {
		s.setFarmAction(f, reload)
		f.setAddresses(reload)
		s.runPending()
	}
}

// validateBackends sets the complete backends up.
func (s *store) validateBackends(f *farm) {
	for _, b := range f.Backends {
		if b.State == configError && b.isComplete() {
			s.setBackendState(b, up)
		}
	}
}

// generatePriority raises the farm's priority by one for each missing backend, and reports whether it changed.
func (s *store) generatePriority(f *farm) bool {
	was, now := f.Priority, 1
	for {
		missing := 0
		for _, b := range f.Backends {
			if b.priority() == now && b.State != up && b.State != available {
				missing++
			}
		}
		if missing == 0 {
			break
		}
		now += missing
	}
	f.Priority = now
	for _, b := range f.Backends {
		if b.State == up || b.State == available {
			s.setBackendState(b, up)
		}
	}
	return f.Priority != was
}

// change of sessions

func (s *store) changeSession(key, value string) result {
	f, session := s.farm, s.session
	if f == nil || key != "client" && session == nil {
		return unknown
	}
	switch key {
	case "client":
		if session = f.session(value); session == nil {
			session = newSession(value)
			f.Sessions = append(f.Sessions, session)
		}
		s.session = session
	case "backend":
		b := f.backend(value)
		if b == nil {
			return unknown
		}
		session.backend = b
		s.setFarmAction(f, reload)
		s.settleFarm(f)
	default:
		return wrong
	}
	return ok
}

func newSession(client string) *session { return &session{Client: client} }

// dropSessions deletes the sessions of a backend.
func (f *farm) dropSessions(b *backend) {
	f.Sessions = slices.DeleteFunc(f.Sessions, func(s *session) bool {
		return s.backend != nil && (s.backend == b || !f.ingress() && s.backend.fullMark() == b.fullMark())
	})
}

// markText returns the printed form of a mark.
func markText(mark int) string { return "0x" + strconv.FormatInt(int64(mark), 16) }
