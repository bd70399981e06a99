// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/docs"
)

// Parts of the OpenAPI document that the handlers do not define.

// schemaOf returns the schema name of a configuration object in the document.
func schemaOf(object string) string { return "Config" + object }

func refTo(object string) *huma.Schema {
	return &huma.Schema{Ref: "#/components/schemas/" + schemaOf(object)}
}

// addConfigSchemas copies the object schemas from the JSON Schema of the file.
func addConfigSchemas(to huma.Registry) {
	var file, objects map[string]json.RawMessage
	err := json.Unmarshal(docs.Schema, &file)
	if err == nil {
		err = json.Unmarshal(file["$defs"], &objects)
	}
	if err != nil {
		panic("server: schema of the configuration: " + err.Error()) // the schema is embedded in the program
	}
	for name, raw := range objects {
		text := strings.ReplaceAll(string(raw), `"#/$defs/`, `"#/components/schemas/`+schemaOf(""))
		var parts map[string]any
		if err := json.Unmarshal([]byte(text), &parts); err != nil {
			panic("server: schema of the configuration: " + err.Error())
		}
		to.Map()[schemaOf(name)] = &huma.Schema{Extensions: parts}
	}
}

// addCommonParts adds the parts common to many operations: problems, and limits of bodies that a schema
// can express and a Go type cannot.
func addCommonParts(doc *huma.OpenAPI) {
	schemas := doc.Components.Schemas.Map()
	one, most := 1, 1.0
	if revert := schemas["Revert"]; revert != nil {
		revert.MinProperties, revert.MaxProperties = &one, &one
		revert.Properties["revision"].Minimum = &most
		revert.Properties["all"].Enum = []any{true}
		revert.PrecomputeMessages()
	}
	problem := &huma.Response{Description: "A problem (RFC 9457): 412 where If-Match names another state, 422 where a value is not one that this can be, " +
		"also where each key is valid by itself and they do not go together", Content: map[string]*huma.MediaType{
		"application/problem+json": {Schema: &huma.Schema{Ref: "#/components/schemas/ErrorModel"}},
	}}
	for _, item := range doc.Paths {
		for _, o := range []*huma.Operation{item.Get, item.Put, item.Post, item.Patch, item.Delete} {
			if o == nil {
				continue
			}
			o.Responses["default"] = problem
			for _, p := range o.Parameters {
				if example, ok := examples[o.OperationID+" "+p.Name]; ok {
					p.Example = example
				}
			}
			if o.OperationID == "apply" || o.OperationID == "plan" {
				o.RequestBody.Content["application/yaml"].Schema = &huma.Schema{Type: "string", MinLength: &one, Description: "a configuration file"}
			}
			if o.RequestBody != nil {
				for _, media := range o.RequestBody.Content {
					if example, ok := examples[o.OperationID]; ok {
						media.Example = example
					}
				}
			}
		}
	}
}

// examples has example bodies by operation, and parameters by operation and name. A test sends each
// example.
var examples = map[string]any{
	"add-service": map[string]any{
		"name": "dns", "listen": []any{map[string]any{"address": "192.0.2.10", "ports": []any{53}}}, "protocol": "udp", "mode": "dnat",
		"backends": []any{map[string]any{"name": "a", "address": "10.0.2.2"}},
	},
	"put-service": map[string]any{
		"listen": []any{map[string]any{"address": "192.0.2.10", "ports": []any{80}}}, "protocol": "tcp", "mode": "dnat",
		"backends": []any{map[string]any{"name": "a", "address": "10.0.2.2", "port": 8080}},
	},
	"patch-service":         map[string]any{"scheduler": "wrr"},
	"add-backend":           map[string]any{"name": "c", "address": "10.0.2.4", "port": 8080},
	"put-backend":           map[string]any{"address": "10.0.2.2", "port": 8080, "weight": 3},
	"patch-backend":         map[string]any{"weight": 3},
	"set-backend":           map[string]any{"state": "drain"},
	"set-node":              map[string]any{"state": "auto"},
	"add-nat-rule":          map[string]any{"name": "guests", "type": "masquerade", "source": []any{"10.0.3.0/24"}, "out": "wan0"},
	"put-nat-rule":          map[string]any{"type": "masquerade", "source": []any{"10.0.2.0/24"}, "out": "wan0"},
	"patch-nat-rule":        map[string]any{"filtering": "address-dependent"},
	"put-set":               []any{"198.51.100.0/24"},
	"add-elements":          []any{"203.0.113.7"},
	"change":                []any{map[string]any{"op": "patch", "path": "services/web/backends/a", "value": map[string]any{"weight": 3}}, map[string]any{"op": "remove", "path": "services/web/backends/b"}},
	"revert":                map[string]any{"all": true},
	"stop":                  map[string]any{"keep": true},
	"apply":                 "services: []\n",
	"plan":                  "services: []\n",
	"explain protocol":      "tcp",
	"explain source":        "203.0.113.7:40000",
	"explain destination":   "192.0.2.10:80",
	"list-flows protocol":   "tcp",
	"list-flows client":     "203.0.113.0/24",
	"stream-flows protocol": "tcp",
}
