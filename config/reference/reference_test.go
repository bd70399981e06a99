// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/sluice-lb/sluice/config"
)

// TestCurrent: the shipped files are what the types say.
func TestCurrent(t *testing.T) {
	files, err := generatedFiles()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join("../../docs/reference", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("docs/%s is not current, run go generate ./docs:\n%s", name, cmp.Diff(string(got), string(want)))
		}
	}
}

// TestEveryKeyIsExplained: each key has a sentence of its own.
func TestEveryKeyIsExplained(t *testing.T) {
	c, err := readComments(sourceDir())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(typ reflect.Type) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct || seen[typ] || names[typ] != "" {
			return
		}
		seen[typ] = true
		for i := range typ.NumField() {
			f := typ.Field(i)
			if !f.IsExported() {
				continue
			}
			if c.commentOf(typ, f.Name) == "" {
				t.Errorf("%s.%s has no doc comment", typ.Name(), f.Name)
			}
			visit(f.Type)
		}
	}
	visit(reflect.TypeFor[config.Config]())
	if len(seen) < 10 {
		t.Errorf("only %d types visited", len(seen))
	}
}

// satisfies checks YAML text against the shipped schema.
func satisfies(t *testing.T, text []byte) error {
	t.Helper()
	file, err := os.Open("../../docs/reference/sluice.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	doc, err := jsonschema.UnmarshalJSON(file)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("sluice.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	schema, err := c.Compile("sluice.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return schema.Validate(instance)
}

// TestValidFilesSatisfyTheSchema: the examples, and the test case with every key.
func TestValidFilesSatisfyTheSchema(t *testing.T) {
	files, _ := filepath.Glob("../../examples/*.yaml")
	if len(files) < 6 {
		t.Fatalf("%d examples", len(files))
	}
	for _, file := range append(files, "../testdata/everything.txt") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text, _, _ = bytes.Cut(text, []byte("----------\n"))
		if err := satisfies(t, text); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		// With all defaults written out it satisfies it too.
		c, err := config.Decode(file, text)
		if err != nil {
			t.Fatal(err)
		}
		full, err := config.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		if err := satisfies(t, full); err != nil {
			t.Errorf("%s with defaults: %v", file, err)
		}
	}
}

// TestSchemaRefusesWhatTheDecoderRefuses: shapes and words are the schema's
// business, relations between values are not.
func TestSchemaRefusesWhatTheDecoderRefuses(t *testing.T) {
	const good = "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80, 8000-8099]}], protocol: tcp, mode: dnat, backends: [{address: 10.0.2.2, weight: 3}]}\n"
	if err := satisfies(t, []byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{"mode: dnat", "mode: dnta"}, {"weight: 3", "weight: 300"}, {"weight: 3", "wieght: 3"}, {"protocol: tcp", "protocol: gre"},
		{"name: web, ", ""}, {"10.0.2.2", "10.0.2.300"}, {"8000-8099", "80000"}, {"weight: 3", "port: 70000"}, {"weight: 3", "weight: '3'"},
		{"services:", "datapath: fast\nservices:"}, {"services:", "timeouts: {udp: 5}\nservices:"},
	} {
		text := strings.Replace(good, c[0], c[1], 1)
		if text == good {
			t.Fatalf("%q does not occur", c[0])
		}
		_, err := config.Decode("f", []byte(text))
		if err := satisfies(t, []byte(text)); err == nil {
			t.Errorf("%s instead of %s: the schema takes it", c[1], c[0])
		}
		if !errors.As(err, &config.Errors{}) {
			t.Errorf("%s instead of %s: the decoder takes it", c[1], c[0])
		}
	}
}

// TestDefaultsOfTheTags: what the tags promise is what SetDefaults fills in.
func TestDefaultsOfTheTags(t *testing.T) {
	c := &config.Config{Services: []config.Service{{Mode: config.ModeTunnel, Persistence: &config.Persistence{}, Log: &config.Log{},
		Check: &config.Check{Type: config.CheckHTTP}, Backends: make([]config.Backend, 1)}}}
	c.SetDefaults()
	n := 0
	var visit func(reflect.Value)
	visit = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				visit(v.Elem())
			}
		case reflect.Slice:
			for i := range v.Len() {
				visit(v.Index(i))
			}
		case reflect.Struct:
			for i := range v.NumField() {
				f := v.Type().Field(i)
				if !f.IsExported() {
					continue
				}
				if want := strings.Trim(fallback(f.Tag.Get("jsonschema")), "`"); want != "" && want != "required" {
					n++
					out, err := yaml.Marshal(v.Field(i).Interface())
					if got := strings.Trim(strings.TrimSpace(string(out)), `"`); err != nil || got != want {
						t.Errorf("%s.%s: default %s, the tag says %s", v.Type().Name(), f.Name, got, want)
					}
				}
				visit(v.Field(i))
			}
		}
	}
	visit(reflect.ValueOf(c))
	if n < 15 {
		t.Errorf("only %d defaults compared", n)
	}
}

// TestEverythingHasEveryKey: the case "everything" has every key, as its first line claims.
func TestEverythingHasEveryKey(t *testing.T) {
	used, keys := map[string]bool{}, map[string]bool{}
	var visit func(reflect.Value)
	visit = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				visit(v.Elem())
			}
		case reflect.Slice:
			for i := range v.Len() {
				visit(v.Index(i))
			}
		case reflect.Struct:
			for i := range v.NumField() {
				if f := v.Type().Field(i); f.Tag.Get("yaml") != "" {
					name := v.Type().Name() + "." + f.Name
					keys[name] = true
					used[name] = used[name] || !v.Field(i).IsZero()
					visit(v.Field(i))
				}
			}
		}
	}
	for _, name := range []string{"everything", "uplinks", "nodes", "store"} { // the others exclude keys of the first
		text, err := os.ReadFile("../testdata/" + name + ".txt")
		if err != nil {
			t.Fatal(err)
		}
		text, _, _ = bytes.Cut(text, []byte("----------\n"))
		c, err := config.Decode(name, text)
		if err != nil {
			t.Fatal(err)
		}
		visit(reflect.ValueOf(c))
	}
	delete(keys, "Timeouts.Force") // has a case of its own
	for name := range keys {
		if !used[name] {
			t.Errorf("%s is not used", name)
		}
	}
	if len(keys) < 100 {
		t.Errorf("only %d keys", len(keys))
	}
}
