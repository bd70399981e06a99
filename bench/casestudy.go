// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/sluice-lb/sluice/doctor/casestudy"
)

// caseStudyFile is the output of "sluice lab case-study --docker --json", in the directory of a machine.
const caseStudyFile = "case-study-docker.json"

// caseStudyRuns are the runs of the case study with the published rates, 0 where there is none.
var caseStudyRuns = []struct {
	name, about string
	published   float64
}{
	{"before", "published by Docker", 6576},
	{"collapse", "published by Docker, table of 1,000", 76},
	{"after", "published by Docker, tuned", 6316},
	{"beyond", "the same container behind Sluice on eBPF, table of 1,000", 0},
}

// writeCaseStudies renders the case studies of the machines. A machine without one is skipped.
func writeCaseStudies(b *bytes.Buffer, dir, link string, machines []*machine) error {
	first := true
	for _, m := range machines {
		file := filepath.Join(dir, m.dir, caseStudyFile)
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		var r struct { // the part of casestudy.Report that is shown
			Server   string             `json:"server"`
			Runs     []casestudy.Run    `json:"runs"`
			Identity casestudy.Identity `json:"identity"`
		}
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		runs := map[string]casestudy.Run{}
		for _, run := range r.Runs {
			runs[run.Name] = run
		}
		before := runs["before"].RequestsPerSecond
		if before == 0 {
			return fmt.Errorf("%s: no rate before the collapse", file)
		}
		if first {
			first = false
			b.WriteString(caseStudyHead)
		}
		fmt.Fprintf(b, "Measured on %s with %s:\n\n", m.name, r.Server)
		b.WriteString("| run | requests/s | of the first run | the case study, requests/s | of its first run | answered | SYNs refused | entries of connection tracking | eBPF flows |\n" +
			"|---|---:|---:|---:|---:|---:|---:|---:|---:|\n")
		for _, c := range caseStudyRuns {
			run, ok := runs[c.name]
			if !ok {
				fmt.Fprintf(b, "| %s | not measured | | | | | | | |\n", c.about)
				continue
			}
			published, share := "-", "-"
			if c.published > 0 {
				published, share = format(c.published, 0), fmt.Sprintf("%.3f", c.published/caseStudyRuns[0].published)
			}
			fmt.Fprintf(b, "| %s | %s | %.3f | %s | %s | %s | %s | %s | %s |\n", c.about, format(run.RequestsPerSecond, 0), run.RequestsPerSecond/before,
				published, share, format(float64(run.Complete), 0), format(float64(run.Refused), 0), format(float64(run.Entries), 0), format(float64(run.Flows), 0))
		}
		i := r.Identity
		fmt.Fprintf(b, "\nThe refused SYNs were counted three times: %s by the kernel's counter, %s by `sluice drops`, %s by both ends. Raw: [%s](%s).\n\n",
			format(float64(i.Dropped), 0), format(float64(i.Events), 0), format(float64(i.SYNs), 0), path.Join(m.dir, caseStudyFile), path.Join(link, m.dir, caseStudyFile))
	}
	return nil
}

const caseStudyHead = `## The case study: a port that Docker publishes

` + "`sluice lab case-study --docker --allow-host-sysctl --json`" + ` runs a real Docker engine on the gateway, with nginx in a container published
by ` + "`-p 8080:8080`" + `. A client opens 5,000 connections at once and sends 30,000 requests, each on a new connection. The first three runs use
Docker's own rules: with the host's table, with a table of 1,000 entries for 8 seconds, and after ` + "`sluice tune`" + `. The last one puts a service of
Sluice on eBPF in front of the same container, with the small table again.

`
