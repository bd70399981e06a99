// SPDX-License-Identifier: Apache-2.0

// Package casestudy plays a famous incident from beginning to end: a web server
// behind NAT collapses under load because the connection table is full. It
// measures the server without NAT, makes the table too small, lets the doctor find the cause,
// repairs it with the tuner, and measures again.
package casestudy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/tune"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// The fault: a limit that the load exceeds at once.
const (
	smallTable = 1000
	tableMax   = "net.netfilter.nf_conntrack_max"
	buckets    = "net.netfilter.nf_conntrack_buckets"
	backlog    = "net.core.netdev_max_backlog"
)

// HostSettings are the settings of the whole host that Play changes and gives back.
var HostSettings = []string{tableMax, buckets, backlog}

// Options says how to play.
type Options struct {
	// Sluice is the path of the sluice program, which plays the client and the gateway.
	Sluice string
	// Connections at once; 0 means 5,000.
	Connections int
	// Requests of each run; 0 means 30,000.
	Requests int
	// CollapseFor bounds the run with the full table, which does not end by itself; 0 means 8 s.
	CollapseFor time.Duration
	// Docker puts the server into a container of a real Docker daemon in the gateway, which
	// publishes port 8080.
	Docker bool
	// Progress receives progress messages; may be nil.
	Progress func(format string, args ...any)
}

// Report contains the measurements.
type Report struct {
	Server     string              `json:"server"` // "nginx", or its replacement
	Runs       []Run               `json:"runs"`
	Conclusion []doctor.Conclusion `json:"doctor"` // the doctor's, during the collapse
	FoundFirst bool                `json:"cause_named_first"`
	Identity   Identity            `json:"identity"`
	Changes    []tune.Change       `json:"changes"` // of the tuner
	Notes      []string            `json:"notes,omitempty"`
	Drops      *trace.DropReport   `json:"drops"`
}

// Run is one measurement.
type Run struct {
	Name              string        `json:"name"`
	About             string        `json:"about"`
	Complete          uint64        `json:"complete"`
	Failed            uint64        `json:"failed"`
	RequestsPerSecond float64       `json:"requests_per_second"`
	P50               time.Duration `json:"p50_ns"`
	P99               time.Duration `json:"p99_ns"`
	Took              time.Duration `json:"took_ns"`
	Refused           uint64        `json:"conntrack_drops"`   // by the gateway's connection tracking
	Retransmitted     uint64        `json:"syn_retransmits"`   // by the client
	Entries           uint32        `json:"conntrack_entries"` // in the gateway's table when the run was over
	Flows             uint32        `json:"ebpf_flows"`        // The same of the eBPF datapath.
}

// Identity compares three counts of the same packets.
type Identity struct {
	Dropped uint64 `json:"conntrack_drop"` // The kernel's counter.
	Events  uint64 `json:"drop_events"`    // Seen by the probe.
	Hidden  uint64 `json:"hidden_events"`  // at most, see trace.DropReport
	SYNs    uint64 `json:"syns_refused"`   // Sent by the client and never answered.
}

// Exact reports whether all three are equal, except for drops that this kernel hides from every
// probe.
func (i Identity) Exact() bool {
	return i.Dropped == i.SYNs && i.Events <= i.Dropped && i.Dropped-i.Events <= i.Hidden
}

// study is a case study that runs.
type study struct {
	Options
	lab     *lab.Lab
	gateway netdev.Namespace
	server  string // path of the namespace where the server runs
	report  *Report
}

// Play runs the case study. It changes [HostSettings] and always restores them.
func Play(ctx context.Context, o Options) (*Report, error) {
	if o.Connections == 0 {
		o.Connections = 5000
	}
	if o.Requests == 0 {
		o.Requests = 30000
	}
	if o.CollapseFor == 0 {
		o.CollapseFor = 8 * time.Second
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	l, err := lab.Up(ctx, topology())
	if err != nil {
		return nil, err
	}
	s := &study{Options: o, lab: l, report: &Report{}}
	err = s.play(ctx)
	return s.report, errors.Join(err, l.Down())
}

// topology returns the topology of the routers with faults, with room for many connections at both
// ends.
func topology() lab.Topology {
	t := faults.Topology("casestudy")
	for i := range t.Nodes {
		if t.Nodes[i].Sysctls == nil {
			t.Nodes[i].Sysctls = map[string]string{}
		}
		t.Nodes[i].Sysctls["net.core.somaxconn"] = "65535"
		t.Nodes[i].Sysctls["net.ipv4.tcp_max_syn_backlog"] = "65535"
	}
	return t
}

func (s *study) play(ctx context.Context) (err error) {
	if s.gateway, err = netdev.NamespaceAt(s.lab.Node("gateway").Path()); err != nil {
		return err
	}
	s.server = s.lab.Node("server").Path()
	if s.Docker {
		return s.playDocker(ctx)
	}
	stop, err := s.serve(ctx)
	if err != nil {
		return err
	}
	defer stop()
	s.Progress("taking the host's settings; while another program holds them, this waits")
	restore, err := borrow(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()

	s.Progress("before: %d connections at once to %s, without NAT", s.Connections, s.report.Server)
	before, err := s.measure(ctx, "before", "routed, no NAT", "http://"+faults.Server+"/", 0)
	if err != nil {
		return err
	}
	if before.Complete == 0 {
		return errors.New("case study: the server answers nothing even without NAT")
	}
	if err := s.rules(ctx, portForward); err != nil {
		return err
	}
	if err := s.collapse(ctx); err != nil {
		return err
	}
	if err := s.rules(ctx, trackOnly); err != nil {
		return err
	}
	return s.beyond(ctx, faults.Server, backendPort)
}

// backendPort is the target port of forwarded connections. It differs from the previous run's port.
// TCP timestamps restart for each destination, so the server would refuse the first SYN from a port
// that is still in TIME_WAIT.
const backendPort = "8081"

// url is the forwarded port.
const url = "http://" + faults.Gateway + ":8080/"

// portForward is the DNAT of the story.
const portForward = `table ip story {
	chain pre {
		type nat hook prerouting priority dstnat
		ip daddr ` + faults.Gateway + ` tcp dport 8080 dnat to ` + faults.Server + `:` + backendPort + `
	}
}
`

// rules loads a script of nft in the gateway.
func (s *study) rules(ctx context.Context, script string) error {
	cmd := s.lab.Node("gateway").Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("case study: rules of the gateway: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// borrow takes the host's settings that the study changes. All clients begin at
// the same instant on the few CPUs of one machine: without room for that burst in
// the backlog the runs would show a second fault.
func borrow(ctx context.Context) (restore func() error, err error) {
	settings := map[string]string{}
	for _, key := range HostSettings {
		settings[key] = "" // changed later
	}
	settings[backlog] = "30000"
	if restore, err = faults.Borrow(ctx, settings); err != nil {
		return nil, fmt.Errorf("case study: %w", err)
	}
	return restore, nil
}

// host is where the limit of the table is written.
var host = &tune.System{Namespace: netdev.HostNamespace()}

// collapse makes the table too small, watches the server go down, asks the
// doctor, applies the remedy and measures again.
func (s *study) collapse(ctx context.Context) error {
	if err := host.Set(tableMax, strconv.Itoa(smallTable)); err != nil {
		return fmt.Errorf("case study: %w", err)
	}
	s.Progress("collapse: DNAT with %s = %d; the doctor watches", tableMax, smallTable)
	if err := s.watchCollapse(ctx); err != nil {
		return err
	}
	s.Progress("remedy: sluice tune")
	if err := s.tuneTable(ctx); err != nil {
		return err
	}
	s.Progress("after: the same load through the same rule")
	_, err := s.measure(ctx, "after", "DNAT, tuned", url, 0)
	return err
}

// watchCollapse runs the load against the full table, with the doctor and the drop
// events watching.
func (s *study) watchCollapse(ctx context.Context) error {
	watcher := trace.Watcher{Namespaces: []netdev.Namespace{s.gateway},
		Options: trace.DropOptions{Netns: s.gateway.Inode, SamplesPerSecond: 10, Stacks: true}}
	if err := watcher.Start(ctx); err != nil {
		return err
	}
	clientBefore, serverBefore, err := s.tcpCounters(ctx)
	if err != nil {
		return err
	}
	r, err := doctor.Examine(ctx, observe.NewLive([]netdev.Namespace{s.gateway}), observe.Options{
		Window: time.Millisecond, // the load decides
		During: func(ctx context.Context) error {
			_, err := s.measure(ctx, "collapse", fmt.Sprintf("DNAT, table of %d", smallTable), url, s.CollapseFor)
			return err
		},
	})
	if err != nil {
		return err
	}
	clientAfter, serverAfter, err := s.tcpCounters(ctx)
	if err != nil {
		return err
	}
	if s.report.Drops, err = watcher.Stop(ctx); err != nil {
		return err
	}
	s.report.Conclusion = r.Conclusion
	s.report.FoundFirst = r.Conclusion[0].Check == "CT05"
	client, server := clientAfter.Sub(clientBefore), serverAfter.Sub(serverBefore)
	s.report.Identity = Identity{
		Hidden: s.report.Drops.Hidden,
		SYNs:   client["Tcp.ActiveOpens"] + client["TcpExt.TCPSynRetrans"] - server["Tcp.PassiveOpens"],
	}
	for _, g := range s.report.Drops.Groups {
		if g.Cause.ID == trace.CauseTableFull.ID {
			s.report.Identity.Events += g.Packets
		}
	}
	for _, line := range s.report.Drops.Reconciled {
		if line.Counter == "conntrack.drop" {
			s.report.Identity.Dropped = line.Counted
		}
	}
	return nil
}

// tcpCounters reads both ends.
func (s *study) tcpCounters(ctx context.Context) (client, server trace.Counters, err error) {
	for path, at := range map[string]*trace.Counters{s.lab.Node("client").Path(): &client, s.server: &server} {
		ns, err := netdev.NamespaceAt(path)
		if err != nil {
			return nil, nil, err
		}
		if *at, _, err = trace.ReadCounters(ctx, ns); err != nil {
			return nil, nil, err
		}
	}
	return client, server, nil
}

// tuneTable applies the part of the tuner's proposal for a router that concerns the
// table; the rest would outlive the case study.
func (s *study) tuneTable(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "sluice-casestudy-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	system := &tune.System{Namespace: netdev.HostNamespace(), Dir: dir, Etc: dir}
	profile, err := tune.ProfileNamed("router")
	if err != nil {
		return err
	}
	proposal, err := tune.Propose(system, profile, tune.Options{})
	if err != nil {
		return fmt.Errorf("case study: tune: %w", err)
	}
	var table []tune.Change
	for _, c := range proposal.Changes {
		if c.Key == tableMax || c.Key == buckets {
			table = append(table, c)
		}
	}
	proposal.Changes = table
	result, err := tune.Apply(ctx, system, proposal, tune.Watch{})
	if err != nil {
		return fmt.Errorf("case study: tune: %w", err)
	}
	if result.RolledBack != "" {
		return fmt.Errorf("case study: tune took its changes back: %s", result.RolledBack)
	}
	s.report.Changes = table
	return nil
}

// beyond makes the table as small as it was and runs a service for the same server on the
// eBPF datapath, which needs no connection table of the kernel at all.
func (s *study) beyond(ctx context.Context, address, port string) error {
	gateway := s.lab.Node("gateway")
	if err := host.Set(tableMax, strconv.Itoa(smallTable)); err != nil {
		return fmt.Errorf("case study: %w", err)
	}
	if err := s.forget(ctx); err != nil {
		return fmt.Errorf("case study: empty the gateway's table: %w", err)
	}
	s.Progress("beyond: the same service on the eBPF datapath, with %s = %d again", tableMax, smallTable)
	d, err := daemon.Start(ctx, gateway, s.Sluice, "casestudy.yaml", []byte(fmt.Sprintf(serviceConfig, address, port)))
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.report.Notes = append(s.report.Notes, fmt.Sprintf("no run on the eBPF datapath: %v", oneLine(err)))
		return nil
	}
	_, err = s.measure(ctx, "beyond", fmt.Sprintf("DNAT by eBPF, table of %d", smallTable), url, 0)
	if err == nil {
		s.report.Runs[len(s.report.Runs)-1].Flows, err = flowsOf(ctx, d)
	}
	return errors.Join(err, d.Stop())
}

// flowsOf asks sluice conns, which reads all tables of the host, how many flows
// the eBPF datapath holds.
func flowsOf(ctx context.Context, d *daemon.Daemon) (flows uint32, err error) {
	out, err := d.Command(ctx, "conns", "--by", "netns", "--json", "--top", "0", "--window", "1ms").Output()
	if err != nil {
		return 0, fmt.Errorf("case study: flows of the eBPF datapath: %w", err)
	}
	var report struct {
		Rows []struct {
			Key     string `json:"key"`
			Entries uint32 `json:"entries"`
		} `json:"rows"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return 0, fmt.Errorf("case study: flows of the eBPF datapath: %w", err)
	}
	for _, row := range report.Rows {
		if row.Key == "ebpf" {
			return row.Entries, nil
		}
	}
	return 0, nil
}

// trackOnly takes the port forward away and leaves connection tracking on: what
// the eBPF datapath gave to the kernel's stack would be seen in the table.
const trackOnly = `delete table ip story
table ip story {
	chain pre {
		type filter hook prerouting priority filter
		ct state new counter
	}
}
`

// forget empties the gateway's connection table of the runs before.
func (s *study) forget(ctx context.Context) error {
	c, err := conntrack.OpenIn(s.gateway)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.DeleteAll(ctx, &conntrack.Filter{Family: unix.AF_INET})
	return err
}

// serviceConfig is the port forward as a service, for the address and port of the server.
const serviceConfig = `datapath: ebpf
services:
  - name: web
    listen:
      - {address: ` + faults.Gateway + `, ports: [8080]}
    protocol: tcp
    mode: dnat
    backends:
      - {name: server, address: %s, port: %s}
`

func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}

// measure runs the client in its namespace and adds the run to the report.
func (s *study) measure(ctx context.Context, name, about, target string, bound time.Duration) (Run, error) {
	seconds := 60.0
	if bound > 0 {
		seconds = bound.Seconds()
	}
	gatewayBefore, _, err := trace.ReadCounters(ctx, s.gateway)
	if err != nil {
		return Run{}, err
	}
	clientBefore, _, err := s.tcpCounters(ctx)
	if err != nil {
		return Run{}, err
	}
	var stdout, stderr bytes.Buffer
	cmd := s.lab.Node("client").Command(ctx, s.Sluice, "load", "http", "--json", "--connections", strconv.Itoa(s.Connections),
		"--requests", strconv.Itoa(s.Requests), "--seconds", fmt.Sprint(seconds), target)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && stdout.Len() == 0 { // a run without a reply fails too, and is reported
		return Run{}, fmt.Errorf("case study: client: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	var result load.HTTPResult
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		return Run{}, fmt.Errorf("case study: client: %w", err)
	}
	gatewayAfter, _, err := trace.ReadCounters(ctx, s.gateway)
	if err != nil {
		return Run{}, err
	}
	clientAfter, _, err := s.tcpCounters(ctx)
	if err != nil {
		return Run{}, err
	}
	limits, err := conntrack.ReadLimits(s.gateway)
	if err != nil {
		return Run{}, err
	}
	run := Run{
		Name: name, About: about, Complete: result.Complete, Failed: result.Failed, RequestsPerSecond: result.RequestsPerSecond,
		P50: result.Total.P50, P99: result.Total.P99, Took: result.Took,
		Entries:       limits.Count,
		Refused:       gatewayAfter.Sub(gatewayBefore)["conntrack.drop"],
		Retransmitted: clientAfter.Sub(clientBefore)["TcpExt.TCPSynRetrans"],
	}
	s.report.Runs = append(s.report.Runs, run)
	s.Progress("  %s: %.0f requests/s, %d complete, %d failed, %d refused by connection tracking", name, run.RequestsPerSecond, run.Complete, run.Failed, run.Refused)
	return run, nil
}

// serve starts the web server: nginx, or a plain one where it is not installed.
func (s *study) serve(ctx context.Context) (stop func(), err error) {
	if _, err := exec.LookPath("nginx"); err == nil {
		return s.nginx(ctx)
	}
	s.report.Server = "Go's HTTP server (nginx is not installed)"
	return s.plainServer()
}
