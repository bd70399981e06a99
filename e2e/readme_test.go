// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestReadme runs "Try it" of README verbatim, in a mount namespace with a /run of its own, so that no other lab
// is called balancer.
func TestReadme(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Tool("curl"), labtest.Tool("make"))
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "## Try it\n\n```\n")
	script, _, ok := strings.Cut(rest, "```")
	if !ok || strings.Count(script, "\n") > 10 {
		t.Fatalf("README has no block of up to ten lines below \"Try it\":\n%s", script)
	}
	// The output of each command follows its line.
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "bash", "-euvc",
		"mount -t tmpfs tmpfs /run\ntrap 'bin/sluice lab down --all' EXIT\n"+script+"trap - EXIT\n")
	cmd.Dir = ".."
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		`(?m)^s[123] 10\.0\.1\.2:\d+$`,                                       // a request is answered
		`(?m)^nothing runs in s1 of lab `,                                    // a backend is killed
		`(?m)^web +a +10\.0\.2\.2:8080 .* down .*failed: connection refused`, // and reported as down
		`(?s)backend changed.*\ns[23] 10\.0\.1\.2:\d+\n`,                     // another backend answers
		`(?m)^verdict +(drop|pass|answer): .*`,                               // the reason why port 81 does not answer
		`(?m)^lab \w+ \(balancer\) is removed$`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("the output lacks %s", want)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}
