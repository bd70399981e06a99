// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"

	yamlv3 "go.yaml.in/yaml/v3"
)

var note = flag.Bool("note", false, "note in testdata/promises.txt what the API promises beyond it")

// contract lists the parts of the API that clients rely on, one per line: operations, parameters, fields, values
// of enumerations, and required parts of requests.
func contract(t *testing.T) []string {
	t.Helper()
	text, err := OpenAPI("v1")
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := yamlv3.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	c := &promises{lines: map[string]bool{}, schemas: at(doc, "components", "schemas"), asked: map[string]bool{}}
	for path, item := range at(doc, "paths") {
		for method, o := range item.(map[string]any) {
			c.operation(strings.ToUpper(method)+" "+path, o.(map[string]any))
		}
	}
	for name, schema := range c.schemas {
		c.schema("schema "+name, schema.(map[string]any), c.asked[name])
	}
	return slices.Sorted(maps.Keys(c.lines))
}

// at follows keys into a document. A missing key yields an empty map.
func at(v any, keys ...string) map[string]any {
	m, _ := v.(map[string]any)
	for _, k := range keys {
		m, _ = m[k].(map[string]any)
	}
	return m
}

type promises struct {
	lines   map[string]bool
	schemas map[string]any
	asked   map[string]bool // schemas used in requests
}

func (c *promises) add(format string, args ...any) { c.lines[fmt.Sprintf(format, args...)] = true }

func (c *promises) operation(name string, o map[string]any) {
	c.add("%s", name)
	list, _ := o["parameters"].([]any)
	for _, p := range list {
		p := p.(map[string]any)
		what := fmt.Sprintf("%s: %s %s", name, p["in"], p["name"])
		c.add("%s", what)
		if p["required"] == true {
			c.add("must %s", what)
		}
		c.schema(what, at(p, "schema"), true)
	}
	for media, m := range at(o, "requestBody", "content") {
		c.add("%s: takes %s", name, media)
		c.ask(at(m, "schema"))
		c.schema(name+": body", at(m, "schema"), true)
	}
	for status, r := range at(o, "responses") {
		c.add("%s: answers %s", name, status)
		for media, m := range at(r, "content") {
			c.add("%s: answers %s %s", name, status, media)
			c.schema(name+": answer "+status, at(m, "schema"), false)
		}
	}
}

// ask marks the schemas that a request refers to.
func (c *promises) ask(v any) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			c.ask(e)
		}
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			name := ref[strings.LastIndex(ref, "/")+1:]
			if !c.asked[name] {
				c.asked[name] = true
				c.ask(c.schemas[name])
			}
		}
		for _, e := range v {
			c.ask(e)
		}
	}
}

func (c *promises) schema(name string, s map[string]any, asked bool) {
	if ref, ok := s["$ref"].(string); ok {
		c.add("%s is %s", name, ref[strings.LastIndex(ref, "/")+1:])
	}
	if kind, ok := s["type"]; ok {
		c.add("%s is %v", name, kind)
	}
	enum, _ := s["enum"].([]any)
	for _, v := range enum {
		c.add("%s may be %v", name, v)
	}
	if required, ok := s["required"].([]any); ok && asked {
		for _, k := range required {
			c.add("must %s.%s", name, k)
		}
	}
	for k, p := range at(s, "properties") {
		c.schema(name+"."+k, p.(map[string]any), asked)
	}
	if items := at(s, "items"); items != nil {
		c.schema(name+"[]", items, asked)
	}
	for _, word := range []string{"anyOf", "oneOf", "allOf"} {
		list, _ := s[word].([]any)
		for _, e := range list {
			c.schema(name, e.(map[string]any), asked)
		}
	}
}

// TestTheAPIKeepsItsPromises: a removed operation, field or value breaks clients, and so does a new required
// field of a request. 'go test -run Promises -note ./server' records additions. Lines are removed by hand, with
// a new version of the API.
func TestTheAPIKeepsItsPromises(t *testing.T) {
	const file = "testdata/promises.txt"
	text, err := os.ReadFile(file)
	if err != nil && !*note {
		t.Fatal(err)
	}
	promised := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		promised[strings.TrimSuffix(line, "\n")] = true
	}
	now := contract(t)
	for line := range promised {
		if _, found := slices.BinarySearch(now, line); !found && !strings.HasPrefix(line, "must ") {
			t.Errorf("promised, and gone: %s", line)
		}
	}
	var added []string
	for _, line := range now {
		what, must := strings.CutPrefix(line, "must ")
		switch {
		case promised[line]:
		case must && promised[parent(what)]:
			t.Errorf("requests of before lack: %s", what)
		default:
			added = append(added, line)
		}
	}
	switch {
	case len(added) == 0:
	case *note && !t.Failed():
		all := slices.Sorted(maps.Keys(promised))
		all = slices.Compact(slices.Sorted(slices.Values(append(all, added...))))
		if err := os.WriteFile(file, []byte(strings.Join(all, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	case !*note:
		t.Errorf("not noted yet (go test -run Promises -note ./server): %d lines, the first is %s", len(added), added[0])
	}
}

// parent is the line of the object with the parameter or field.
func parent(what string) string {
	if operation, _, ok := strings.Cut(what, ": "); ok {
		return operation
	}
	name := what[:strings.LastIndex(what, ".")]
	return name + " is object"
}

// operation is an operation of the document, with the examples of its parameters and body.
type operation struct {
	id, method, path, media, body string
	query                         url.Values
	used                          []string // keys of examples
}

// operations returns all operations of the document. forOperations creates the objects in their paths.
func operations(t *testing.T) (list []operation) {
	t.Helper()
	text, err := OpenAPI("v1")
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := yamlv3.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	objects := strings.NewReplacer("{service}", "web", "{backend}", "a", "{rule}", "out", "{set}", "banned", "{element}", "192.0.2.99")
	for path, item := range at(doc, "paths") {
		for method, o := range item.(map[string]any) {
			op := operation{id: at(o)["operationId"].(string), method: strings.ToUpper(method), path: objects.Replace(path), query: url.Values{}}
			parameters, _ := at(o)["parameters"].([]any)
			for _, p := range parameters {
				if example, ok := at(p)["example"]; ok {
					name := at(p)["name"].(string)
					op.query.Set(name, example.(string))
					op.used = append(op.used, op.id+" "+name)
				}
			}
			for media, content := range at(o, "requestBody", "content") {
				if op.media == "" || media == "application/json" {
					op.media = media
				}
				if example, ok := at(content)["example"]; ok && op.media == media {
					op.used = append(op.used, op.id)
					if op.body, ok = example.(string); !ok {
						raw, err := json.Marshal(example)
						if err != nil {
							t.Fatal(err)
						}
						op.body = string(raw)
					}
				}
			}
			list = append(list, op)
		}
	}
	return list
}

// forOperations starts a daemon with the objects that the paths of operations name.
func forOperations(t *testing.T) *httptest.Server {
	t.Helper()
	s, _ := start(t)
	if code, text := call(t, s, "PUT", "/api/v1/config", web+"firewall:\n  sets: {banned: [192.0.2.99]}\n", yaml...); code != 200 {
		t.Fatal(code, text)
	}
	return s
}

// TestExamplesOfTheDocument sends every example to a daemon of its own.
func TestExamplesOfTheDocument(t *testing.T) {
	used := map[string]bool{}
	for _, op := range operations(t) {
		for _, name := range op.used {
			used[name] = true
		}
		if op.body == "" && len(op.query) == 0 {
			continue
		}
		t.Run(op.id, func(t *testing.T) {
			code, text := call(t, forOperations(t), op.method, op.path+"?"+op.query.Encode(), op.body, "Content-Type", op.media)
			// The daemon of this test has no previous revision, and its datapath explains nothing.
			if code >= 300 && !(code == 404 && (op.id == "revert" || op.id == "explain")) {
				t.Errorf("%s %s: %d %s", op.method, op.path, code, text)
			}
		})
	}
	for name := range examples {
		if !used[name] {
			t.Errorf("%s: an example of no operation", name)
		}
	}
}

// TestNoOperationIgnoresIfMatch: every changing operation refuses the tag of another state.
func TestNoOperationIgnoresIfMatch(t *testing.T) {
	for _, op := range operations(t) {
		if op.method == "GET" {
			continue
		}
		t.Run(op.id, func(t *testing.T) {
			code, text := call(t, forOperations(t), op.method, op.path, op.body, "Content-Type", op.media, "If-Match", `"0123456789abcdef"`)
			if code != 412 {
				t.Errorf("%s %s: %d %s", op.method, op.path, code, text)
			}
		})
	}
}

// TestIfMatchOfStatesAndChanges: the tags that the document names are accepted.
func TestIfMatchOfStatesAndChanges(t *testing.T) {
	s := forOperations(t)
	tagOf := func(path string) string {
		resp, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.Header.Get("ETag")
	}
	for _, c := range []struct{ method, path, body, tagged string }{
		{"PUT", "/api/v1/services/web/backends/a/state", `{"state":"drain"}`, "/api/v1/config/services/web/backends/a"},
		{"POST", "/api/v1/changes", `[{"op":"patch","path":"services/web/backends/a","value":{"weight":3}}]`, "/api/v1/config"},
	} {
		for _, match := range []string{"%s", "*", `"other", %s`} {
			match = strings.ReplaceAll(match, "%s", tagOf(c.tagged))
			if code, text := call(t, s, c.method, c.path, c.body, "Content-Type", "application/json", "If-Match", match); code >= 300 {
				t.Errorf("%s, If-Match: %s: %d %s", c.path, match, code, text)
			}
		}
	}
	if code, _ := call(t, s, "PUT", "/api/v1/services/web/backends/nobody/state", `{"state":"drain"}`, "Content-Type", "application/json", "If-Match", "*"); code != 412 {
		t.Errorf("a backend that does not exist: %d", code)
	}
}
