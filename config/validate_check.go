// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// minInterval prevents checks from flooding backends.
const minInterval = 100 * time.Millisecond

// checkKeys lists the keys that apply to each type of check, in addition to those
// that apply to all types.
var checkKeys = map[CheckType][]string{
	CheckTCP:   {"port", "send", "expect"},
	CheckHTTP:  {"port", "path", "host", "method", "headers", "status", "body"},
	CheckHTTPS: {"port", "path", "host", "method", "headers", "status", "body", "insecure-skip-verify"},
	CheckUDP:   {"port", "send", "expect"},
	CheckDNS:   {"port", "query", "query-type"},
	CheckICMP:  {},
	CheckExec:  {"port", "command"},
}

var everyCheck = []string{"type", "interval", "timeout", "rise", "fall", "jitter", "initial", "via", "mark"}

// queryTypes are the record types that a dns check may ask for.
var queryTypes = []string{"A", "AAAA", "CNAME", "MX", "NS", "PTR", "SOA", "SRV", "TXT"}

func (v *validator) check(p path, s *Service) {
	k := s.Check
	keys, known := checkKeys[k.Type]
	if !known {
		return
	}
	rv := reflect.ValueOf(k).Elem()
	for _, f := range layoutOf(rv.Type()).fields {
		if !slices.Contains(everyCheck, f.key) && !slices.Contains(keys, f.key) && !rv.Field(f.index).IsZero() {
			v.errorf(p.key(f.key), "remove it", "%s does not apply to a check of type %s", f.key, k.Type).atKey = true
		}
	}
	switch {
	case k.Interval.D() < minInterval:
		v.errorf(p.key("interval"), "write 100ms or more", "interval %s is too short", k.Interval)
	case k.Timeout >= k.Interval:
		v.errorf(p.key("timeout"), "write less than the interval, or a longer interval",
			"timeout %s is not less than the interval of %s", k.Timeout, k.Interval).depends = []path{p.key("interval"), p.key("timeout")}
	}
	if k.Jitter != nil && !(*k.Jitter >= 0 && *k.Jitter <= 0.5) {
		v.errorf(p.key("jitter"), "write a number from 0 to 0.5", "jitter %v is out of range", *k.Jitter)
	}
	if k.Via == "service" && s.Mode != ModeDSR {
		hint := "write via: direct"
		if s.Mode == ModeTunnel {
			hint = "write via: direct, and check the tunnel's end with type exec"
		}
		v.errorf(p.key("via"), hint, "via service applies to mode dsr only").depends = []path{p[:2].key("mode")}
	}
	v.rules(p, []rule{
		{k.Via == "service" && k.Mark != 0, "mark", "remove it", "probes via service carry a mark of their own"},
		{k.Via == "service" && k.Type == CheckExec, "via", "remove it", "via does not apply to a check of type exec"},
		{k.Via == "service" && s.severalAddresses(), "via", "make one service for each address", "via service needs a service with one address"},
	})
	v.checkPort(p, s)
	switch k.Type {
	case CheckHTTP, CheckHTTPS:
		v.checkHTTP(p, k)
	case CheckDNS:
		if !slices.Contains(queryTypes, strings.ToUpper(k.QueryType)) {
			v.errorf(p.key("query-type"), hintOneOf(k.QueryType, queryTypes), "unknown query type %q", k.QueryType)
		}
		if len(k.Query) > 253 || strings.ContainsAny(k.Query, " \t\n") {
			v.errorf(p.key("query"), "write a name such as example.com", "%q is not a DNS name", k.Query)
		}
	case CheckExec:
		switch {
		case len(k.Command) == 0:
			v.errorf(p.key("command"), "write command: [/usr/local/bin/check-web]", "command is missing")
		case !filepath.IsAbs(k.Command[0]):
			v.errorf(p.key("command").index(0), "write the program's whole path; no shell looks it up", "%q is not an absolute path", k.Command[0])
		}
	}
}

// checkPort refuses a check without a port to probe.
func (v *validator) checkPort(p path, s *Service) {
	switch k := s.Check; {
	case k.Type == CheckICMP || k.Type == CheckExec || k.Port != 0 || len(s.Listen) == 0:
	case s.Protocol != flow.Any && len(s.Listen[0].Ports) > 0:
	case len(s.Backends) > 0 && !slices.ContainsFunc(s.Backends, func(b Backend) bool { return b.Port == 0 }):
	default:
		v.errorf(p, "write port", "the service has no port that a %s check could ask", k.Type).depends = []path{p, p[:2].key("listen"), p[:2].key("protocol")}
	}
}

func (v *validator) checkHTTP(p path, k *Check) {
	if !strings.HasPrefix(k.Path, "/") || strings.ContainsFunc(k.Path, notPrintable) {
		v.errorf(p.key("path"), "write /"+strings.TrimLeft(strings.Map(printableOrSpace, k.Path), "/"), "path %q does not begin with /, or has spaces", k.Path)
	} else if _, err := url.ParseRequestURI(k.Path); err != nil {
		v.errorf(p.key("path"), "write % as %25", "path %q has a %% that begins no escape", k.Path)
	}
	if strings.ContainsFunc(k.Host, notPrintable) || strings.ContainsAny(k.Host, "/@") {
		v.errorf(p.key("host"), "write a name such as www.example.com", "%q is not a host", k.Host)
	}
	if !token(k.Method) {
		v.errorf(p.key("method"), "write GET, HEAD, POST or OPTIONS", "%q is not a method", k.Method)
	}
	if k.Method == "HEAD" && k.Body != "" {
		v.errorf(p.key("body"), "write method: GET", "the answer to HEAD has no body")
	}
	for name, value := range k.Headers {
		if !token(name) || strings.ContainsAny(value, "\r\n\x00") {
			v.errorf(p.key("headers").key(name), "write a name of letters, digits and -, and a value of one line", "%q is not a header", name)
		}
	}
	for i, s := range k.Status {
		if _, err := ParseStatus(s); err != nil {
			v.errorf(p.key("status").index(i), "write 200, or 200-399", "%v", err)
		}
	}
}

func notPrintable(r rune) bool { return r <= ' ' || r == 0x7f }

func printableOrSpace(r rune) rune {
	if notPrintable(r) {
		return -1
	}
	return r
}

// token reports whether s is a token of RFC 9110 §5.6.2.
func token(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}

// StatusRange is a range of HTTP statuses, inclusive.
type StatusRange struct{ First, Last int }

// Contains reports whether status is in the range.
func (r StatusRange) Contains(status int) bool { return r.First <= status && status <= r.Last }

// ParseStatus reads "200" or "200-399".
func ParseStatus(s string) (StatusRange, error) {
	lo, hi, ranged := strings.Cut(s, "-")
	if !ranged {
		hi = lo
	}
	first, err1 := strconv.Atoi(strings.TrimSpace(lo))
	last, err2 := strconv.Atoi(strings.TrimSpace(hi))
	switch {
	case err1 != nil || err2 != nil || first < 100 || last > 599:
		return StatusRange{}, fmt.Errorf("status %q: not a number from 100 to 599, nor a range of them", s)
	case last < first:
		return StatusRange{}, fmt.Errorf("status range %s is reversed", s)
	}
	return StatusRange{first, last}, nil
}
