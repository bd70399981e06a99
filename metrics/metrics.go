// SPDX-License-Identifier: Apache-2.0

// Package metrics exports a gateway's Prometheus metrics. It stores no values: every scrape reads the datapaths, the
// health of the backends and the last apply.
package metrics

import (
	"context"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/cluster"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/pcp"
	"github.com/sluice-lb/sluice/uplink"
)

// scrapeTimeout bounds the reading of one datapath's counters.
const scrapeTimeout = 5 * time.Second

// Datapath is a datapath with exported counters.
type Datapath interface {
	Name() string
	Counters(context.Context) (*datapath.Counters, error)
}

// Health returns the states of the checked backends.
type Health interface {
	Snapshot() []health.Status
}

// PCP returns counts of the requests of inside hosts.
type PCP interface {
	Counts() map[pcp.Count]uint64
	Use() map[string]int
}

// Uplinks returns the states of the uplinks, and the number of state changes of each since the start.
type Uplinks interface {
	Statuses() []uplink.Status
	Changes() map[string]uint64
}

// Cluster returns the state of the connection to the store of a cluster.
type Cluster interface {
	Status() cluster.Status
	Peers() map[string]cluster.Peer
}

// API returns the state of the API over TCP.
type API interface {
	Refused() uint64
	Expires() time.Time // of the certificate; zero without TLS
}

// Apply is the result of the last apply.
type Apply struct {
	Revision uint64    // of the applied snapshot; 0 before the first
	At       time.Time // Time of the apply.
	Err      error     // nil if the snapshot is in force.
	Changes  []*datapath.Change
}

// Sources are the inputs of a Collector. Nil sources are skipped.
type Sources struct {
	Version   string
	Datapaths []Datapath
	Health    Health
	PCP       PCP
	// Addresses counts the addresses of services and pools by owner state; nil omits the metric.
	Addresses func() map[string]int
	// Announcements counts the addresses by state, and the changes to each state; nil omits the metrics.
	Announcements func() (now map[announce.State]int, changes map[announce.State]uint64)
	// Uplinks returns the states of the uplinks and the number of their changes; nil omits the metrics.
	Uplinks Uplinks
	// Cluster is the connection to the store of a cluster; nil, or no store in its status, omits the metrics.
	Cluster   Cluster
	API       API
	LastApply func() Apply
}

// Collector implements prometheus.Collector.
type Collector struct{ src Sources }

// New returns a collector over src.
func New(src Sources) *Collector { return &Collector{src} }

// Handler serves the metrics of src, of the Go runtime and of the process.
func Handler(src Sources) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(New(src), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4})
}

// metric is one family of samples.
type metric struct {
	desc       *prometheus.Desc
	kind       prometheus.ValueType
	name, help string
	labels     []string
}

var families []*metric

func family(kind prometheus.ValueType, name, help string, labels ...string) *metric {
	name = "sluice_" + name
	m := &metric{prometheus.NewDesc(name, help, labels, nil), kind, name, help, labels}
	families = append(families, m)
	return m
}

const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue
)

// The families, in the order of the page. Counters begin at the creation of the kernel object and survive a restart
// of the daemon.
var (
	buildInfo = family(gauge, "build_info", "Version of Sluice and of Go; always 1.", "version", "goversion")

	serviceConnections = family(counter, "service_connections_total", "New flows of a service.", "datapath", "service")
	servicePackets     = family(counter, "service_packets_total", "Packets of a service.", "datapath", "service")
	serviceBytes       = family(counter, "service_bytes_total", "Bytes of a service, from the network header on.", "datapath", "service")
	serviceRefused     = family(counter, "service_refused_total", "Flows refused by a limit, a set, or because no backend was usable.", "datapath", "service")
	serviceActive      = family(gauge, "service_active_connections", "Flows of a service that live now.", "datapath", "service")

	backendConnections = family(counter, "backend_connections_total", "New flows of a backend.", "datapath", "service", "backend")
	backendPackets     = family(counter, "backend_packets_total", "Packets of a backend.", "datapath", "service", "backend")
	backendBytes       = family(counter, "backend_bytes_total", "Bytes of a backend, from the network header on.", "datapath", "service", "backend")
	backendActive      = family(gauge, "backend_active_connections", "Flows of a backend that live now.", "datapath", "service", "backend")

	natPackets  = family(counter, "nat_rule_packets_total", "Packets of a NAT rule.", "datapath", "rule")
	natBytes    = family(counter, "nat_rule_bytes_total", "Bytes of a NAT rule, from the network header on.", "datapath", "rule")
	rulePackets = family(counter, "firewall_rule_packets_total", "Packets that a firewall rule matched.", "datapath", "rule")
	ruleBytes   = family(counter, "firewall_rule_bytes_total", "Bytes that a firewall rule matched, from the network header on.", "datapath", "rule")

	reasonPackets = family(counter, "datapath_packets_total", "Packets by what the datapath did with them and why.", "datapath", "family", "action", "reason")
	tableEntries  = family(gauge, "table_entries", "Entries in a table of the datapath.", "datapath", "table")
	tableSize     = family(gauge, "table_max_entries", "Entries that a table of the datapath can hold.", "datapath", "table")
	tableBytes    = family(gauge, "table_memory_bytes", "Memory that a table of the datapath takes now.", "datapath", "table")
	missed        = family(counter, "datapath_missed_total", "Packets and events that the kernel handed to the daemon and that it could not handle, since it began: held fragments above all.", "datapath")
	readOK        = family(gauge, "datapath_read_success", "1 when the datapath's counters could be read for this page.", "datapath")

	checkUp       = family(gauge, "backend_up", "1 when the check holds the backend for up.", "service", "backend", "check")
	checkSince    = family(gauge, "backend_state_timestamp_seconds", "When the backend entered its present state, in seconds since 1970.", "service", "backend", "check")
	checkProbes   = family(counter, "backend_probes_total", "Probes of a backend that ended.", "service", "backend", "check")
	checkFailures = family(counter, "backend_probe_failures_total", "Probes of a backend that failed.", "service", "backend", "check")
	checkUnknown  = family(counter, "backend_probes_unknown_total", "Probes of a backend without a result, because this host lacked a port, a file, memory or room in the connection table.", "service", "backend", "check")
	checkDuration = family(gauge, "backend_probe_duration_seconds", "How long the last probe of a backend took.", "service", "backend", "check")
	checkLate     = family(gauge, "backend_probe_late_seconds", "By how much the last probe of a backend began late; above 0 there are more probes than may run at once.", "service", "backend", "check")

	pcpRequests  = family(counter, "pcp_requests_total", "Requests of inside hosts for mappings (RFC 6887; natpmp-...: RFC 6886) since the daemon began, by their result.", "opcode", "result")
	addressCount = family(gauge, "addresses", "Addresses of services and pools by the state of their owner: held, probing, own, routed, lost, foreign or absent; a range outside the connected networks counts once.", "state")

	announcementCount   = family(gauge, "announcements", "Addresses of services and pools by state: announced to routers, or withdrawn.", "state")
	announcementChanges = family(counter, "announcement_changes_total", "Addresses that were announced or withdrawn since the daemon began.", "state")

	uplinkState   = family(gauge, "uplink_state", "State of an uplink: 1 for its present state, 0 for the others.", "uplink", "interface", "state")
	uplinkChanges = family(counter, "uplink_changes_total", "State changes of an uplink since the daemon began.", "uplink")

	clusterConnected = family(gauge, "cluster_store_connected", "1 while the store of the cluster answers.")
	clusterRevision  = family(gauge, "cluster_revision", "Revision of the cluster's configuration: in the store, or in force on this node; 0: none.", "where")
	clusterNodes     = family(gauge, "cluster_nodes", "Nodes of the cluster by state: live with the revision in force on this node, live with another one, or lost since this daemon began.", "state")
	clusterDraining  = family(gauge, "cluster_nodes_draining", "Live nodes of the cluster that withdrew their addresses.")
	clusterSessions  = family(counter, "cluster_store_connections_total", "Connections to the store of the cluster since the daemon began.", "result")
	clusterRefused   = family(counter, "cluster_refused_total", "Revisions of the cluster's configuration that this node refused since the daemon began; one that stays refused counts again with each attempt.")

	pcpMappings = family(gauge, "pcp_mappings", "Mappings that inside hosts have asked for.", "rule")

	apiRefused = family(counter, "api_refused_total", "Connections and requests over TCP that were refused since the daemon began: too many, or without proof of the client's identity.")
	apiExpires = family(gauge, "api_certificate_expiry_timestamp_seconds", "When the certificate of the API over TCP expires, in seconds since 1970.")

	applyRevision = family(gauge, "apply_revision", "Number of the snapshot that was applied last.")
	applySuccess  = family(gauge, "apply_success", "1 when the last apply is in force, 0 when it was refused and the one before is.")
	applyTime     = family(gauge, "apply_timestamp_seconds", "When the last apply ended, in seconds since 1970.")
	applyDuration = family(gauge, "apply_duration_seconds", "How long the kernel took for the last apply, with reading back.", "datapath")
)

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range families {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	p := page(ch)
	p.put(buildInfo, 1, c.src.Version, runtime.Version())
	for _, d := range c.src.Datapaths {
		p.datapath(d)
	}
	if c.src.Health != nil {
		for _, s := range c.src.Health.Snapshot() {
			p.status(s)
		}
	}
	if c.src.Addresses != nil {
		for state, n := range c.src.Addresses() {
			p.put(addressCount, float64(n), state)
		}
	}
	if c.src.Announcements != nil {
		now, changes := c.src.Announcements()
		for state, n := range now {
			p.put(announcementCount, float64(n), string(state))
			p.put(announcementChanges, float64(changes[state]), string(state))
		}
	}
	if c.src.Uplinks != nil {
		for _, u := range c.src.Uplinks.Statuses() {
			for _, state := range []uplink.State{uplink.Carrying, uplink.Standby, uplink.Down} {
				p.put(uplinkState, boolValue(u.State == state), u.Name, u.Interface, string(state))
			}
		}
		for name, n := range c.src.Uplinks.Changes() {
			p.put(uplinkChanges, float64(n), name)
		}
	}
	if c.src.Cluster != nil {
		p.cluster(c.src.Cluster.Status(), c.src.Cluster.Peers())
	}
	if c.src.PCP != nil {
		for k, n := range c.src.PCP.Counts() {
			p.put(pcpRequests, float64(n), k.Opcode, k.Result)
		}
		for rule, n := range c.src.PCP.Use() {
			p.put(pcpMappings, float64(n), rule)
		}
	}
	if c.src.API != nil {
		p.put(apiRefused, float64(c.src.API.Refused()))
		if end := c.src.API.Expires(); !end.IsZero() {
			p.put(apiExpires, seconds(end))
		}
	}
	if c.src.LastApply != nil {
		p.apply(c.src.LastApply())
	}
}

// page receives the samples of one scrape.
type page chan<- prometheus.Metric

func (p page) put(m *metric, value float64, labels ...string) {
	p <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
}

func (p page) datapath(d Datapath) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	name := d.Name()
	c, err := d.Counters(ctx)
	p.put(readOK, boolValue(err == nil), name)
	if err != nil {
		return
	}
	for _, s := range c.Services {
		p.service(name, s)
	}
	for _, r := range c.NAT {
		p.put(natPackets, float64(r.Packets), name, r.Name)
		p.put(natBytes, float64(r.Bytes), name, r.Name)
	}
	for _, r := range c.Rules {
		p.put(rulePackets, float64(r.Packets), name, r.Name)
		p.put(ruleBytes, float64(r.Bytes), name, r.Name)
	}
	for _, r := range c.Reasons {
		p.put(reasonPackets, float64(r.Packets), name, r.Family, r.Action, r.Reason)
	}
	p.put(missed, float64(c.Missed), name)
	for _, t := range c.Tables {
		p.put(tableEntries, float64(t.Used), name, t.Name)
		p.put(tableSize, float64(t.Size), name, t.Name)
		p.put(tableBytes, float64(t.Bytes), name, t.Name)
	}
}

func (p page) service(carrier string, s datapath.ServiceCounters) {
	p.put(serviceConnections, float64(s.Connections), carrier, s.Name)
	p.put(servicePackets, float64(s.Packets), carrier, s.Name)
	p.put(serviceBytes, float64(s.Bytes), carrier, s.Name)
	p.put(serviceRefused, float64(s.Refused), carrier, s.Name)
	p.active(serviceActive, s.Active, carrier, s.Name)
	for _, b := range s.Backends {
		p.put(backendConnections, float64(b.Connections), carrier, s.Name, b.Name)
		p.put(backendPackets, float64(b.Packets), carrier, s.Name, b.Name)
		p.put(backendBytes, float64(b.Bytes), carrier, s.Name, b.Name)
		p.active(backendActive, b.Active, carrier, s.Name, b.Name)
	}
}

// active omits values that the datapath does not know.
func (p page) active(m *metric, n int, labels ...string) {
	if n >= 0 {
		p.put(m, float64(n), labels...)
	}
}

func (p page) status(s health.Status) {
	labels := []string{s.Service, s.Backend, string(s.Check)}
	p.put(checkUp, boolValue(s.Up), labels...)
	p.put(checkSince, seconds(s.Since), labels...)
	p.put(checkProbes, float64(s.Probes), labels...)
	p.put(checkFailures, float64(s.Failures), labels...)
	p.put(checkUnknown, float64(s.Unknown), labels...)
	if s.Known {
		p.put(checkDuration, s.Latency.Seconds(), labels...)
		p.put(checkLate, s.Late.Seconds(), labels...)
	}
}

func (p page) cluster(s cluster.Status, peers map[string]cluster.Peer) {
	if s.Settings.Store == nil {
		return
	}
	p.put(clusterConnected, boolValue(s.Connected))
	p.put(clusterRevision, float64(s.Document), "store")
	p.put(clusterRevision, float64(s.InForce), "in-force")
	same, other, drains, lost := 0, 0, 0, 0
	for _, n := range peers {
		switch {
		case !n.Live:
			lost++
			continue
		case n.Revision == s.InForce:
			same++
		default:
			other++
		}
		if n.Drains {
			drains++
		}
	}
	for state, n := range map[string]int{"same": same, "other": other, "lost": lost} {
		p.put(clusterNodes, float64(n), state)
	}
	p.put(clusterDraining, float64(drains))
	p.put(clusterSessions, float64(s.Counts.Connections), "connected")
	p.put(clusterSessions, float64(s.Counts.Failures), "failed")
	p.put(clusterRefused, float64(s.Counts.Refused))
}

func (p page) apply(a Apply) {
	p.put(applyRevision, float64(a.Revision))
	if a.Revision == 0 {
		return
	}
	p.put(applySuccess, boolValue(a.Err == nil))
	p.put(applyTime, seconds(a.At))
	for _, c := range a.Changes {
		p.put(applyDuration, c.Duration.Seconds(), c.Datapath)
	}
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// seconds returns t by the current wall clock. A host without a clock battery starts in 1970, and a difference to the
// present would be decades.
func seconds(t time.Time) float64 {
	now := time.Now()
	if set := now.Round(0).Sub(t.Round(0)) - now.Sub(t); set.Abs() >= time.Second { // smaller differences are clock drift
		t = t.Add(set.Round(time.Second))
	}
	return float64(t.UnixMilli()) / 1e3
}
