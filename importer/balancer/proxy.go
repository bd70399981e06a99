// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/importer/draft"
)

// noEffect is the reason for lines that need no configuration.
const noEffect = "has no effect on packets, or Sluice always does this"

// commonLine returns the kind of note, the reason and the next step for a line of HAProxy with the
// same meaning in every section.
func commonLine(w []string) (draft.Kind, string, string) {
	switch w[0] {
	case "description", "id", "enabled", "hash-type", "guid":
		return draft.Implied, noEffect, ""
	case "log", "log-format", "log-tag", "unique-id-format":
		return draft.Lost, "no equivalent for lines about ended connections", "write log: {} at the service, for lines about new ones, or use the metrics"
	case "timeout":
		if len(w) > 1 && (w[1] == "client" || w[1] == "server" || w[1] == "tunnel") {
			return draft.Lost, "idle connections expire after timeouts.tcp-established, for all services", "write timeouts: {tcp-established: ...}; less than 2h4m needs force: true"
		}
		if len(w) > 1 && w[1] == "check" {
			return "", "", ""
		}
		return draft.Implied, "the client and the server connect to each other directly", ""
	case "retries", "maxconn", "fullconn", "backlog", "rate-limit":
		return draft.Lost, "no equivalent: Sluice has no queue of connections", "write limits:"
	case "option":
		if len(w) > 1 && slices.Contains([]string{"dontlognull", "dontlog-normal", "redispatch", "tcp-smart-accept", "tcp-smart-connect", "splice-auto",
			"splice-request", "splice-response", "clitcpka", "srvtcpka", "tcpka", "nolinger", "log-health-checks", "log-separate-errors", "contstats",
			"logasap", "socket-stats", "external-check", "persist", "allbackups"}, w[1]) {
			return draft.Implied, noEffect, ""
		}
		if len(w) > 1 && (w[1] == "tcplog" || w[1] == "httplog") {
			return draft.Lost, "no equivalent for lines about ended connections", "write log: {} at the service, for lines about new ones, or use the metrics"
		}
	case "acl", "use_backend", "use-server", "tcp-request", "tcp-response", "http-request", "http-response", "filter":
		return draft.Lost, "decisions by the contents of connections need a proxy", "keep HAProxy for it, or write allow: and deny: for lists of clients"
	}
	return "", "", ""
}

// isCheckLine reports whether a line configures the check of servers.
func isCheckLine(w []string) bool {
	switch w[0] {
	case "http-check", "tcp-check":
		return true
	case "timeout":
		return len(w) > 1 && w[1] == "check"
	case "option":
		return len(w) > 1 && slices.Contains([]string{"httpchk", "tcp-check", "smtpchk", "mysql-check", "pgsql-check", "redis-check", "ldap-check", "ssl-hello-chk", "spop-check"}, w[1])
	}
	return false
}

// haproxyTime parses a time; without a unit it is in milliseconds.
func haproxyTime(s string) (config.Duration, bool) {
	digits := strings.TrimRight(s, "usmhd")
	n, err := strconv.ParseUint(digits, 10, 31)
	unit := map[string]time.Duration{"": time.Millisecond, "ms": time.Millisecond, "us": time.Microsecond, "s": time.Second, "m": time.Minute, "h": time.Hour,
		"d": 24 * time.Hour}[s[len(digits):]]
	if err != nil || unit == 0 || n > uint64(30*24*time.Hour/unit) {
		return 0, false
	}
	return config.Duration(time.Duration(n) * unit), true
}

// server reads a server line as a backend.
func (p *proxyService) server(l statement) {
	w := l.words
	if len(w) < 3 {
		return
	}
	host, port := w[2], ""
	if ap, err := netip.ParseAddrPort(w[2]); err == nil {
		host, port = ap.Addr().String(), strconv.Itoa(int(ap.Port()))
	} else if at := strings.LastIndex(w[2], ":"); at >= 0 && strings.Count(w[2], ":") == 1 {
		host, port = w[2][:at], w[2][at+1:]
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	n, perr := strconv.ParseUint("0"+port, 10, 16)
	if err != nil || perr != nil || a.Zone() != "" {
		p.noteMissing(l.line, w[1]+" "+w[2], "the server is a name or a socket, or its port is relative", "write its address as a backend")
		return
	}
	b := config.Backend{Name: w[1], Address: a.Unmap(), Port: uint16(n)}
	p.all++
	checked := p.serverOptions(&b, l, append(p.b.serverDefaults(), w[3:]...))
	if checked {
		p.checked++
	}
	if b.Port != 0 {
		b.Port = portFor(&p.service, b.Port)
	}
	p.addLines(l.line)
	p.service.Backends = append(p.service.Backends, b)
}

// serverDefaults returns the words of all lines default-server in force.
func (s *section) serverDefaults() (words []string) {
	if s.defaults != nil {
		words = s.defaults.serverDefaults()
	}
	for _, l := range s.lines {
		if l.words[0] == "default-server" {
			words = append(words, l.words[1:]...)
		}
	}
	return words
}

// serverOptions reads the words after the address of a server, and reports whether it is checked.
func (p *proxyService) serverOptions(b *config.Backend, l statement, w []string) (checked bool) {
	for i := 0; i < len(w); i++ {
		value := ""
		if i+1 < len(w) {
			value = w[i+1]
		}
		switch w[i] {
		case "check":
			checked = true
		case "no-check":
			checked = false
		case "weight":
			i++
			n, ok := number(value)
			if !ok {
				p.noteMissing(l.line, "weight "+value, "not understood", "write weight:")
			}
			b.Drain, b.Weight = ok && n == 0, 0
			if n > 1 {
				b.Weight = n
			}
		case "backup":
			b.Priority = 2
		case "disabled":
			b.Drain = true
			p.noteChanged(l.line, w[i], "a disabled server becomes one that drains", "remove it, or sluice backend SERVICE NAME down")
		case "maxconn":
			i++
			b.MaxConnections, _ = number(value)
			p.noteChanged(l.line, w[i-1]+" "+value, "connections above the limit get another server or are refused; none waits", "")
		case "inter", "rise", "fall", "port":
			i++ // option of the check
		case "send-proxy-v2":
			p.proxied = append(p.proxied, l)
		case "send-proxy":
			p.proxied = append(p.proxied, l)
			p.noteChanged(l.line, w[i], "the header has version 2", "configure the servers for version 2")
		case "ssl", "check-ssl":
			p.noteMissing(l.line, w[i], "no equivalent for TLS towards the servers", "let the servers end the TLS connections of clients")
		case "on-error", "on-marked-down", "on-marked-up", "error-limit", "observe", "fastinter", "downinter", "slowstart", "cookie", "id", "minconn", "maxqueue",
			"source", "addr", "track", "resolvers", "init-addr", "resolve-prefer", "verify", "ca-file", "crt", "sni", "check-sni", "alpn", "pool-max-conn", "verifyhost":
			i++
			p.noteMissing(l.line, w[i-1]+" "+value, "no equivalent for this option of a server", "keep HAProxy for this service if it needs the option")
		case "enabled":
			p.d.Implied(l.line, w[i], noEffect)
		default:
			p.noteMissing(l.line, w[i], "no equivalent for this option of a server", "keep HAProxy for this service if it needs the option")
		}
	}
	return checked
}

// scheduler sets the scheduler from the line balance.
func (p *proxyService) scheduler() {
	l, ok := p.b.get("balance")
	name := "roundrobin"
	if ok && len(l.words) > 1 {
		name = l.words[1]
	}
	s := &p.service
	switch name {
	case "roundrobin", "static-rr":
		s.Scheduler = config.SchedulerRR
		if p.hasWeights() {
			s.Scheduler = config.SchedulerWRR
		}
	case "leastconn":
		s.Scheduler = config.SchedulerLC
		if p.hasWeights() {
			s.Scheduler = config.SchedulerWLC
		}
	case "source":
		s.Scheduler = config.SchedulerSourceHash
		p.noteChanged(l.line, l.text(), "clients are spread by another hash and move once", "")
	case "first":
		p.noteChanged(l.line, l.text(), "first fills one server before the next; rr distributes evenly", "write priorities and max-connections")
		s.Scheduler = config.SchedulerRR
	default:
		if strings.HasPrefix(name, "random") {
			s.Scheduler = config.SchedulerRandom
			return
		}
		p.noteChanged(l.line, l.text(), "the backend cannot depend on the contents of connections; replaced by rr", "keep HAProxy for it")
		s.Scheduler = config.SchedulerRR
	}
}

// check sets the check of servers.
func (p *proxyService) check() {
	if p.checked == 0 || p.lost != "" {
		return
	}
	k := &config.Check{Type: config.CheckTCP, Initial: "up"}
	line := p.b.line
	for at := p.b; at != nil; at = at.defaults {
		for _, l := range at.lines {
			if isCheckLine(l.words) && (at == p.b || !p.configuresCheck(l)) {
				p.checkLine(k, l)
			}
		}
	}
	p.checkOptions(k)
	p.checkTimeout(k)
	if p.checked < p.all {
		p.noteChanged(line, "", "servers without check get the check of the others", "make another service for them")
	}
	if k.Type == config.CheckHTTP && p.tlsChecks() {
		k.Type = config.CheckHTTPS
	}
	p.probe(k, line)
	p.service.Check = k
}

// checkTimeout sets the timeout of a check as HAProxy does. It is "timeout check", otherwise
// "timeout connect" if that is shorter than the interval, otherwise the interval.
func (p *proxyService) checkTimeout(k *config.Check) {
	if k.Timeout != 0 {
		return
	}
	interval := k.Interval
	if interval == 0 {
		interval = config.Duration(2 * time.Second)
	}
	k.Timeout = interval / 10 * 9 // it must be shorter than the interval
	if l, ok := p.b.get("timeout", "connect"); ok && len(l.words) > 2 {
		if t, ok := haproxyTime(l.words[2]); ok {
			k.Timeout = min(k.Timeout, t)
		}
	}
}

// clients parses "acl NAME src ADDRESSES", and "tcp-request connection accept|reject" with such
// lists. It reports whether the line has one of these forms.
func (p *proxyService) clients(s *section, l statement) bool {
	w := l.words
	if w[0] == "acl" {
		if len(w) < 4 || w[2] != "src" {
			return false
		}
		var list []netip.Prefix
		for _, word := range w[3:] {
			a, err := netip.ParsePrefix(word)
			if single, serr := netip.ParseAddr(word); serr == nil {
				a, err = netip.PrefixFrom(single, single.BitLen()), nil
			}
			if err != nil {
				return false // a file, or a flag
			}
			list = append(list, a.Masked())
		}
		p.lists[w[1]] = append(p.lists[w[1]], list...)
		p.addLines(l.line)
		return true
	}
	if len(w) != 5 || w[1] != "connection" && w[1] != "content" || w[2] != "accept" && w[2] != "reject" || w[3] != "if" && w[3] != "unless" {
		return false
	}
	name, not := strings.CutPrefix(w[4], "!")
	if not = not != (w[3] == "unless"); p.lists[name] == nil {
		return false
	}
	switch {
	case w[2] == "reject" && not && len(p.service.Allow) == 0:
		p.service.Allow = append(p.service.Allow, p.set(name))
	case w[2] == "reject" && !not:
		p.service.Deny = append(p.service.Deny, p.set(name))
	default:
		return false
	}
	p.addLines(l.line)
	return true
}

func (p *proxyService) set(name string) string {
	p.used[name] = true
	return p.d.Set(p.f.name+"-"+name, p.lists[name])
}

// backups notes that all backups take connections together, where HAProxy uses one.
func (p *proxyService) backups() {
	n := 0
	for _, b := range p.service.Backends {
		if b.Priority > 1 {
			n++
		}
	}
	if _, all := p.b.get("option", "allbackups"); n > 1 && !all {
		p.noteChanged(p.b.line, "", "all backups take connections together; HAProxy uses the first one that is up", "write priority: 3, 4, ... at the others")
	}
}

// refusals adds notes about unused lists of clients, and about servers with a different PROXY
// header.
func (p *proxyService) refusals() {
	for _, l := range slices.Concat(p.f.lines, p.b.lines) {
		if l.words[0] == "acl" && len(l.words) > 1 && p.lists[l.words[1]] != nil && !p.used[l.words[1]] {
			p.noteMissing(l.line, l.text(), "no equivalent for decisions by this list of clients", "write allow: or deny: for lists of clients")
		}
	}
	if len(p.proxied) == 0 {
		return
	}
	p.service.ClientAddress = config.ClientAddressProxyV2
	if len(p.proxied) < p.all {
		for _, l := range p.proxied {
			p.noteChanged(l.line, l.text(), "all servers of the service get the PROXY header, not only this one", "make another service for servers without it")
		}
	}
}

// configuresCheck reports whether the section itself configures the check.
func (p *proxyService) configuresCheck(statement) bool {
	return slices.ContainsFunc(p.b.lines, func(l statement) bool { return l.words[0] == "option" && isCheckLine(l.words) })
}

func (p *proxyService) tlsChecks() bool {
	return slices.ContainsFunc(p.b.lines, func(l statement) bool { return l.words[0] == "server" && slices.Contains(l.words, "check-ssl") })
}

// checkOptions sets interval, rise, fall and port from the first server with a check.
func (p *proxyService) checkOptions(k *config.Check) {
	var first []string
	for _, l := range p.b.lines {
		if l.words[0] != "server" || len(l.words) < 3 || !slices.ContainsFunc(p.service.Backends, func(b config.Backend) bool { return b.Name == l.words[1] }) {
			continue
		}
		w := append(p.b.serverDefaults(), l.words[3:]...)
		if !slices.Contains(w, "check") {
			continue
		}
		var mine []string
		for i := 0; i+1 < len(w); i++ {
			if slices.Contains([]string{"inter", "rise", "fall", "port"}, w[i]) {
				mine = append(mine, w[i], w[i+1])
			}
		}
		if first == nil {
			first = append(mine, "")
			for i := 0; i+1 < len(mine); i += 2 {
				if !setOption(k, mine[i], mine[i+1]) {
					p.noteMissing(l.line, mine[i]+" "+mine[i+1], "not understood", "write the value at the check")
				}
			}
		} else if !slices.Equal(append(mine, ""), first) {
			p.noteChanged(l.line, l.text(), "the service has one check for all backends, from the first server", "make another service for servers with a different check")
		}
	}
}

// setOption sets an option of the check, and reports whether its value is understood.
func setOption(k *config.Check, name, value string) (ok bool) {
	switch name {
	case "inter":
		k.Interval, ok = haproxyTime(value)
	case "rise":
		k.Rise, ok = number(value)
	case "fall":
		k.Fall, ok = number(value)
	case "port":
		n, err := strconv.ParseUint(value, 10, 16)
		k.Port, ok = uint16(n), err == nil
	}
	return ok
}

// checkLine parses option httpchk, http-check, tcp-check and similar lines.
func (p *proxyService) checkLine(k *config.Check, l statement) {
	w := l.words
	arg := func(n int) string {
		if n < len(w) {
			return w[n]
		}
		return ""
	}
	switch {
	case w[0] == "timeout":
		k.Timeout, _ = haproxyTime(arg(2))
	case w[0] == "option" && arg(1) == "httpchk":
		k.Type, k.Method = config.CheckHTTP, "OPTIONS"
		if uri := arg(2); strings.HasPrefix(uri, "/") {
			k.Path = uri
		} else if uri != "" {
			k.Method, k.Path = uri, arg(3)
		}
		if _, host, ok := strings.Cut(l.text(), "Host:"); ok {
			k.Host = strings.TrimSpace(strings.ReplaceAll(host, "\\", ""))
		}
	case w[0] == "option" && arg(1) == "tcp-check":
		p.d.Implied(l.line, l.text(), "a check opens a connection")
	case w[0] == "tcp-check" && arg(1) == "connect":
		p.d.Implied(l.line, l.text(), "a check opens a connection")
		for i := 2; i < len(w); i++ {
			switch w[i] {
			case "port":
				i++
				if n, err := strconv.ParseUint(arg(i), 10, 16); err == nil {
					k.Port = uint16(n)
				} else {
					p.noteMissing(l.line, l.text(), "the port of the check is not understood", "write port: at the check")
				}
			case "default", "linger":
			case "comment":
				i++
			default:
				p.noteMissing(l.line, l.text(), "no equivalent for "+w[i]+" of tcp-check connect", "write check: {type: exec} with a program for it")
				return
			}
		}
	case w[0] == "option" && arg(1) == "smtpchk":
		k.Expect = "220"
		p.noteChanged(l.line, l.text(), "the check waits for the server's greeting, and sends nothing", "")
	case w[0] == "tcp-check" && arg(1) == "send":
		k.Send = strings.NewReplacer(`\r`, "\r", `\n`, "\n").Replace(arg(2))
	case w[0] == "tcp-check" && arg(1) == "expect" && (arg(2) == "string" || arg(2) == "rstring"):
		k.Expect = arg(3)
		if arg(2) == "rstring" {
			p.noteChanged(l.line, l.text(), "the answer must begin with the text, which is not a regular expression", "")
		} else {
			p.noteChanged(l.line, l.text(), "the answer must begin with the text; HAProxy accepts it anywhere", "")
		}
	case w[0] == "http-check":
		p.httpCheck(k, l)
	default:
		p.noteChanged(l.line, l.text(), "the check only opens a connection", "write check: {type: exec} with a program for it")
	}
}

// httpCheck reads http-check expect and send.
func (p *proxyService) httpCheck(k *config.Check, l statement) {
	w := l.words
	for i := 1; i < len(w); i++ {
		value := ""
		if i+1 < len(w) {
			value = w[i+1]
		}
		switch w[i] {
		case "expect", "send", "connect":
		case "status":
			k.Status = strings.Split(value, ",")
			i++
		case "string":
			k.Body = value
			i++
		case "meth":
			k.Method = value
			i++
		case "uri":
			k.Path = value
			i++
		case "ver":
			i++
			p.d.Implied(l.line, "ver "+value, "a check sends HTTP/1.1")
		case "hdr":
			if i+2 < len(w) && strings.EqualFold(value, "host") {
				k.Host = w[i+2]
			} else if i+2 < len(w) {
				if k.Headers == nil {
					k.Headers = map[string]string{}
				}
				k.Headers[value] = w[i+2]
			}
			i += 2
		default:
			p.noteMissing(l.line, l.text(), "no equivalent for "+w[i]+" of http-check", "write body: with a text in the answer")
			return
		}
	}
}

// sourceAddress sets the mode by the source address that servers see.
func (p *proxyService) sourceAddress() {
	l, ok := p.b.get("source")
	if !ok || len(l.words) < 2 {
		return
	}
	if i := slices.Index(l.words, "usesrc"); i >= 0 && i+1 < len(l.words) && strings.HasPrefix(l.words[i+1], "client") {
		p.service.Mode = config.ModeDNAT
		return
	}
	if a, err := hostPort(l.words[1]); err == nil {
		if !a.Addr().IsUnspecified() {
			p.service.SourcePool = []config.AddressRange{{First: a.Addr(), Last: a.Addr()}}
		}
		return
	}
	p.noteMissing(l.line, l.text(), "not understood", "write source-pool:")
}
