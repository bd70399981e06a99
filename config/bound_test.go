// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

func nodesOf(n *yaml.Node) int {
	count := 1
	for _, c := range n.Content {
		count += nodesOf(c)
	}
	return count
}

// TestNodesAtMost: no random text has twice as many nodes as the estimate, even if quotes, comments and block
// scalars contain brackets.
func TestNodesAtMost(t *testing.T) {
	parts := []string{
		"a: ", "a: b\n", "- ", "-\n", "\n", "\n  ", "\n    ", ", ", "[", "]", "{", "}", "[a: b, ", "{a, b}", "? ", "? a\n: b\n", "\"[\"", "'{'", "# [ {\n", "|\n  [ {\n", ">\n  \"\n", "\"a\":1,", ": ",
		"&x ", "*x ", "!!str ", "b", "10.0.0.1", "aaaaaaaaaaaa,", "\r", "\r\n", "\u0085", "\u2028", "\"\n [\"", "'it''s [1,1,1'", "key: [1, 2, 3]\n", "  - name: a\n    mode: b\n", "\t", "--- ", "...\n",
	}
	random := rand.New(rand.NewPCG(1, 2))
	valid := 0
	for range 20_000 {
		var b strings.Builder
		for range 1 + random.IntN(12) {
			b.WriteString(strings.Repeat(parts[random.IntN(len(parts))], 1+random.IntN(3)))
		}
		var doc yaml.Node
		if yaml.Unmarshal([]byte(b.String()), &doc) != nil || len(doc.Content) == 0 {
			continue
		}
		valid++
		if n, estimate := nodesOf(doc.Content[0]), nodesAtMost([]byte(b.String())); n > 2*estimate {
			t.Errorf("%q has %d nodes, the estimate is %d", b.String(), n, estimate)
		}
	}
	if valid < 1000 {
		t.Errorf("%d valid texts", valid)
	}
}

// TestUsualTextsAreNotDense: configurations of many small objects, in each style, and long lists of short
// addresses are below the limit.
func TestUsualTextsAreNotDense(t *testing.T) {
	repeat := func(before, format string) string {
		var b strings.Builder
		b.WriteString(before)
		for i := range 20_000 {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	flow := repeat("services:\n", "  - {name: s%[1]d, listen: [{address: 192.0.2.1, ports: [%[1]d]}], protocol: tcp, mode: dnat, backends: [{name: b0, address: 10.0.2.2, port: 80}, {name: b1, address: 10.0.2.3, port: 80}]}\n")
	block := repeat("services:\n", "- name: s%[1]d\n  listen:\n  - address: 192.0.2.1\n    ports:\n    - %[1]d\n  protocol: tcp\n  mode: dnat\n  backends:\n  - name: b0\n    address: 10.0.2.2\n    port: 80\n")
	compact := repeat(`{"services":[`, `{"name":"s%[1]d","listen":[{"address":"192.0.2.1","ports":[%[1]d]}],"protocol":"tcp","mode":"dnat","backends":[{"name":"b0","address":"10.0.2.2","port":80},{"name":"b1","address":"10.0.2.3","port":80}]},`)
	list, lines := "firewall: {sets: {a: ["+strings.Repeat("10.0.0.1, ", 20_000), "firewall:\n  sets:\n    a:\n"+strings.Repeat("    - 10.0.0.1\n", 20_000)
	for name, text := range map[string]string{"flow": flow, "block": block, "compact JSON": compact + "{}]}", "flow list": list + "10.0.0.1]}}", "block list": lines} {
		if n, most := nodesAtMost([]byte(text)), nodeLimit(len(text)); n > most {
			t.Errorf("%s: %d nodes in %d bytes, %d are allowed", name, n, len(text), most)
		}
	}
}

// TestDenseTexts are refused by every function that reads text, and the message names the limit.
func TestDenseTexts(t *testing.T) {
	dense := "services: [" + strings.Repeat("1,", 1<<19) + "1]"
	c, err := Decode("f", []byte("services: []\n"))
	if err != nil {
		t.Fatal(err)
	}
	for entry, refused := range map[string]func() error{
		"Decode": func() error { _, err := Decode("f", []byte(dense)); return err },
		"Put":    func() error { _, err := c.Put("services/a", []byte(dense)); return err },
		"Add":    func() error { _, _, err := c.Add("services", "", []byte(dense)); return err },
		"Patch":  func() error { _, err := c.Patch("timeouts", []byte(dense)); return err },
	} {
		if err := refused(); err == nil || !strings.Contains(err.Error(), "values in 1048") {
			t.Errorf("%s: %v", entry, err)
		}
	}
	deep := strings.Repeat("[", 100) + strings.Repeat("]", 100)
	if _, err := Decode("f", []byte("services: "+deep)); err == nil || !strings.Contains(err.Error(), "64 deep") {
		t.Errorf("deep: %v", err)
	}
}
