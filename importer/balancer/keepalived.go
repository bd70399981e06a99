// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// keepalived imports one file.
type keepalived struct {
	d      *draft.Draft
	groups map[string]*block
	used   map[string]bool // names of groups that a service uses
	vrrp   bool
}

// Keepalived imports a keepalived.conf.
func Keepalived(text string, _ Options) (*draft.Result, error) {
	k := &keepalived{d: draft.New("keepalived", text, "#", "!"), groups: map[string]*block{}, used: map[string]bool{}}
	list, err := blocks(k.d.Lines())
	if err != nil {
		return nil, err
	}
	seen := false
	for _, b := range list {
		if b.words[0] == "virtual_server_group" && b.braces {
			k.groups[b.arg(1)] = b
			seen = true
		}
		seen = seen || b.braces
	}
	if !seen {
		return nil, errors.New("no block in it: pass a keepalived.conf, with virtual_server ADDRESS PORT { ... }")
	}
	for _, b := range list {
		k.top(b)
	}
	for name, g := range k.groups {
		if !k.used[name] {
			k.d.Structure(g.lines()...)
			k.d.Implied(g.line, "", "no virtual_server uses group "+name)
		}
	}
	if k.vrrp {
		k.d.Config.HoldAddresses = config.SwitchOff
		k.d.Remark("hold-addresses: off leaves the addresses to VRRP, which stays in keepalived.")
	}
	return k.d.Finish()
}

// top reads a statement outside of all blocks.
func (k *keepalived) top(b *block) {
	switch b.words[0] {
	case "virtual_server":
		k.virtualServer(b)
	case "virtual_server_group":
		k.d.Structure(b.line)
	case "global_defs":
		k.d.Structure(b.lines()...)
		k.d.Implied(b.line, "", "concerns keepalived itself")
		for _, i := range b.inner {
			k.global(i)
		}
	case "vrrp_instance", "vrrp_sync_group", "vrrp_script", "vrrp_track_process", "vrrp_track_file", "static_ipaddress", "static_routes", "static_rules",
		"virtual_ipaddress_group", "bfd_instance", "interface_up_down_delays", "linkbeat_interfaces":
		k.d.Keep(b.lines()...)
		k.vrrp = k.vrrp || b.words[0] == "vrrp_instance"
		k.d.Lost(b.line, "", "no equivalent for VRRP and its settings", "keep a keepalived.conf without the virtual servers")
	case "include", "includer", "includem":
		k.d.Lost(b.line, "", "the other file was not read", "import it by itself, or put all in one file")
	case "net_namespace", "net_namespace_ipvs":
		k.d.Keep(b.line)
		k.d.Lost(b.line, "", "the file does not select a network namespace", "start the daemon in it: ip netns exec "+b.arg(1)+" sluice run")
	default:
		k.d.Keep(b.lines()...)
		k.d.Lost(b.line, "", "not understood", "write the equivalent by hand")
	}
}

// notifications is the next step for programs and mails that report changes of state.
const notifications = "follow 'sluice events --follow --json', or the metric sluice_backend_up"

// global reads a statement of global_defs.
func (k *keepalived) global(b *block) {
	lost := func(reason, next string) {
		k.d.Keep(b.lines()...)
		k.d.Lost(b.line, "", reason, next)
	}
	switch b.words[0] {
	case "lvs_timeouts":
		k.timeouts(b)
	case "lvs_sync_daemon":
		lost("no equivalent for the sync daemon of IPVS", "let the gateways exchange flows: see the guide on clusters")
	case "notification_email", "smtp_alert", "smtp_alert_checker":
		lost("no equivalent for mails about servers", notifications)
	case "lvs_notify_fifo", "lvs_notify_fifo_script", "notify_fifo", "notify_fifo_script", "rs_init_notifies":
		lost("no equivalent for programs that run on a change of state", notifications)
	case "startup_script", "shutdown_script":
		lost("the program is not run", "run it from the unit of the daemon: ExecStartPre= or ExecStopPost=")
	default:
		k.d.Implied(b.line, b.text(), "concerns keepalived itself")
	}
}

// timeouts reads "lvs_timeouts tcp SECONDS tcpfin SECONDS udp SECONDS".
func (k *keepalived) timeouts(b *block) {
	t := &k.d.Config.Timeouts
	for i := 1; i < len(b.words); i += 2 {
		set := map[string]*config.Duration{"tcp": &t.TCPEstablished, "tcpfin": &t.TCPTransitory, "udp": &t.UDP}[b.words[i]]
		d, ok := seconds(b.arg(i + 1))
		if set == nil || !ok {
			k.d.Lost(b.line, b.text(), "not understood", "write timeouts: {tcp-established: ..., tcp-transitory: ..., udp: ...}")
			return
		}
		*set = max(d, config.Duration(time.Second))
	}
	t.Force = true // the minimums of the RFCs do not apply to IPVS
	k.d.Remark("timeouts: are those of lvs_timeouts, and also apply to NAT rules.")
}

// server is an incomplete virtual server.
type server struct {
	object
	k         *keepalived
	block     *block
	scheduler string
	at        int // line of the scheduler
	method    config.Mode
	tunnel    *config.Tunnel
	interval  config.Duration
	// defaults of the checkers.
	fall        int // 0 for the default of the checker
	timeout     config.Duration
	virtualhost string
	delay       *block // delay_before_retry
	weight      int    // of servers without their own; 1 if it is not set
	alpha       bool
	portFlag    int // line of the flag of sh and mh; 0 without it
	sorry       *block
	checkOf     *block // the real server with the check
	unchecked   []*block
}

var methods = map[string]config.Mode{"NAT": config.ModeDNAT, "DR": config.ModeDSR, "TUN": config.ModeTunnel, "FNAT": config.ModeFullNAT, "FULLNAT": config.ModeFullNAT}

// virtualServer adds a service from a block.
func (k *keepalived) virtualServer(b *block) {
	s := &server{object: object{d: k.d}, k: k, block: b, interval: config.Duration(60 * time.Second), timeout: config.Duration(5 * time.Second), weight: 1, method: config.ModeDNAT, scheduler: "wlc"}
	s.addLines(b.lines()...)
	s.service.Protocol = flow.TCP
	s.service.WhenDown = config.WhenDownReject
	s.address()
	for _, i := range b.inner {
		s.statement(i)
	}
	for _, i := range b.inner { // servers inherit settings, which may follow them in the file
		if i.words[0] == "real_server" {
			s.realServer(i)
		}
	}
	s.finish()
}

// address parses the address of the virtual server.
func (s *server) address() {
	b := s.block
	switch b.arg(1) {
	case "fwmark":
		s.lost = "the virtual server is for packets with a firewall mark, and the file does not have the rules that set it"
		s.next = "look for mark " + b.arg(2) + " in iptables-save, and write a service that listens on these addresses and ports"
		return
	case "group":
		s.group(b.arg(2))
		s.service.Name = b.arg(2)
		return
	}
	list, err := addresses(b.arg(1), b.arg(2))
	if err != nil {
		s.lost, s.next = err.Error(), "write an address and a port"
		return
	}
	s.service.Listen = list
	s.service.Name = b.arg(1) + ":" + b.arg(2)
}

// group reads the addresses of a virtual_server_group.
func (s *server) group(name string) {
	g := s.k.groups[name]
	if g == nil {
		s.lost, s.next = "there is no virtual_server_group "+name, "write the group into the file"
		return
	}
	s.addLines(g.lines()...)
	s.k.used[name] = true
	for _, e := range g.inner {
		if e.words[0] == "fwmark" {
			s.noteMissing(e.line, e.text(), "the file does not have the rules that set the mark", "look for it in iptables-save, and add their addresses to listen:")
			continue
		}
		list, err := addresses(e.arg(0), e.arg(1))
		if err != nil {
			s.noteMissing(e.line, e.text(), err.Error(), "add the address to listen:")
			continue
		}
		s.addLines(e.line)
		s.service.Listen = append(s.service.Listen, list...)
	}
	if len(s.service.Listen) == 0 {
		s.lost, s.next = "group "+name+" has no address that is understood", "look for its marks in iptables-save, and write a service that listens on these addresses and ports"
	}
}

// addresses reads one address or a range ("192.0.2.1-9"), and a port.
func addresses(address, port string) (list []config.Listen, err error) {
	n := uint64(0)
	if port != "" {
		if n, err = strconv.ParseUint(port, 10, 16); err != nil {
			return nil, fmt.Errorf("%q is not a port", port)
		}
	}
	low, high, ranged := strings.Cut(address, "-")
	first, err := hostPort(low)
	if err != nil {
		return nil, err
	}
	last := first.Addr()
	if ranged {
		base, tail := 10, low[:strings.LastIndexAny(low, ".:")+1]
		if first.Addr().Is6() {
			base = 16
		}
		if _, err := strconv.ParseUint(high, base, 16); err != nil {
			return nil, fmt.Errorf("%q is not a range", address)
		}
		if last, err = netip.ParseAddr(tail + high); err != nil {
			return nil, fmt.Errorf("%q is not a range", address)
		}
	}
	for a := first.Addr(); a.IsValid() && a.Compare(last) <= 0; a = a.Next() {
		if list = append(list, listen(netip.AddrPortFrom(a, uint16(n)))); len(list) > 1024 {
			return nil, fmt.Errorf("%q are more than 1024 addresses", address)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%q is reversed", address)
	}
	return list, nil
}

// statement reads one line of a virtual server.
func (s *server) statement(b *block) {
	value := b.arg(1)
	switch b.words[0] {
	case "real_server": // servers are parsed after all other settings
	case "lb_algo", "lvs_sched":
		s.scheduler, s.at = value, b.line
	case "lb_kind", "lvs_method":
		s.method, s.tunnel = s.lvsMethod(b)
	case "protocol":
		if err := s.service.Protocol.UnmarshalText([]byte(strings.ToLower(value))); err != nil || !s.service.Protocol.HasPorts() {
			s.lost, s.next = "protocol "+value+" has no equivalent", "write protocol: tcp, udp, sctp or any"
		}
	case "persistence_timeout":
		t, ok := seconds(value)
		if value == "" {
			t, ok = config.Duration(6*time.Minute), true
		}
		if n, numeric := number(value); numeric && n == 0 { // the default: none
			s.service.Persistence = nil
			return
		}
		if !ok {
			s.noteMissing(b.line, b.text(), "not understood", "write persistence: {timeout: 5m}")
			return
		}
		s.service.Persistence = &config.Persistence{Timeout: t}
	case "persistence_granularity":
		if value != "255.255.255.255" && value != "128" {
			s.noteChanged(b.line, b.text(), "persistence is for single clients, not for networks of them", "")
		}
	case "delay_loop":
		s.duration(b, &s.interval)
	case "retry":
		s.retries(b, &s.fall)
	case "connect_timeout":
		s.duration(b, &s.timeout)
	case "delay_before_retry":
		s.delay = b
	case "virtualhost":
		s.virtualhost = value
	case "sh-port", "mh-port":
		s.portFlag = b.line
	case "sh-fallback", "mh-fallback":
		s.d.Implied(b.line, b.text(), "clients of a backend that is down get another one")
	case "alpha":
		s.alpha = on(value)
	case "warmup":
		s.spread(b)
	case "sorry_server":
		s.sorry = b
	case "sorry_server_lvs_method", "sorry_server_inhibit":
		s.noteMissing(b.line, b.text(), "no equivalent for options of the sorry server", "write the option at the service, for all backends")
	case "ops":
		s.noteChanged(b.line, b.text(), "datagrams of one client and port stay together", "write mode: stateless, which keeps no flows")
	case "ha_suspend", "ip_family", "hashed", "smtp_alert", "no_alpha":
		s.noteMissing(b.line, b.text(), "no equivalent", "")
	case "omega", "quorum_up", "quorum_down":
		s.noteMissing(b.line, b.text(), "no equivalent for programs that run on a change of state", notifications)
	case "quorum", "hysteresis":
		if value != map[string]string{"quorum": "1", "hysteresis": "0"}[b.words[0]] {
			s.noteChanged(b.line, b.text(), "a spare priority takes over when no backend of the one before is up, not below a weight of them", "")
		}
	case "weight":
		s.count(b, &s.weight)
	case "inhibit_on_failure":
		s.noteChanged(b.line, b.text(), inhibited, "")
	case "persistence_engine":
		s.noteMissing(b.line, b.text(), noEngine, helperSIP)
	default:
		s.noteMissing(b.line, b.text(), "no equivalent", "")
	}
}

// duration reads a number of seconds.
func (s *server) duration(b *block, set *config.Duration) {
	if t, ok := seconds(b.arg(1)); ok {
		*set = t
		return
	}
	s.noteMissing(b.line, b.text(), "not understood", "write a number of seconds, and import again")
}

// count reads an integer.
func (s *server) count(b *block, set *int) {
	if n, ok := number(b.arg(1)); ok {
		*set = n
		return
	}
	s.noteMissing(b.line, b.text(), "not understood", "write a number, and import again")
}

// retries reads the failures that keepalived tolerates: a server is down after one more.
func (s *server) retries(b *block, fall *int) {
	n := *fall - 1
	s.count(b, &n)
	*fall = min(n+1, 100)
}

// spread notes a line that delays the first check by a random time.
func (s *server) spread(b *block) {
	s.d.Implied(b.line, b.text(), "Sluice spreads the first checks over an interval")
}

// on reports whether a boolean value is set.
func on(value string) bool { return slices.Contains([]string{"", "on", "true", "yes"}, value) }

const inhibited = "a backend that is down gets no new connections, and its open connections continue"

// lvsMethod reads NAT, DR or TUN, and the type of the tunnel.
func (s *server) lvsMethod(b *block) (config.Mode, *config.Tunnel) {
	mode, known := methods[b.arg(1)]
	if !known {
		s.lost, s.next = "no equivalent for lvs_method "+b.arg(1), "write mode: dnat, fullnat, dsr or tunnel"
	}
	t := &config.Tunnel{}
	for i := 2; i < len(b.words); i++ {
		switch b.words[i] {
		case "type":
			t.Type = config.TunnelType(strings.ToLower(b.arg(i + 1)))
			i++
		case "port":
			port, _ := strconv.ParseUint(b.arg(i+1), 10, 16)
			t.Port = uint16(port)
			i++
		default:
			s.noteMissing(b.line, b.words[i], "no equivalent for an option of the tunnel", "use ipip or gue without it at the servers")
		}
	}
	if t.Type == "gre" {
		s.lost, s.next = "no equivalent for GRE tunnels", "use ipip or gue at the servers"
	}
	if t.Type != config.TunnelGUE {
		return mode, nil
	}
	return mode, t
}

// finish completes the service and adds it.
func (s *server) finish() {
	v := &s.service
	if len(v.Backends) == 0 {
		v.Mode, v.Tunnel = s.method, s.tunnel
	}
	s.sorryServer()
	for i := range v.Backends {
		b := &v.Backends[i]
		if v.Mode.OneWay() {
			b.Port = 0
		} else {
			b.Port = portFor(v, b.Port)
		}
	}
	if v.Backends == nil {
		v.Backends = []config.Backend{}
	}
	if d := s.delay; d != nil && (v.Check == nil || v.Check.Interval.String() != d.arg(1)+"s") {
		s.noteChanged(d.line, d.text(), retriedLater, "write a shorter interval")
	}
	if v.Check != nil {
		for _, b := range s.unchecked {
			s.noteChanged(b.line, b.text(), "the server has no checker, and gets the check of the others", "make another service for it")
		}
	}
	if s.at == 0 {
		s.at = s.block.line
	}
	s.schedule(s.scheduler, s.at, s.portFlag)
	s.add()
}

// sorryServer adds the server for the time when no other server is up.
func (s *server) sorryServer() {
	if s.sorry == nil {
		return
	}
	a, err := hostPort(s.sorry.arg(1))
	port, perr := strconv.ParseUint(s.sorry.arg(2), 10, 16)
	if s.sorry.arg(2) == "" {
		port, perr = 0, nil
	}
	if err != nil || perr != nil {
		s.noteMissing(s.sorry.line, s.sorry.text(), "not understood", "write a backend with priority: 2")
		return
	}
	s.addLines(s.sorry.line)
	s.service.Backends = append(s.service.Backends, config.Backend{Name: "sorry", Address: a.Addr(), Port: uint16(port), Priority: 2})
	if s.service.Check != nil {
		s.noteChanged(s.sorry.line, s.sorry.text(), "the sorry server gets the check of the others", "let it answer the check")
	}
}
