// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

var updatePrinted = flag.Bool("update-printed", false, "write testdata/printed-commands")

// printedCommands are the commands of all findings and conclusions of the cases of TestChecks, each once.
func printedCommands(t *testing.T) []string {
	var list []string
	add := func(r *Report) {
		for _, f := range r.Findings {
			if f.Remedy != nil {
				list = append(list, f.Remedy.Commands...)
			}
		}
		for _, c := range r.Conclusion {
			list = append(list, c.Commands...)
		}
	}
	add(Judge(context.Background(), examined(t)))
	for _, c := range slices.Concat(tableCases, entryCases, portCases, ruleCases, forwardCases, hostCases) {
		s := examined(t)
		c.make(s)
		add(Judge(context.Background(), s))
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// TestPrintedCommands: each command that a report prints runs. This test runs commands of other programs in a namespace.
// Commands of sluice are in testdata/printed-commands, and a test of the command line parses them.
func TestPrintedCommands(t *testing.T) {
	list := printedCommands(t)
	text := strings.Join(list, "\n") + "\n"
	const path = "testdata/printed-commands"
	if *updatePrinted {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if golden, err := os.ReadFile(path); err != nil || string(golden) != text {
		t.Errorf("%s is not current: run go test -run TestPrintedCommands ./doctor -update-printed (%v)", path, err)
	}
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("tc"), labtest.Tool("sysctl"), labtest.Tool("ss"))
	node := labtest.New(t, lab.Topology{Name: "printed", Nodes: []lab.NodeSpec{{Name: "g", Forward: true}, {Name: "far"}}, Links: []lab.LinkSpec{
		{A: lab.End{Node: "g", Iface: "wan0", Addresses: []string{"203.0.113.1/24", "2001:db8:0:1::1/64"}}, B: lab.End{Node: "far", Iface: "eth0"}},
		{A: lab.End{Node: "g", Iface: "lan0", Addresses: []string{"10.0.0.1/24"}}, B: lab.End{Node: "far", Iface: "eth1"}}}}).Node("g")
	for _, command := range list {
		program, _, _ := strings.Cut(command, " ")
		switch {
		case program == "sluice":
			continue
		case program == "nft":
			command = "nft -c" + strings.TrimPrefix(command, "nft") // checks without a change
		case program == "sysctl" && !strings.Contains(command, ".conf.wan0.") && !strings.Contains(command, ".conf.lan0."), program == "prlimit", strings.Contains(command, "-legacy"), program == "ethtool", program == "modprobe", program == "conntrack":
			continue // settings of the host, and programs that may be missing
		}
		out, err := node.Command(t.Context(), "sh", "-c", command).CombinedOutput()
		if err != nil && !missing(string(out)) {
			t.Errorf("%s: %v: %s", command, err, out)
		}
	}
}

// missing reports whether a command fails only because its object is not in this namespace.
func missing(out string) bool {
	return slices.ContainsFunc([]string{"Cannot find device", "No such file or directory", "No such process", "does not exist", "File exists", "Operation not supported"}, func(s string) bool { return strings.Contains(out, s) })
}
