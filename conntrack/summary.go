// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/flow"
)

// Count is the number of entries with the same key, and the number that the kernel can evict.
type Count struct {
	Entries   uint32 `json:"entries"`
	Unassured uint32 `json:"unassured"` // Evicted at once if the table is full.
	Closing   uint32 `json:"closing"`   // Assured but ended: removed by the garbage collector.
}

// Held returns the number of entries that the kernel does not evict.
func (c Count) Held() uint32 { return c.Entries - c.Unassured - c.Closing }

func (c *Count) add(e *Entry) {
	c.Entries++
	switch {
	case e.Status&Assured == 0:
		c.Unassured++
	case e.Closing():
		c.Closing++
	}
}

// Dimension is a grouping key of a Summary.
type Dimension uint8

// The dimensions. State, age, namespace and totals need no memory and are always counted. The others hold one record
// per distinct key.
const (
	BySource   Dimension = 1 << iota // The initiator's address.
	ByDest                           // The address that the initiator sends to.
	ByService                        // Destination, port and protocol as sent by the initiator.
	BySNATPort                       // SNAT address, protocol, destination and its port: finds exhausted ports.
	ByBackend                        // Destination after DNAT; connections of helpers have no rule.
)

// Service is a destination with its port and protocol.
type Service struct {
	Addr     Addr
	Port     uint16
	Protocol flow.Protocol
}

// serviceOf returns the responder's end of an entry. An ICMP identifier or a tunnel key belongs to the initiator and
// is not a port of the responder.
func serviceOf(e *Entry, addr Addr, port uint16) Service {
	if !e.Protocol.HasPorts() {
		port = 0
	}
	return Service{addr, port, e.Protocol}
}

// String returns "tcp 198.51.100.1:443", or "icmp 198.51.100.1" without ports.
func (s Service) String() string {
	if !s.Protocol.HasPorts() {
		return s.Protocol.String() + " " + s.Addr.Netip().String()
	}
	return s.Protocol.String() + " " + netip.AddrPortFrom(s.Addr.Netip(), s.Port).String()
}

// Outside names one range of SNAT ports. The kernel may use each port of Public once per remote endpoint, and each
// ICMP identifier once per remote address. Two entries never share a reply tuple, so its occupancy is the number of
// entries.
type Outside struct {
	Public Addr
	Remote Service
}

// String returns "203.0.113.5 -> tcp 198.51.100.1:443".
func (o Outside) String() string { return o.Public.Netip().String() + " -> " + o.Remote.String() }

// ageLimits are the upper bounds, in seconds, of the classes of remaining time.
var ageLimits = [...]uint32{10, 30, 60, 120, 300, 600, 3600, 86400}

// ageNames name the classes; the last has no upper bound.
var ageNames = [...]string{"<10s", "10-30s", "30-60s", "1-2m", "2-5m", "5-10m", "10-60m", "1-24h", ">1d"}

// Summary counts entries. The counts are exact. Each distinct key of the chosen dimensions needs a record of some 30
// to 80 bytes. It is not safe for concurrent use.
type Summary struct {
	Total      Count
	Families   [2]uint32 // Entries of IPv4 and of IPv6.
	Unreplied  uint32    // No reply packet yet.
	Offloaded  uint32    // Carried by a flowtable.
	Counting   uint32    // Entries with byte counters.
	Helped     uint32    // Entries watched by a helper.
	OneWay     uint32    // Established by TCP state, but without a reply.
	Translated [4]uint32 // None, source only, destination only, both.

	dimensions         Dimension
	states             [256][16]Count // by protocol and state number; 13 to 15 hold UNREPLIED, REPLIED, ASSURED
	ages               [len(ageNames)]Count
	idle               [3]uint32 // Established TCP idle for more than 1 h, 1 day, and all.
	establishedTimeout uint32    // Seconds, in the current namespace.
	sources            tally[Addr]
	dests              tally[Addr]
	services           tally[Service]
	backends           tally[Service]
	outsides           tally[Outside]
	ranges             []flow.Ports // lowest and highest port, by position in outsides
	namespaces         tally[string]
	namespace          *Count
}

// NewSummary returns an empty summary with the given dimensions.
func NewSummary(d Dimension) *Summary { return &Summary{dimensions: d} }

// Enter assigns the following entries to a namespace. established is its nf_conntrack_tcp_timeout_established in
// seconds. The difference to the remaining time is a connection's idle time; 0 omits idle times.
func (s *Summary) Enter(namespace string, established uint32) {
	s.namespace = s.namespaces.record(namespace)
	s.establishedTimeout = established
}

// Namespace returns the count of one namespace.
func (s *Summary) Namespace(name string) Count { return *s.namespaces.record(name) }

// Columns of states for protocols without states.
const (
	stateUnreplied = 13
	stateReplied   = 14
	stateAssured   = 15
)

// Add counts one entry.
func (s *Summary) Add(e *Entry) {
	s.Total.add(e)
	if s.namespace != nil {
		s.namespace.add(e)
	}
	s.states[e.Protocol][stateColumn(e)].add(e)
	s.ages[ageClass(e.Timeout)].add(e)
	s.flags(e)
	if s.dimensions&BySource != 0 {
		s.sources.record(e.Original.Source).add(e)
	}
	if s.dimensions&ByDest != 0 {
		s.dests.record(e.Original.Dest).add(e)
	}
	if s.dimensions&ByService != 0 {
		s.services.record(serviceOf(e, e.Original.Dest, e.Original.DestPort)).add(e)
	}
	if s.dimensions&ByBackend != 0 && e.DestTranslated() && e.Status&Expected == 0 {
		s.backends.record(serviceOf(e, e.Reply.Source, e.Reply.SourcePort)).add(e)
	}
	if s.dimensions&BySNATPort != 0 && e.SourceTranslated() {
		s.addOutside(e)
	}
}

// addOutside counts a used port of an SNAT address and extends the port range.
func (s *Summary) addOutside(e *Entry) {
	i := s.outsides.position(Outside{e.Reply.Dest, serviceOf(e, e.Reply.Source, e.Reply.SourcePort)})
	s.outsides.counts[i].add(e)
	port := e.Reply.DestPort
	if i == len(s.ranges) {
		s.ranges = append(s.ranges, flow.Ports{First: port, Last: port})
		return
	}
	r := &s.ranges[i]
	r.First, r.Last = min(r.First, port), max(r.Last, port)
}

func (s *Summary) flags(e *Entry) {
	if !e.Original.Source.Is4() {
		s.Families[1]++
	} else {
		s.Families[0]++
	}
	nat := 0
	if e.SourceTranslated() {
		nat |= 1
	}
	if e.DestTranslated() {
		nat |= 2
	}
	s.Translated[nat]++
	if e.Status&SeenReply == 0 {
		s.Unreplied++
	}
	if e.Status&Offloaded != 0 {
		s.Offloaded++
	}
	if e.Counted {
		s.Counting++
	}
	if e.Helped {
		s.Helped++
	}
	if e.Protocol == flow.TCP && TCPState(e.State) == TCPEstablished {
		s.addEstablished(e)
	}
}

func (s *Summary) addEstablished(e *Entry) {
	if e.Status&SeenReply == 0 {
		s.OneWay++
	}
	s.idle[2]++
	if idle := s.establishedTimeout - e.Timeout; e.Timeout < s.establishedTimeout {
		if idle > 3600 {
			s.idle[0]++
		}
		if idle > 86400 {
			s.idle[1]++
		}
	}
}

func stateColumn(e *Entry) uint8 {
	switch {
	case (e.Protocol == flow.TCP || e.Protocol == flow.SCTP) && e.State < stateUnreplied:
		return e.State
	case e.Status&Assured != 0:
		return stateAssured
	case e.Status&SeenReply != 0:
		return stateReplied
	}
	return stateUnreplied
}

func ageClass(seconds uint32) int {
	for i, limit := range ageLimits {
		if seconds < limit {
			return i
		}
	}
	return len(ageLimits)
}

// Row is one line of a ranking.
type Row struct {
	Key string `json:"key"`
	Count
}

// States returns the counts by protocol and state ("tcp TIME_WAIT"), largest first.
func (s *Summary) States() []Row {
	var rows []Row
	for p := range s.states {
		for state, n := range s.states[p] {
			if n.Entries == 0 {
				continue
			}
			e := Entry{Protocol: flow.Protocol(p), State: uint8(state)}
			name := e.StateName()
			switch state {
			case stateAssured:
				name = "ASSURED"
			case stateReplied:
				name = "REPLIED"
			case stateUnreplied:
				name = "UNREPLIED"
			}
			rows = append(rows, Row{e.Protocol.String() + " " + name, n})
		}
	}
	rank(rows)
	return rows
}

// State returns the count of one TCP state.
func (s *Summary) State(t TCPState) Count { return s.states[flow.TCP][t] }

// Ages returns the counts by remaining time, shortest first, without empty classes.
func (s *Summary) Ages() []Row {
	var rows []Row
	for i, n := range s.ages {
		if n.Entries != 0 {
			rows = append(rows, Row{ageNames[i], n})
		}
	}
	return rows
}

// IdleEstablished returns the numbers of established TCP connections that were idle for more than an hour and more
// than a day, and their total.
func (s *Summary) IdleEstablished() (hour, day, all uint32) { return s.idle[0], s.idle[1], s.idle[2] }

// Sources returns the top n initiators; n <= 0 returns all.
func (s *Summary) Sources(n int) []Row { return s.sources.top(n, addrString) }

// Dests returns the top n destination addresses.
func (s *Summary) Dests(n int) []Row { return s.dests.top(n, addrString) }

// Services returns the top n destinations with port and protocol.
func (s *Summary) Services(n int) []Row { return s.services.top(n, Service.String) }

// Backends returns the top n translated destinations.
func (s *Summary) Backends(n int) []Row { return s.backends.top(n, Service.String) }

// From counts the connections whose source is translated to the address public.
func (s *Summary) From(public netip.Addr) (n Count) {
	for i, key := range s.outsides.keys {
		if key.Public == AddrOf(public) {
			n.Entries += s.outsides.counts[i].Entries
			n.Unassured += s.outsides.counts[i].Unassured
			n.Closing += s.outsides.counts[i].Closing
		}
	}
	return n
}

// Toward counts the connections to a destination address.
func (s *Summary) Toward(dest netip.Addr) (entries uint32) {
	for i, key := range s.services.keys {
		if key.Addr == AddrOf(dest) {
			entries += s.services.counts[i].Entries
		}
	}
	return entries
}

// Namespaces returns the counts by namespace.
func (s *Summary) Namespaces(n int) []Row {
	return s.namespaces.top(n, func(name string) string { return name })
}

// Distinct returns the numbers of distinct sources, destinations, services and SNAT ranges.
func (s *Summary) Distinct() (sources, dests, services, outsides int) {
	return len(s.sources.counts), len(s.dests.counts), len(s.services.counts), len(s.outsides.counts)
}

// Occupancy is the fill of one SNAT address towards one remote endpoint.
type Occupancy struct {
	Public   netip.Addr     `json:"public"`
	Protocol flow.Protocol  `json:"protocol"`
	Remote   netip.AddrPort `json:"remote"`
	Used     uint32         `json:"used"` // Ports; equals the entries.
	Pool     uint32         `json:"pool"` // Ports that the rule may use.
	// Range is the lowest and the highest used port. If connections are refused although Pool is large, the rule's
	// port range is close to this one.
	Range flow.Ports `json:"range"`
	Count
}

// Share returns Used as a part of Pool.
func (o Occupancy) Share() float64 {
	if o.Pool == 0 {
		return 0
	}
	return float64(o.Used) / float64(o.Pool)
}

// Occupancies returns the top n SNAT ranges. pool is the number of ports that a rule may use; 0 means
// capacity.MasqueradePorts.
func (s *Summary) Occupancies(n int, pool uint32) []Occupancy {
	if pool == 0 {
		pool = capacity.MasqueradePorts
	}
	var list []Occupancy
	for _, i := range s.outsides.largestPositions(n) {
		k, c := s.outsides.keys[i], s.outsides.counts[i]
		list = append(list, Occupancy{Public: k.Public.Netip(), Protocol: k.Remote.Protocol,
			Remote: netip.AddrPortFrom(k.Remote.Addr.Netip(), k.Remote.Port),
			Used:   c.Entries, Pool: pool, Range: s.ranges[i], Count: c})
	}
	return list
}

// Fullest returns the SNAT range with the largest share of used ports. pool returns the number of ports of a public
// address; 0 excludes the address.
func (s *Summary) Fullest(pool func(public netip.Addr) uint32) (worst Occupancy, found bool) {
	for i, k := range s.outsides.keys {
		o := Occupancy{Public: k.Public.Netip(), Protocol: k.Remote.Protocol, Used: s.outsides.counts[i].Entries}
		if o.Pool = pool(o.Public); o.Pool == 0 || found && o.Share() <= worst.Share() {
			continue
		}
		o.Remote = netip.AddrPortFrom(k.Remote.Addr.Netip(), k.Remote.Port)
		o.Range, o.Count = s.ranges[i], s.outsides.counts[i]
		worst, found = o, true
	}
	return worst, found
}

// PortsInUse returns the number of ports of an SNAT address in use towards a remote endpoint.
func (s *Summary) PortsInUse(public netip.Addr, protocol flow.Protocol, remote netip.AddrPort) uint32 {
	port := remote.Port()
	if !protocol.HasPorts() {
		port = 0
	}
	i := slices.Index(s.outsides.keys, Outside{AddrOf(public), Service{AddrOf(remote.Addr()), port, protocol}})
	if i < 0 {
		return 0
	}
	return s.outsides.counts[i].Entries
}

func addrString(a Addr) string { return a.Netip().String() }

// rank sorts rows by entries, then by key, so that equal tables print equally.
func rank(rows []Row) {
	slices.SortFunc(rows, func(a, b Row) int {
		return cmp.Or(cmp.Compare(b.Entries, a.Entries), cmp.Compare(a.Key, b.Key))
	})
}

// Victims is a group of entries that could be removed, with the command for it.
type Victims struct {
	What    string `json:"what"`
	Entries uint32 `json:"entries"`
	How     string `json:"how"`
}

// FreeFirst lists entries that can be removed, least harmful first. It omits groups below one percent of the table.
func (s *Summary) FreeFirst() []Victims {
	hour, day, _ := s.IdleEstablished()
	synSent := s.State(TCPSynSent).Entries + s.State(TCPSynSent2).Entries + s.State(TCPSynRecv).Entries
	all := []Victims{
		{"tcp TIME_WAIT and CLOSE: over, waiting for strays",
			s.State(TCPTimeWait).Entries + s.State(TCPClose).Entries,
			"lower nf_conntrack_tcp_timeout_time_wait (RFC 5382 wants 240 s); delete with --state TIME_WAIT"},
		{"tcp FIN_WAIT, CLOSE_WAIT, LAST_ACK: half closed",
			s.State(TCPFinWait).Entries + s.State(TCPCloseWait).Entries + s.State(TCPLastAck).Entries,
			"the peers close late; nf_conntrack_tcp_timeout_fin_wait and _close_wait"},
		{"tcp half open: no handshake yet", synSent,
			"the kernel drops these first by itself; limit new connections of each source"},
		{"udp and others without a reply", s.unrepliedOthers(),
			"the kernel drops these first by itself; nf_conntrack_udp_timeout"},
		{"tcp ESTABLISHED, silent for more than a day", day,
			"lower nf_conntrack_tcp_timeout_established to 86400 (not below 7440, RFC 5382)"},
		{"tcp ESTABLISHED, silent for 1 to 24 hours", hour - day,
			"keep unless the peers are known to be gone"},
	}
	return slices.DeleteFunc(all, func(v Victims) bool { return v.Entries == 0 || v.Entries < s.Total.Entries/100 })
}

func (s *Summary) unrepliedOthers() (n uint32) {
	for p := range s.states {
		n += s.states[p][stateUnreplied].Entries
	}
	return n
}
