// SPDX-License-Identifier: Apache-2.0

package casestudy_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/casestudy"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestCaseStudy plays the story in small: the doctor names the full table first,
// three counts of the refused SYNs are equal, and the tuned gateway refuses nothing.
func TestCaseStudy(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack, labtest.Tool("nft"), labtest.Tool("go"))
	if st, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max"); err != nil || st.Mode()&0o200 == 0 {
		t.Skip("nf_conntrack_max can be written only in the host's first network namespace")
	}
	binary := filepath.Join(t.TempDir(), "sluice")
	build := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the client: %v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	r, err := casestudy.Play(ctx, casestudy.Options{Sluice: binary, Connections: 1500, Requests: 4000, SickFor: 4 * time.Second, Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	if !r.FoundFirst {
		t.Errorf("the doctor did not name the full table first:\n%s", strings.Join(r.Conclusion, "\n"))
	}
	if !r.Identity.Exact() || r.Identity.Dropped == 0 {
		t.Errorf("the same packets were counted differently: %+v", r.Identity)
	}
	runs := map[string]casestudy.Run{}
	for _, run := range r.Runs {
		runs[run.Name] = run
	}
	for _, name := range []string{"before", "after"} {
		if run := runs[name]; run.Complete != 4000 || run.Failed != 0 || run.Refused != 0 {
			t.Errorf("%s: %d of 4000 complete, %d failed, %d refused", name, run.Complete, run.Failed, run.Refused)
		}
	}
	if run := runs["sick"]; run.Complete > 1100 {
		t.Errorf("sick: %d requests complete with a table of 1000", run.Complete)
	}
}
