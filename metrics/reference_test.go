// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// TestReference compares docs/reference/metrics.md with the families; -update rewrites it.
func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Generated from package metrics by "go test ./metrics -update". -->

The daemon serves the metrics in the Prometheus format at ` + "`/metrics`" + ` on its socket, and over TCP with ` + "`--listen`" + `. Every scrape
reads the datapaths. A counter begins when its object is created in the kernel, and continues across restarts of the daemon. The counters of a
service, rule or backend end with the object. The page also contains the metrics of the Go runtime and of the process.

| metric | kind | labels | meaning |
|---|---|---|---|
`)
	for _, m := range families {
		kind := map[prometheus.ValueType]string{counter: "counter", gauge: "gauge"}[m.kind]
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, kind, strings.Join(m.labels, ", "), m.help)
	}
	const file = "../docs/reference/metrics.md"
	if f := flag.Lookup("update"); f != nil && f.Value.String() == "true" {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(got), b.String()); diff != "" {
		t.Errorf("docs/reference/metrics.md (-have +want):\n%s", diff)
	}
}
