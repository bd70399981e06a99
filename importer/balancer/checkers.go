// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"reflect"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// realServer adds a real server of keepalived as a backend, with its checker as the service's
// check.
func (s *server) realServer(b *block) {
	if !b.braces {
		s.d.Lost(b.line, "", "the server has no block", "write real_server ADDRESS PORT { ... }")
		return
	}
	a, err := hostPort(b.arg(1))
	port, perr := strconv.ParseUint(b.arg(2), 10, 16)
	if b.arg(2) == "" {
		port, perr = 0, nil
	}
	if err != nil || perr != nil {
		s.d.Lost(b.line, "", "the server's address is not understood", "write an address and a port")
		return
	}
	backend := config.Backend{Address: a.Addr(), Port: uint16(port)}
	weight, method, tunnel := s.weight, s.method, s.tunnel
	var check *config.Check
	var host string
	for _, i := range b.inner {
		if i.words[0] == "virtualhost" {
			host = i.arg(1)
		}
	}
	for _, i := range b.inner {
		switch i.words[0] {
		case "weight":
			s.count(i, &weight)
		case "uthreshold":
			s.count(i, &backend.MaxConnections)
		case "lthreshold":
			s.noteMissing(i.line, i.text(), "no equivalent for a lower threshold: a backend takes connections again as soon as one ends", "")
		case "inhibit_on_failure":
			s.noteChanged(i.line, i.text(), inhibited, "")
		case "notify_up", "notify_down":
			s.noteMissing(i.line, i.text(), "no equivalent for programs that run on a change of state", notifications)
		case "lvs_method":
			method, tunnel = s.lvsMethod(i)
		case "warmup":
			s.spread(i)
		case "delay_loop", "retry", "delay_before_retry", "connect_timeout", "alpha", "smtp_alert", "snmp_name":
			s.noteMissing(i.line, i.text(), "no equivalent for a setting of one server", "make another service for the server")
		case "virtualhost":
		default:
			if k := s.checker(i, host); k != nil && check == nil {
				check = k
			} else if k != nil {
				s.noteMissing(i.line, i.words[0], "a service has one check", "put both into a program: check: {type: exec}")
			}
		}
	}
	if !s.sameMethod(b.line, method, tunnel) {
		return
	}
	backend.Drain = weight == 0
	if weight > 1 {
		backend.Weight = weight
	}
	s.addLines(b.line)
	s.service.Backends = append(s.service.Backends, backend)
	s.useCheck(b, check)
}

// useCheck sets the service's check from a server's checker, or notes a difference.
func (s *server) useCheck(b *block, k *config.Check) {
	switch {
	case k == nil:
		s.unchecked = append(s.unchecked, b)
	case s.checkOf == nil:
		s.checkOf, s.service.Check = b, k
		s.probe(k, b.line)
	default:
		same := *k
		s2 := &server{} // the notes of the first checker are already written
		s2.probe(&same, b.line)
		if !reflect.DeepEqual(same, *s.service.Check) {
			s.noteChanged(b.line, b.text(), "the service has one check for all backends, from "+s.checkOf.arg(1), "make another service for servers with a different check")
		}
	}
}

var checkTypes = map[string]config.CheckType{
	"TCP_CHECK": config.CheckTCP, "HTTP_GET": config.CheckHTTP, "SSL_GET": config.CheckHTTPS, "UDP_CHECK": config.CheckUDP,
	"DNS_CHECK": config.CheckDNS, "PING_CHECK": config.CheckICMP, "MISC_CHECK": config.CheckExec, "SMTP_CHECK": config.CheckTCP,
}

// checker parses a checker's block. It returns nil and adds a note if the checker has no
// equivalent.
func (s *server) checker(b *block, host string) *config.Check {
	kind, known := checkTypes[b.words[0]]
	if !known {
		s.noteMissing(b.line, b.text(), "no equivalent", "write a program for it: check: {type: exec}")
		return nil
	}
	if host == "" {
		host = s.virtualhost
	}
	k := &config.Check{Type: kind, Interval: s.interval, Timeout: s.timeout, Rise: 1, Fall: s.fall, Initial: "up"}
	if s.alpha {
		k.Initial = "down"
	}
	if k.Fall == 0 {
		k.Fall = map[config.CheckType]int{config.CheckDNS: 4, config.CheckExec: 1}[kind]
	}
	if k.Fall == 0 {
		k.Fall = 2
	}
	switch b.words[0] {
	case "SSL_GET":
		k.InsecureSkipVerify = true // keepalived does not verify certificates
	case "SMTP_CHECK":
		k.Expect = "220"
		s.noteChanged(b.line, b.text(), "the check waits for the server's greeting, and sends nothing", "")
	case "DNS_CHECK":
		k.QueryType = "SOA"
	}
	if kind == config.CheckHTTP || kind == config.CheckHTTPS {
		k.Host, k.Status = host, []string{"200-299"}
	}
	urls := 0
	for _, i := range b.inner {
		if i.words[0] == "url" {
			if urls++; urls > 1 {
				s.noteMissing(i.line, "url", "a check requests only the first URL", "let one URL of the server report the state of the others")
				continue
			}
			s.url(k, i)
			continue
		}
		s.checkerLine(k, i)
	}
	if kind == config.CheckExec && len(k.Command) == 0 {
		s.noteMissing(b.line, b.text(), "the checker names no program", "write command:")
		return nil
	}
	return k
}

// checkerLine reads one line of a checker.
func (s *server) checkerLine(k *config.Check, b *block) {
	value := b.arg(1)
	no := func(reason, next string) { s.noteMissing(b.line, b.text(), reason, next) }
	switch b.words[0] {
	case "connect_port":
		if port, err := strconv.ParseUint(value, 10, 16); err == nil {
			k.Port = uint16(port)
		} else {
			no("not understood", "write port: at the check")
		}
	case "connect_timeout", "misc_timeout":
		s.duration(b, &k.Timeout)
	case "retry", "nb_get_retry":
		s.retries(b, &k.Fall)
	case "delay_before_retry":
		if t, ok := seconds(value); !ok || t != k.Interval {
			s.noteChanged(b.line, b.text(), retriedLater, "write a shorter interval")
		}
	case "delay_loop":
		s.duration(b, &k.Interval)
	case "virtualhost":
		k.Host = value
	case "fwmark":
		if mark, err := strconv.ParseUint(value, 0, 32); err == nil {
			k.Mark = uint32(mark)
		} else {
			no("not understood", "write mark: at the check")
		}
	case "type":
		k.QueryType = value
	case "name":
		k.Query = value
	case "misc_path":
		k.Command = strings.Fields(strings.Join(b.words[1:], " "))
	case "misc_dynamic":
		no("no equivalent for weights by the program's exit code: 0 is good, all else is bad", "change the weight by 'sluice backend set'")
	case "alpha":
		k.Initial = "up"
		if on(value) {
			k.Initial = "down"
		}
	case "payload", "require_reply", "max_reply_length", "min_reply_length":
		no("no equivalent for payloads from files", "write send: and expect:")
	case "connect_ip", "bindto", "bind_if", "bind_port":
		no("no equivalent: a check connects to the backend itself, with the source address chosen by the kernel", "")
	case "warmup":
		s.spread(b)
	case "log_all_failures":
		s.d.Implied(b.line, b.text(), "events report changes of a backend; a failed check is in 'sluice show backends'")
	case "enable_sni":
		s.d.Implied(b.line, b.text(), "an https check always sends the name of its host")
	case "tls_compliant":
		s.d.Implied(b.line, b.text(), "the check ends with the answer")
	default:
		no("no equivalent", "")
	}
}

const retriedLater = "a failed check is repeated after the interval"

// url reads the URL of HTTP_GET and SSL_GET.
func (s *server) url(k *config.Check, b *block) {
	for _, i := range b.inner {
		switch i.words[0] {
		case "path":
			k.Path = i.arg(1)
		case "status_code":
			k.Status = i.words[1:]
		case "virtualhost":
			k.Host = i.arg(1)
		case "digest":
			s.noteMissing(i.line, i.text(), "no equivalent for a digest of the answer", "write body: with a text in the answer")
		case "regex":
			s.noteMissing(i.line, i.text(), "no equivalent for a regular expression", "write body: with a text in the answer")
		default:
			s.noteMissing(i.line, i.text(), "no equivalent", "")
		}
	}
}
