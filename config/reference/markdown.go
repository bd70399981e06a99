// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"reflect"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

const intro = `# Configuration

<!-- Generated from the types of package config by "go generate ./docs"; edit those. -->

A configuration is one YAML file (or JSON, which is YAML too). ` + "`sluice check FILE`" + ` reads it and reports everything
that is wrong with it at once, with line, column and what to write instead. ` + "`sluice config schema`" + ` prints its JSON
Schema, by which editors complete and check keys; name it in the first line:

` + "```yaml" + `
# yaml-language-server: $schema=sluice.schema.json
` + "```" + `

Unknown keys are errors. Anchors and aliases are taken for whole values; merge keys and tags are not. Complete files
are in [examples](../../examples).

`

const values = `## Values

| written as | example |
|---|---|
| address | ` + "`192.0.2.10`, `2001:db8::10`" + ` |
| prefix | ` + "`10.0.0.0/8`, `2001:db8::/32`" + `, or one address |
| address range | ` + "`10.0.2.100-10.0.2.103`, `203.0.113.0/28`" + `, or one address |
| ports | ` + "`80`, `8000-8099`" + ` |
| duration | ` + "`500ms`, `5m`, `2h4m`" + ` |
| rate | ` + "`1000/s`, `6/minute`, `100/h`, `10/day`" + ` |
| protocol | ` + "`tcp`, `udp`, `sctp`, `icmp`, `icmpv6`, `gre`, `udplite`, `any`" + `, or a number |
| match | ` + "`@banned`" + ` (a set), a prefix or an address |
| endpoint | ` + "`{address: 10.1.10.2, port: 80}`" + ` |

`

// markdown renders the reference page: a section for each mapping, in order of first use.
func markdown(c docComments) []byte {
	var b bytes.Buffer
	b.WriteString(intro)
	p := page{w: &b, comments: c, done: map[reflect.Type]string{}}
	p.section(reflect.TypeFor[config.Config](), "The file", "")
	for len(p.next) > 0 {
		s := p.next[0]
		p.next = p.next[1:]
		p.section(s.t, "`"+s.path+"`", s.path)
	}
	b.WriteString(values)
	return b.Bytes()
}

type page struct {
	w        *bytes.Buffer
	comments docComments
	done     map[reflect.Type]string // path of the section
	next     []struct {
		t    reflect.Type
		path string
	}
}

func (p *page) section(t reflect.Type, title, path string) {
	fmt.Fprintf(p.w, "## %s\n\n%s\n\n| key | type | default | meaning |\n|---|---|---|---|\n", title, p.comments.commentOf(t, ""))
	for i := range t.NumField() {
		f := t.Field(i)
		key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if key == "" {
			continue
		}
		tag := f.Tag.Get("jsonschema")
		fmt.Fprintf(p.w, "| `%s` | %s | %s | %s |\n", key, escapeCell(p.kind(f, strings.TrimPrefix(path+"."+key, "."))), escapeCell(fallback(tag)), escapeCell(p.comments.commentOf(t, f.Name)))
	}
	p.w.WriteString("\n")
}

// kind describes a field's type and queues mappings for a section of their own.
func (p *page) kind(f reflect.StructField, path string) string {
	if words := enum(f.Tag.Get("jsonschema")); len(words) > 0 {
		return strings.Join(words, ", ")
	}
	return p.typeName(f.Type, path)
}

func (p *page) typeName(t reflect.Type, path string) string {
	if name := names[t]; name != "" {
		return name
	}
	switch t.Kind() {
	case reflect.Pointer:
		return p.typeName(t.Elem(), path)
	case reflect.Slice:
		return "list of " + p.typeName(t.Elem(), path+"[]")
	case reflect.Map:
		return "names, each with a " + p.typeName(t.Elem(), path+".*")
	case reflect.Struct:
		if at := p.done[t]; at != "" {
			return "mapping as `" + at + "`"
		}
		p.done[t] = path
		p.next = append(p.next, struct {
			t    reflect.Type
			path string
		}{t, path})
		return "mapping"
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true, false"
	case reflect.Float64:
		return "number"
	}
	return "whole number"
}

var names = map[reflect.Type]string{
	reflect.TypeFor[netip.Addr]():            "address",
	reflect.TypeFor[netip.Prefix]():          "prefix",
	reflect.TypeFor[config.AddressRange]():   "address range",
	reflect.TypeFor[config.Duration]():       "duration",
	reflect.TypeFor[config.Rate]():           "rate",
	reflect.TypeFor[config.TrafficClass]():   "copy, or a number",
	reflect.TypeFor[config.MAC]():            "MAC address",
	reflect.TypeFor[config.Match]():          "match",
	reflect.TypeFor[config.Interfaces]():     "interface, or list of them",
	reflect.TypeFor[config.PortSet]():        "ports, or list of them",
	reflect.TypeFor[config.Helpers]():        "ftp, tftp, sip, pptp, snmp, amanda, irc, or list of them",
	reflect.TypeFor[config.Target]():         "list of address ranges, or endpoint",
	reflect.TypeFor[flow.Protocol]():         "protocol",
	reflect.TypeFor[flow.Ports]():            "ports",
	reflect.TypeFor[uint16]():                "port",
	reflect.TypeFor[config.PersistenceKey](): "source-address, source-port, source-mac, destination-address, destination-port, destination-mac",
}

func enum(tag string) (words []string) {
	for part := range strings.SplitSeq(tag, ",") {
		if w, ok := strings.CutPrefix(part, "enum="); ok {
			words = append(words, w)
		}
	}
	return words
}

// fallback returns the default of a key, or "required".
func fallback(tag string) string {
	for part := range strings.SplitSeq(tag, ",") {
		if part == "required" {
			return "required"
		}
		if v, ok := strings.CutPrefix(part, "default="); ok {
			return "`" + v + "`"
		}
	}
	return ""
}

func escapeCell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
