// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Writes docs/reference/reasons.md from enum reason of bpf/datapath/types.h: every line of the
// enumeration and its comment.
package main

import (
	"bytes"
	"fmt"
	"log"
	"os"
	"regexp"
	"strings"
)

var line = regexp.MustCompile(`^\tREASON_([A-Z0-9_]+),\s*// (.*)$`)

func main() {
	source, err := os.ReadFile("../../../bpf/datapath/types.h")
	if err != nil {
		log.Fatal(err)
	}
	var out bytes.Buffer
	out.WriteString("# Reasons\n\n<!-- Made by \"go generate ./datapath/ebpf\" from bpf/datapath/types.h. Do not edit. -->\n\n" +
		"Every packet leaves the eBPF datapath with one reason. The metric `sluice_datapath_packets_total` counts them by family, action and\n" +
		"reason (`/metrics`, see [operations](../guide/operations.md)); `sluice explain` reports the reason for one packet.\n\n| reason | meaning |\n|---|---|\n")
	for _, l := range strings.Split(string(source), "\n") {
		m := line.FindStringSubmatch(l)
		if m == nil || m[1] == "NONE" || m[1] == "COUNT" {
			continue
		}
		fmt.Fprintf(&out, "| `%s` | %s |\n", strings.ReplaceAll(strings.ToLower(m[1]), "_", "-"), m[2])
	}
	if err := os.WriteFile("../../../docs/reference/reasons.md", out.Bytes(), 0o644); err != nil {
		log.Fatal(err)
	}
}
