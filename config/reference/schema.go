// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// schema renders the JSON Schema (draft 2020-12) of a configuration.
func schema(c docComments) ([]byte, error) {
	r := jsonschema.Reflector{
		FieldNameTag:               "yaml",
		RequiredFromJSONSchemaTags: true,
		ExpandedStruct:             true,
		Anonymous:                  true,
		LookupComment:              c.commentOf,
		Mapper:                     textSchema,
	}
	s := r.Reflect(&config.Config{})
	s.Title = "Sluice configuration"
	if status, ok := s.Definitions["Check"].Properties.Get("status"); ok { // an HTTP status such as 200 needs no quotes
		status.Items = &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "100", Maximum: "599"},
			{Type: "string", Pattern: "^[1-5][0-9]{2}( *- *[1-5][0-9]{2})?$", Examples: []any{"200-399"}},
		}}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

const portPattern = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`

// textSchema maps types with the form of a scalar, or with one of two forms.
func textSchema(t reflect.Type) *jsonschema.Schema {
	text := func(pattern, example string) *jsonschema.Schema {
		return &jsonschema.Schema{Type: "string", Pattern: pattern, Examples: []any{example}}
	}
	switch t {
	case reflect.TypeFor[netip.Addr]():
		return &jsonschema.Schema{Type: "string", AnyOf: []*jsonschema.Schema{{Format: "ipv4"}, {Format: "ipv6"}}}
	case reflect.TypeFor[netip.Prefix]():
		return text(`^[0-9a-fA-F:.]+(/[0-9]{1,3})?$`, "10.0.0.0/8")
	case reflect.TypeFor[config.AddressRange]():
		return text(`^[0-9a-fA-F:.]+ *(/[0-9]{1,3}|- *[0-9a-fA-F:.]+)?$`, "10.0.2.100-10.0.2.103")
	case reflect.TypeFor[config.Duration]():
		return text(`^([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$`, "5m")
	case reflect.TypeFor[config.Rate]():
		return text(`^ *[0-9]+ */ *(s|sec|second|m|min|minute|h|hour|d|day) *$`, "1000/s")
	case reflect.TypeFor[config.TrafficClass]():
		return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "0", Maximum: "255"},
			{Type: "string", Pattern: `^(copy|[0-9]+|0x[0-9a-fA-F]+)$`, Examples: []any{"copy"}},
		}}
	case reflect.TypeFor[config.MAC]():
		return text(`^([0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}$|^([0-9a-fA-F]{4}\.){2}[0-9a-fA-F]{4}$`, "02:00:00:00:00:01")
	case reflect.TypeFor[config.Match]():
		return text(`^(@.+|[0-9a-fA-F:.]+(/[0-9]{1,3})?)$`, "@banned")
	case reflect.TypeFor[flow.Protocol]():
		return &jsonschema.Schema{Examples: []any{"tcp"}, AnyOf: []*jsonschema.Schema{
			{Type: "string", Enum: []any{"any", "tcp", "udp", "sctp", "icmp", "icmpv6", "gre", "udplite"}},
			{Type: "integer", Minimum: "0", Maximum: "255"},
		}}
	case reflect.TypeFor[flow.Ports]():
		return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: "1", Maximum: "65535"},
			{Type: "string", Pattern: "^" + portPattern + "( *- *" + portPattern + ")?$", Examples: []any{"8000-8099"}},
		}}
	case reflect.TypeFor[config.PersistenceKey]():
		words := &jsonschema.Schema{Type: "string"}
		for k := range strings.SplitSeq(names[t], ", ") {
			words.Enum = append(words.Enum, k)
		}
		return words
	case reflect.TypeFor[uint16]():
		return &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "65535"}
	case reflect.TypeFor[uint32]():
		return &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "4294967295"}
	case reflect.TypeFor[config.Interfaces]():
		word := &jsonschema.Schema{Type: "string", Pattern: `^[^/: \t\n*,]{1,15}\*?$`, Examples: []any{"wan0", "ppp*"}}
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{word, {Type: "array", Items: word}}}
	case reflect.TypeFor[config.PortSet]():
		ports := textSchema(reflect.TypeFor[flow.Ports]())
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{{AnyOf: ports.AnyOf}, {Type: "array", Items: ports}}}
	case reflect.TypeFor[config.Helpers]():
		word := &jsonschema.Schema{Type: "string", Enum: []any{"ftp", "tftp", "sip", "pptp", "snmp", "amanda", "irc"}}
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{word, {Type: "array", Items: word}}}
	case reflect.TypeFor[config.Target]():
		endpoint := jsonschema.NewProperties()
		endpoint.Set("address", textSchema(reflect.TypeFor[netip.Addr]()))
		endpoint.Set("port", textSchema(reflect.TypeFor[uint16]()))
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{
			{Type: "array", Items: textSchema(reflect.TypeFor[config.AddressRange]())},
			{Type: "object", Properties: endpoint, AdditionalProperties: jsonschema.FalseSchema, Required: []string{"address"}},
		}}
	}
	return nil
}
