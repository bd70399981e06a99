// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// result is the result of nftlb's parser. It determines the reply and its HTTP status.
type result int

// Results. nftlb numbers them, and returns the number of a key for a misplaced list.
const (
	ok        result = 0
	failed    result = 1
	structure result = 3 // The document has the wrong form.
	invalid   result = 4 // A value is out of its range.
	unknown   result = 6 // There is no such object.
	// wrong represents all other numbers.
	wrong result = -1
)

// status returns the HTTP status of a result.
func (r result) status() int {
	switch r {
	case ok:
		return 200
	case structure, invalid:
		return 400
	case unknown:
		return 404
	}
	return 500
}

// keys are the names of the API, ordered by their numbers in messages.
var keys = []string{
	"farms", "name", "newname", "fqdn", "iface", "oface", "family", "ether-addr", "iether-addr", "oether-addr",
	"virtual-addr", "virtual-ports", "ip-addr", "source-addr", "port", "ports", "mode", "protocol", "scheduler", "sched-param",
	"persistence", "persist-ttl", "helper", "log", "mark", "state", "backends", "weight", "priority", "action",
	"limits-ttl", "new-rtlimit", "new-rtlimit-burst", "rst-rtlimit", "rst-rtlimit-burst", "est-connlimit", "tcp-strict", "queue", "policies", "elements",
	"type", "timeout", "data", "time", "log-prefix", "new-rtlimit-log-prefix", "rst-rtlimit-log-prefix", "est-connlimit-log-prefix", "tcp-strict-log-prefix", "responsettl",
	"flow-offload", "sessions", "client", "backend", "used", "intra-connect", "addresses", "route", "verdict", "log-rtlimit",
	"counter-packets", "counter-bytes",
}

// choice is a value of a fixed list. Other values become the default, with a note in the reply.
type choice struct {
	values   []string
	fallback string
}

var choices = map[string]choice{
	"family":    {[]string{"ipv4", "ipv6", "inet"}, "ipv4"},
	"mode":      {[]string{"snat", "dnat", "dsr", "stlsdnat", "local"}, "snat"},
	"protocol":  {[]string{"tcp", "udp", "sctp", "all"}, "tcp"},
	"scheduler": {[]string{"rr", "weight", "hash", "symhash"}, "rr"},
	"helper":    {[]string{"none", "ftp", "pptp", "sip", "snmp", "tftp"}, "none"},
	"state":     {[]string{"up", "down", "off", "config_error"}, "up"},
	"type":      {[]string{"blacklist", "whitelist"}, "blacklist"},
	"route":     {[]string{"in", "out"}, "in"},
}

// flags is a value of words that may be anywhere in the text. They are printed with a blank after each, except after
// the last word if last is set.
type flags struct {
	words []string
	last  bool
	named bool // the note in the reply names the key
}

var flagKeys = map[string]flags{
	"sched-param": {words: []string{"srcip", "dstip", "srcport", "dstport", "srcmac", "dstmac"}},
	"persistence": {words: []string{"srcip", "dstip", "srcport", "dstport", "srcmac", "dstmac"}},
	"log":         {[]string{"input", "forward", "output"}, true, true},
	"verdict":     {[]string{"log", "drop", "accept"}, true, true},
}

func (f flags) print(has func(word string) bool) string {
	var b strings.Builder
	for i, w := range f.words {
		if has(w) {
			b.WriteString(w)
			if !f.last || i < len(f.words)-1 {
				b.WriteByte(' ')
			}
		}
	}
	if b.Len() == 0 {
		return "none"
	}
	return b.String()
}

// units of rates.
var units = []string{"second", "minute", "hour", "day", "week"}

// parse returns the printed form of a value, and a note for the reply.
func parse(key, text string) (value, note string, r result) {
	if c, is := choices[key]; is {
		if slices.Contains(c.values, text) {
			return text, "", ok
		}
		return c.fallback, fmt.Sprintf(". Parsing unknown value '%s' in '%s', using default '%s'", text, key, c.fallback), ok
	}
	if f, is := flagKeys[key]; is {
		return f.parse(key, text)
	}
	switch key {
	case "weight", "priority":
		return number(key, text, 1)
	case "responsettl", "persist-ttl", "limits-ttl", "new-rtlimit-burst", "rst-rtlimit-burst", "est-connlimit", "timeout":
		return number(key, text, 0)
	case "queue":
		return number(key, text, -1)
	case "new-rtlimit", "rst-rtlimit", "log-rtlimit":
		return rate(key, text)
	case "mark":
		return "0x" + strconv.FormatUint(uint64(uint32(leadingNumber(text, 16))), 16), "", ok
	case "tcp-strict", "flow-offload", "intra-connect":
		if text == "on" {
			return "on", "", ok
		}
		return "off", "", ok
	case "name", "newname", "ip-addr", "client", "backend", "data":
		if text == "" {
			return "", fmt.Sprintf(". Key '%s' cannot be empty", key), invalid
		}
		return text, "", ok
	case "action", "iface", "oface", "ether-addr", "virtual-addr", "virtual-ports", "ports", "source-addr", "port", "log-prefix",
		"new-rtlimit-log-prefix", "rst-rtlimit-log-prefix", "est-connlimit-log-prefix", "tcp-strict-log-prefix",
		"used", "counter-packets", "counter-bytes":
		return text, "", ok
	}
	return "", nonTextNote(key), unknown
}

// nonTextNote returns the note about a key with a value that is not text.
func nonTextNote(key string) string {
	return fmt.Sprintf(". Unknown parsed key with index '%d'", slices.Index(keys, key))
}

func (f flags) parse(key, text string) (value, note string, r result) {
	if key != "verdict" && strings.Contains(text, "none") {
		return "none", "", ok
	}
	value = f.print(func(w string) bool { return strings.Contains(text, w) })
	if value == "none" {
		note = fmt.Sprintf(". Parsing unknown value '%s'", text)
		if f.named {
			note += fmt.Sprintf(" in '%s'", key)
		}
		if key != "verdict" {
			note += ", using default 'none'"
		}
	}
	return value, note, ok
}

func number(key, text string, least int) (value, note string, r result) {
	n := int32(leadingNumber(text, 10))
	if int(n) < least {
		return "", fmt.Sprintf(". Invalid value of key '%s' must be >=%d", key, least), invalid
	}
	return strconv.Itoa(int(n)), "", ok
}

// rate parses NUMBER[/UNIT].
func rate(key, text string) (value, note string, r result) {
	if text == "" || text[0] == '0' {
		return "0/second", "", ok
	}
	digits := prefix(text, 10)
	if digits == "" || strings.HasPrefix(strings.TrimSpace(digits), "-") {
		return "", fmt.Sprintf(". Invalid value of key '%s' must be >=0", key), invalid
	}
	n := int32(leadingNumber(text, 10))
	unit := ""
	if rest := text[len(digits):]; strings.HasPrefix(rest, "/") {
		unit = strings.TrimLeft(rest, "/")
		if end := strings.IndexFunc(unit, func(c rune) bool { return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') }); end >= 0 {
			unit = unit[:end]
		}
	}
	if unit == "" {
		unit = units[0]
	}
	if !slices.Contains(units, unit) {
		return "", fmt.Sprintf(". Parsing unknown value '%s' in '%s'", text, key), invalid
	}
	return fmt.Sprintf("%d/%s", n, unit), "", ok
}

// prefix returns the leading number of a text, as parsed by the C library.
func prefix(text string, base int) string {
	i := 0
	for i < len(text) && strings.IndexByte(" \t\n\v\f\r", text[i]) >= 0 {
		i++
	}
	if i < len(text) && (text[i] == '-' || text[i] == '+') {
		i++
	}
	if base == 16 && len(text) > i+2 && text[i] == '0' && (text[i+1] == 'x' || text[i+1] == 'X') {
		i += 2
	}
	start := i
	for i < len(text) {
		c := text[i]
		if !(c >= '0' && c <= '9' || base == 16 && (c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F')) {
			break
		}
		i++
	}
	if i == start {
		return ""
	}
	return text[:i]
}

// leadingNumber returns the leading number of a text, 0 for none.
func leadingNumber(text string, base int) int64 {
	digits := strings.TrimPrefix(strings.TrimSpace(prefix(text, base)), "+")
	if base == 16 {
		digits = strings.NewReplacer("0x", "", "0X", "").Replace(digits)
	}
	n, _ := strconv.ParseInt(digits, base, 64) // for a number out of range, the nearest one
	return n
}

// integer returns a value parsed as a number.
func integer(value string) int { return int(leadingNumber(value, 10)) }
