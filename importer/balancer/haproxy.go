// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// section is a part of haproxy.cfg: a frontend, backend or listen, with the defaults before it.
type section struct {
	kind, name string
	line       int
	lines      []statement
	defaults   *section
	used       bool
}

// statement is one line of a section.
type statement struct {
	line  int
	words []string
}

func (s statement) text() string { return strings.Join(s.words, " ") }

// get returns the last line of a section that begins with the words, otherwise of its defaults.
func (s *section) get(words ...string) (statement, bool) {
	for at := s; at != nil; at = at.defaults {
		for _, l := range slices.Backward(at.lines) {
			if len(l.words) >= len(words) && slices.Equal(l.words[:len(words)], words) {
				return l, true
			}
		}
	}
	return statement{}, false
}

// haproxy imports one file.
type haproxy struct {
	Options
	d        *draft.Draft
	sections []*section
	backends map[string]*section
}

// HAProxy imports the sections of a haproxy.cfg in mode tcp.
func HAProxy(text string, o Options) (*draft.Result, error) {
	h := &haproxy{Options: o, d: draft.New("haproxy", text, "#")}
	if err := h.read(); err != nil {
		return nil, err
	}
	h.backends = map[string]*section{}
	for _, s := range h.sections {
		if s.kind == "backend" && h.backends[s.name] == nil {
			h.backends[s.name] = s
		}
	}
	for _, s := range h.sections {
		switch s.kind {
		case "defaults":
			h.noteDefaults(s)
		case "listen":
			if to, ok := s.get("default_backend"); ok && len(to.words) > 1 {
				h.frontend(s) // its own servers get no connections
			} else {
				h.balance(s, s)
			}
		case "frontend":
			h.frontend(s)
		case "backend":
		case "global":
			h.d.Structure(s.line)
			for _, l := range s.lines {
				if slices.Contains([]string{"maxconn", "maxconnrate", "maxsessrate"}, l.words[0]) {
					h.d.Lost(l.line, "", "no equivalent for a limit of all services together", "write limits: at each service")
				} else {
					h.d.Implied(l.line, "", "is about HAProxy itself")
				}
			}
		default:
			h.loseAll(s, "no equivalent for section "+s.kind, "keep HAProxy for it")
		}
	}
	for _, s := range h.sections {
		if s.kind == "backend" && !s.used {
			h.loseAll(s, "no imported frontend uses the backend", "write a service with its servers if they are needed")
		}
	}
	return h.d.Finish()
}

var sectionKinds = []string{"global", "defaults", "frontend", "backend", "listen", "userlist", "peers", "resolvers", "mailers", "program", "ring", "cache",
	"http-errors", "fcgi-app", "log-forward", "crt-store", "traces"}

// read splits the file into sections.
func (h *haproxy) read() error {
	var at, defaults *section
	for i, line := range h.d.Lines() {
		w := haproxyWords(line)
		if len(w) == 0 {
			continue
		}
		if slices.Contains(sectionKinds, w[0]) {
			at = &section{kind: w[0], line: i + 1, defaults: defaults}
			if len(w) > 1 {
				at.name = w[1]
			}
			if w[0] == "defaults" {
				at.defaults, defaults = nil, at
			}
			h.sections = append(h.sections, at)
			continue
		}
		if at == nil {
			return fmt.Errorf("line %d: %q is outside of all sections: pass a haproxy.cfg", i+1, w[0])
		}
		at.lines = append(at.lines, statement{i + 1, w})
	}
	if len(h.sections) == 0 {
		return errors.New("no section in it: pass a haproxy.cfg, with frontend, backend or listen")
	}
	return nil
}

// haproxyWords splits a line into words. Quotes and backslashes protect spaces, and # begins a
// comment.
func haproxyWords(line string) (words []string) {
	var b strings.Builder
	in, escaped := false, false
	var quote rune
	for _, r := range line {
		switch {
		case escaped:
			if r == 'r' || r == 'n' {
				b.WriteByte('\\')
			}
			b.WriteRune(r)
			escaped = false
		case r == '\\' && quote != '\'':
			escaped, in = true, true
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			b.WriteRune(r)
		case r == '"' || r == '\'':
			quote, in = r, true
		case r == '#':
			if in {
				words = append(words, b.String())
			}
			return words
		case r == ' ' || r == '\t' || r == '\r':
			if in {
				words = append(words, b.String())
				b.Reset()
			}
			in = false
		default:
			b.WriteRune(r)
			in = true
		}
	}
	if in {
		words = append(words, b.String())
	}
	return words
}

func (h *haproxy) loseAll(s *section, reason, next string) {
	h.d.Lost(s.line, "", reason, next)
	for _, l := range s.lines {
		h.d.Lost(l.line, "", reason, next)
	}
}

// noteDefaults notes the lines of a defaults section, which later sections inherit.
func (h *haproxy) noteDefaults(s *section) {
	h.d.Structure(s.line)
	for _, l := range s.lines {
		switch verdict, reason, next := commonLine(l.words); verdict {
		case draft.Lost:
			h.d.Lost(l.line, "", reason, next)
		case draft.Implied:
			h.d.Implied(l.line, "", reason)
		default:
			if !slices.Contains([]string{"mode", "balance", "default-server", "source"}, l.words[0]) && !isCheckLine(l.words) {
				h.d.Lost(l.line, "", "no equivalent", "")
			} else {
				h.d.Implied(l.line, "", "applies to later sections, and is listed there")
			}
		}
	}
}

// frontend adds a service from a frontend and its backend section.
func (h *haproxy) frontend(f *section) {
	to, ok := f.get("default_backend")
	if mode, _ := f.get("mode"); len(mode.words) > 1 && mode.words[1] != "tcp" {
		h.loseAll(f, "mode "+mode.words[1]+" needs a proxy", "keep HAProxy for it")
		return
	}
	if !ok || len(to.words) < 2 {
		h.loseAll(f, "the frontend has no default_backend: the contents of connections select the backend", "keep HAProxy for it")
		return
	}
	if b := h.backends[to.words[1]]; b != nil {
		b.used = true
		h.balance(f, b)
		return
	}
	h.loseAll(f, "there is no backend "+to.words[1], "add the backend to the file, and import again")
}

// proxyService is a service under construction.
type proxyService struct {
	object
	h            *haproxy
	f, b         *section // Equal for a listen section.
	checked, all int      // Servers.
	lists        map[string][]netip.Prefix
	used         map[string]bool // Lists of clients.
	proxied      []statement     // Servers with send-proxy.
}

// balance adds a service from the listeners of one section and the servers of another.
func (h *haproxy) balance(f, b *section) {
	p := &proxyService{object: object{d: h.d}, h: h, f: f, b: b, lists: map[string][]netip.Prefix{}, used: map[string]bool{}}
	p.service = config.Service{Name: f.name, Protocol: flow.TCP, Mode: config.ModeFullNAT, Backends: []config.Backend{}}
	p.addLines(f.line)
	for _, s := range []*section{f, b} {
		if mode, _ := s.get("mode"); len(mode.words) > 1 && mode.words[1] != "tcp" {
			p.lost, p.next = "mode "+mode.words[1]+" needs a proxy", "keep HAProxy for it"
		}
	}
	for _, s := range []*section{f, b} {
		if _, off := s.get("disabled"); off {
			p.lost, p.next = "the section is disabled", "write the service by hand if it is needed"
		}
	}
	sections := []*section{f}
	if f != b {
		p.addLines(b.line)
		sections = append(sections, b)
	}
	for _, s := range sections {
		for _, l := range s.lines {
			if p.lost != "" {
				p.addLines(l.line)
				continue
			}
			p.statement(s, l)
		}
	}
	if len(p.service.Listen) == 0 && p.lost == "" {
		p.lost, p.next = "no listener of the section is understood", "write listen: by hand"
	}
	if p.lost != "" {
		for _, s := range sections {
			for _, l := range s.lines {
				p.addLines(l.line)
			}
		}
	}
	p.refusals()
	p.backups()
	p.scheduler()
	p.check()
	p.sourceAddress()
	p.add()
}

// statement reads one line of a frontend, backend or listen section.
func (p *proxyService) statement(s *section, l statement) {
	w := l.words
	switch {
	case w[0] == "bind":
		p.bind(l)
		return
	case w[0] == "server" && s != p.b:
		p.noteMissing(l.line, l.text(), "default_backend selects another section: the server gets no connections", "move the server to that section if it is needed")
		return
	case w[0] == "server":
		p.server(l)
		return
	case w[0] == "acl" || w[0] == "tcp-request":
		if p.clients(s, l) {
			return
		}
	case w[0] == "mode" || w[0] == "default_backend" || w[0] == "balance" || w[0] == "source" || w[0] == "default-server" || isCheckLine(w):
		p.addLines(l.line)
		return
	case w[0] == "maxconn" && len(w) > 1 && s == p.f:
		p.service.Limits.Connections, _ = number(w[1])
		p.addLines(l.line)
		return
	case w[0] == "stick-table" || w[0] == "stick":
		p.parsePersistence(l)
		return
	}
	switch verdict, reason, next := commonLine(w); verdict {
	case draft.Implied:
		p.d.Implied(l.line, "", reason)
	case draft.Lost:
		p.noteMissing(l.line, l.text(), reason, next)
	default:
		p.noteMissing(l.line, l.text(), "no equivalent", "keep HAProxy for this service if it needs the line")
	}
}

// bind reads a listener.
func (p *proxyService) bind(l statement) {
	if len(l.words) < 2 {
		return
	}
	device := ""
	for i := 2; i < len(l.words); i++ {
		value := ""
		if i+1 < len(l.words) {
			value = l.words[i+1]
		}
		switch l.words[i] {
		case "ssl":
			p.lost, p.next = "no equivalent for the end of TLS in HAProxy", "let the servers end TLS, or keep HAProxy behind a service of Sluice"
		case "interface":
			device = value
			i++
		case "maxconn", "mss":
			i++
			p.noteMissing(l.line, l.words[i-1]+" "+value, "no equivalent for this option of one listener", "write limits: or mss-clamp: for all")
		case "name", "backlog", "id", "process", "thread", "tcp-ut", "nice", "crt", "alpn", "ca-file", "verify", "ciphers":
			i++
			if p.lost == "" {
				p.d.Implied(l.line, l.words[i-1]+" "+value, noEffect)
			}
		case "transparent", "v4v6", "v6only", "defer-accept", "tfo":
			p.d.Implied(l.line, l.words[i], noEffect)
		default:
			p.noteMissing(l.line, l.words[i], "no equivalent for this option of bind", "keep HAProxy for this service if it needs the option")
		}
	}
	for _, part := range strings.Split(l.words[1], ",") {
		list, err := p.h.binds(part, device)
		if err != nil {
			p.noteMissing(l.line, part, err.Error(), "write listen: by hand")
			if strings.Contains(err.Error(), "host itself") {
				p.lost, p.next = err.Error(), "keep HAProxy for it"
			}
			if strings.Contains(err.Error(), "--outside") {
				p.lost, p.next = "the section listens on every address of the host", "import again with --outside INTERFACE, the interface with the public address"
			}
			continue
		}
		if len(list) > 0 && !list[0].Address.IsValid() {
			p.noteChanged(l.line, part, "HAProxy accepts connections to every address of the host, also from the host itself; the service only from outside to the address of "+list[0].Interface, "import again with --outside IFACE1,IFACE2 for more interfaces")
		}
		for _, l := range list {
			if !slices.ContainsFunc(p.service.Listen, func(o config.Listen) bool { return reflect.DeepEqual(o, l) }) {
				p.service.Listen = append(p.service.Listen, l)
			}
		}
	}
	p.addLines(l.line)
}

// binds reads "192.0.2.1:80", ":8000-8010", "*:80" or "[::]:80".
func (h *haproxy) binds(s, device string) (list []config.Listen, err error) {
	s = strings.TrimPrefix(strings.TrimPrefix(s, "ipv4@"), "ipv6@")
	at := strings.LastIndex(s, ":")
	if at < 0 || strings.HasPrefix(s, "/") || strings.Contains(s, "@") {
		return nil, fmt.Errorf("%q is not an address with a port", s)
	}
	host, ports := strings.Trim(s[:at], "[]"), s[at+1:]
	low, high, ranged := strings.Cut(ports, "-")
	if !ranged {
		high = low
	}
	first, err1 := strconv.ParseUint(low, 10, 16)
	last, err2 := strconv.ParseUint(high, 10, 16)
	if err1 != nil || err2 != nil || last < first {
		return nil, fmt.Errorf("%q is not a list of ports", ports)
	}
	l := config.Listen{Ports: []flow.Ports{{First: uint16(first), Last: uint16(last)}}, Interface: device}
	if host == "" || host == "*" || host == "0.0.0.0" || host == "::" {
		names := h.Outside
		if device != "" {
			names = []string{device}
		}
		for _, name := range names {
			l.Interface = name
			list = append(list, l)
		}
		if len(list) == 0 {
			return nil, errors.New("it listens on every address of the host: import again with --outside INTERFACE")
		}
		return list, nil
	}
	if l.Address, err = netip.ParseAddr(host); err != nil || l.Address.Zone() != "" {
		return nil, fmt.Errorf("%q is not an address", host)
	}
	if l.Address = l.Address.Unmap(); l.Address.IsLoopback() {
		return nil, fmt.Errorf("no equivalent for a listener on %s: only connections of the host itself reach it", host)
	}
	return []config.Listen{l}, nil
}

// parsePersistence parses the persistence of clients.
func (p *proxyService) parsePersistence(l statement) {
	w := l.words
	if w[0] == "stick" {
		if len(w) < 3 || w[1] != "on" || w[2] != "src" || len(w) > 3 {
			p.noteMissing(l.line, l.text(), "persistence is by addresses and ports of the client", "write persistence: {key: [source-address]}")
		} else if p.service.Persistence == nil {
			p.service.Persistence = &config.Persistence{}
		}
		p.addLines(l.line)
		return
	}
	k := &config.Persistence{}
	for i := 1; i < len(w); i += 2 {
		value, ok := "", true
		if i+1 < len(w) {
			value = w[i+1]
		}
		switch w[i] {
		case "type":
			ok = value == "ip" || value == "ipv6"
		case "size":
			k.Size = size(value)
		case "expire":
			k.Timeout, ok = haproxyTime(value)
		default:
			ok = false
		}
		if !ok {
			p.noteMissing(l.line, w[i]+" "+value, "no equivalent for this option of a stick-table", "keep HAProxy for this service if it needs the option")
		}
	}
	p.service.Persistence = k
	p.addLines(l.line)
}

// size reads a number with k, m or g.
func size(s string) int {
	factor := 1
	switch {
	case strings.HasSuffix(s, "k"):
		factor = 1 << 10
	case strings.HasSuffix(s, "m"):
		factor = 1 << 20
	case strings.HasSuffix(s, "g"):
		factor = 1 << 30
	}
	n, _ := number(strings.TrimRight(s, "kmg"))
	return min(n, (1<<28)/factor) * factor
}
