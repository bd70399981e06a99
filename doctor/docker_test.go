// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestDocker expects no warning for a real Docker daemon that publishes a port, with either kind of iptables. If a rule
// drops packets to the port, the first line of the report must name the rule.
func TestDocker(t *testing.T) {
	if os.Getenv("SLUICE_DOCKER") == "" {
		t.Skip("SLUICE_DOCKER=1 starts a Docker daemon")
	}
	needs(t)
	for _, tool := range []string{"dockerd", "docker", "busybox", "curl", "iptables-nft", "iptables-legacy"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			l := labtest.New(t, faults.Topology("docker"))
			docker, err := faults.StartDocker(ctx, l.Node("gateway"), kind)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := docker.Stop(); err != nil {
					t.Error(err)
				}
				if t.Failed() {
					t.Log(docker.Log())
				}
			})
			if err := docker.Image(ctx, "own", []string{"busybox"}, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := docker.Run(ctx, "run", "-d", "-p", "8080:8080", "own", "/bin/busybox", "httpd", "-f", "-p", "8080"); err != nil {
				t.Fatal(err)
			}
			ask := func(ctx context.Context, l *lab.Lab) error {
				for range 20 {
					// Behind the rule there is no answer.
					_ = l.Node("client").Command(ctx, "curl", "-s", "-o", "/dev/null", "-m", "0.5", "http://"+faults.Gateway+":8080/").Run()
				}
				return nil
			}
			labtest.Eventually(t, 10*time.Second, "an answer of the container", func() error {
				return l.Node("client").Command(ctx, "curl", "-s", "-o", "/dev/null", "-m", "1", "http://"+faults.Gateway+":8080/").Run()
			})
			healthy := func(when string) {
				for _, f := range watched(ctx, t, l, ask).Findings {
					if f.Verdict >= doctor.Warn && f.Namespace != "" {
						t.Errorf("%s: false alarm: %s %s", when, f.Check, said(f))
					}
				}
			}
			healthy("as Docker makes it")
			rule := func(action string) {
				if text, err := l.Node("gateway").Command(ctx, "iptables-"+kind, action, "FORWARD", "-p", "tcp", "--dport", "8080", "-j", "DROP").CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, text)
				}
			}
			rule("-I")
			if r := watched(ctx, t, l, ask); r.Conclusion[0].Check != "RL15" || r.ExitCode() == 0 {
				t.Errorf("with the published port dropped: %v", r.Conclusion)
			}
			rule("-D")
			healthy("after the rule")
		})
	}
}
