// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// farm writes a configuration of n services with four backends each. Half of the
// services share one address, each on a port of its own.
func farm(n int) []byte {
	var b bytes.Buffer
	b.WriteString("services:\n")
	for i := range n {
		address, port := "192.0.2.1", 1+i
		if i%2 == 0 {
			address, port = fmt.Sprintf("198.18.%d.%d", i>>8&255, i&255), 80
		}
		fmt.Fprintf(&b, "  - name: s%d\n    listen:\n      - {address: %s, ports: [%d]}\n    protocol: tcp\n    mode: dnat\n    backends:\n", i, address, port)
		for j := range 4 {
			fmt.Fprintf(&b, "      - {name: b%d, address: 10.%d.%d.%d, port: 8080}\n", j, i>>8&255, i&255, j+1)
		}
	}
	return b.Bytes()
}

func TestLargeConfiguration(t *testing.T) {
	c, err := config.Decode("farm", farm(10_000))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Services) != 10_000 || len(c.Services[9_999].Backends) != 4 {
		t.Fatalf("%d services", len(c.Services))
	}
	data, err := config.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	again, err := config.Decode("farm", data)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(c, again) {
		t.Error("not the same after Marshal and Decode")
	}
}

// TestErrorsAreBounded: a file with an error in every line quickly returns the first thousand errors.
func TestErrorsAreBounded(t *testing.T) {
	for name, data := range map[string][]byte{
		"decoder":   bytes.ReplaceAll(farm(1_100), []byte("port: 8080"), []byte("port: many")),
		"validator": bytes.ReplaceAll(farm(1_100), []byte("name: b1,"), []byte("name: b2,")),
	} {
		_, err := config.Decode("farm", data)
		var errs config.Errors
		if !errors.As(err, &errs) || len(errs) != 1001 || !strings.Contains(errs[1000].Error(), "more than 1000 errors") {
			t.Errorf("%s: %d errors of type %T", name, len(errs), err)
		}
	}
}

// TestErrorsOnOneLine: each of a thousand errors in one generated line quotes only its surroundings.
func TestErrorsOnOneLine(t *testing.T) {
	var b strings.Builder
	b.WriteString(`{"services": [`)
	for i := range 2_000 {
		fmt.Fprintf(&b, `{"name": "ü%d", "port%d": 1}, `, i, i)
	}
	data := strings.TrimSuffix(b.String(), ", ") + "]}"
	_, err := config.Decode("farm", []byte(data))
	var errs config.Errors
	if !errors.As(err, &errs) {
		t.Fatal(err)
	}
	runes, quoted := []rune(data), 0
	for _, e := range errs[:1000] {
		quoted += len(e.Source)
		if !strings.Contains(e.Source, string(runes[e.Column-1:][:len("{}")])) {
			t.Fatalf("%v: the place is not in %q", e, e.Source)
		}
	}
	if quoted > 1000*150 {
		t.Errorf("a line of %d bytes, %d bytes of it in the errors", len(data), quoted)
	}
	for _, e := range errs[:1000] {
		var b strings.Builder
		config.Errors{e}.Render(&b, false)
		lines := strings.Split(b.String(), "\n")
		if at := strings.Index(lines[2], "^"); string([]rune(lines[1])[at]) != string(runes[e.Column-1]) {
			t.Fatalf("the caret is elsewhere:\n%s", b.String())
		}
	}
}

// TestLongValues: a message about a long value contains a bounded part.
func TestLongValues(t *testing.T) {
	long := strings.Repeat("a", 1<<20)
	for _, text := range []string{"services: [{name: " + long + "}]", "? " + long + "\n: 1", "firewall: {sets: {? " + long + " : [x, y, z]}}"} {
		_, err := config.Decode("f", []byte(text))
		if err == nil || len(err.Error()) > 200 || !strings.Contains(err.Error(), "a value of 1048576 bytes") {
			t.Errorf("%.300v", err)
		}
	}
}

func TestTooLarge(t *testing.T) {
	if _, err := config.Decode("f", make([]byte, config.MaxFileSize+1)); err == nil || !strings.Contains(err.Error(), "larger than 64 MiB") {
		t.Error(err)
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, n := range []int{1, 1_000, 10_000} {
		data := farm(n)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := config.Decode("farm", data); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/float64(n), "µs/service")
		})
	}
}

func BenchmarkMarshal(b *testing.B) {
	c, err := config.Decode("farm", farm(10_000))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := config.Marshal(c); err != nil {
			b.Fatal(err)
		}
	}
}

// TestEmptyFile: an empty file is not a configuration without services, because an editor may be about to write
// it.
func TestEmptyFile(t *testing.T) {
	for text, want := range map[string]string{"": "the file is empty", " \n": "the file is empty", "# a farm\n": "only comments", "--- # null\n": "only comments", "services: []\n": ""} {
		file := filepath.Join(t.TempDir(), "sluice.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := config.Load(file); err == nil != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestManyAddresses: lists are checked in linear time.
func TestManyAddresses(t *testing.T) {
	var b strings.Builder
	b.WriteString("nat:\n  - {name: a, type: snat, source: [10.0.0.0/8], to: [")
	for i := range 200_000 { // quadratic time would be a quarter of an hour
		fmt.Fprintf(&b, "20.%d.%d.%d,", i>>16, i>>8&255, i&255)
	}
	b.WriteString("]}\n")
	if _, err := config.Decode("f", []byte(b.String())); err != nil {
		t.Error(err)
	}
}
