// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding"
	"encoding/json"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/sluice-lb/sluice/accelerate"
	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/bench"
	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/casestudy"
	"github.com/sluice-lb/sluice/doctor/tune"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/demo"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/top"
	"github.com/sluice-lb/sluice/trace"
)

var jsonKey = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

// TestKeysOfOutput walks the types of all values that --json prints and the API sends. All keys must be
// written_like_this.
func TestKeysOfOutput(t *testing.T) {
	// Stored results keep their keys, and a configuration has the keys of its file.
	seen := map[reflect.Type]bool{reflect.TypeFor[bench.Metric](): true, reflect.TypeFor[config.Config](): true}
	var walk func(r reflect.Type)
	walk = func(r reflect.Type) {
		for r.Kind() == reflect.Pointer || r.Kind() == reflect.Slice || r.Kind() == reflect.Array || r.Kind() == reflect.Map {
			r = r.Elem()
		}
		writes := func(of reflect.Type) bool { // its own form
			return reflect.PointerTo(r).Implements(of)
		}
		if r.Kind() != reflect.Struct || seen[r] || writes(reflect.TypeFor[json.Marshaler]()) || writes(reflect.TypeFor[encoding.TextMarshaler]()) {
			return
		}
		seen[r] = true
		for f := range r.Fields() {
			tag, tagged := f.Tag.Lookup("json")
			name, _, _ := strings.Cut(tag, ",")
			if name == "-" || !f.IsExported() && !f.Anonymous {
				continue
			}
			if embedded := f.Anonymous && !tagged; !embedded && !jsonKey.MatchString(name) {
				t.Errorf("%s.%s is %q in JSON", r, f.Name, name)
			}
			walk(f.Type)
		}
	}
	for _, v := range []any{
		api.Status{}, api.Service{}, api.NATRule{}, api.Mapping{}, api.Interface{}, api.Flows{}, api.FlowLine{}, api.Outcome{}, api.Stop{}, api.BackendState{},
		api.Problem{}, datapath.Explanation{}, bench.Result{}, casestudy.Report{}, demo.Report{}, load.HTTPResult{}, top.Picture{}, trace.DropReport{}, trace.Profile{},
		accelerate.Status{}, accelerate.Plan{}, doctor.Report{}, doctor.Check{}, tune.Proposal{}, tune.Result{}, tunedEntry{}, capacity.Carry{},
		packetsReport{}, flowsReport{}, conntrack.Report{}, conntrack.Listed{}, event.Event{}, audit.Entry{}, api.GatewayDrain{}, api.NodeState{}, drainResult{}, planReport{}, lab.View{}, checkResult{}, importResult{},
	} {
		walk(reflect.TypeOf(v))
	}
	document, err := server.OpenAPI("")
	if err != nil {
		t.Fatal(err)
	}
	var openapi struct {
		Components struct {
			Schemas map[string]struct{ Properties map[string]any }
		}
	}
	if err := yaml.Unmarshal(document, &openapi); err != nil {
		t.Fatal(err)
	}
	for schema, s := range openapi.Components.Schemas {
		if strings.HasPrefix(schema, "Config") {
			continue // objects of the configuration, in the keys of its file
		}
		for name := range s.Properties {
			if !jsonKey.MatchString(name) && name != "$schema" {
				t.Errorf("OpenAPI: %s has %q", schema, name)
			}
		}
	}
	if len(openapi.Components.Schemas) == 0 {
		t.Error("no schemas")
	}
}
