// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestClusterStore gives three gateways one configuration through etcd. While etcd is away, flows continue, a killed
// daemon starts with the last revision, and changes are refused; afterwards the nodes follow the store again.
func TestClusterStore(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("bird"), labtest.Tool("birdc"), labtest.Tool("etcd"))
	l := labtest.New(t, clusterTopology())
	etcd := labtest.NewEtcd(t, func(name string, args ...string) *exec.Cmd {
		return l.Node("router").Command(t.Context(), name, args...)
	}, "10.0.2.254", 2379)
	file := strings.Replace(example(t, "cluster.yaml"), "cluster:\n", "cluster:\n  store: "+etcd.YAML()+"\n"+clusterNodes, 1)
	c := newClusterIn(t, l, file)
	documents := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(documents, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	has := func(service string) {
		t.Helper()
		for _, d := range c.gateways {
			labtest.Eventually(t, patience, "service "+service, func() error {
				if got := output(t, d, "show services"); !strings.Contains(got, service) {
					return fmt.Errorf("%s%s", got, output(t, d, "show nodes"))
				}
				return nil
			})
		}
	}
	labtest.Eventually(t, patience, "live nodes", func() error {
		for _, d := range c.gateways {
			if got := output(t, d, "show nodes"); strings.Count(got, "live") != 3 {
				return fmt.Errorf("%s", got)
			}
		}
		return nil
	})
	flows := sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 20)
	flows.progress()

	more := file + "  - {name: extra, listen: [{address: 192.0.2.40, ports: [80]}], protocol: tcp, mode: dsr, scheduler: maglev, backends: [{name: s1, address: 10.0.2.2}]}\n"
	again(t, c.gateways[0], "apply --cluster "+write("more.yaml", more))
	has("extra")
	c.hops("192.0.2.40", "n1 n2 n3")
	if got := refusal(t, c.gateways[1], "apply "+write("own.yaml", file)); !strings.Contains(got, "sluice apply --cluster") {
		t.Errorf("a change of one node: %s", got)
	}
	again(t, c.gateways[0], "node n2 drain")
	c.hops("192.0.2.40", "n1 n3")
	again(t, c.gateways[2], "node n2 auto")
	c.hops("192.0.2.40", "n1 n2 n3")
	flows.progress()

	etcd.Kill()
	if got := refusal(t, c.gateways[0], "apply --cluster "+write("away.yaml", file)); !strings.Contains(got, "the store of the cluster does not answer") {
		t.Errorf("a change without etcd: %s", got)
	}
	if err := c.gateways[1].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.gateways[1].Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	has("extra")
	flows.progress()
	etcd.Start()
	again(t, c.gateways[1], "apply --cluster "+write("other.yaml", strings.Replace(more, "name: extra", "name: other", 1)))
	has("other")
	flows.progress()
	t.Logf("%d of %d datagrams are lost", flows.finish(), flows.sent.Load())
}

// again runs a command of the cluster until it succeeds: on a busy machine, nodes answer late.
func again(t *testing.T, d *daemon.Daemon, command string) {
	t.Helper()
	labtest.Eventually(t, patience, command, func() error {
		if out, err := d.Command(t.Context(), strings.Fields(command)...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// refusal returns the error of a command that must fail.
func refusal(t *testing.T, d *daemon.Daemon, command string) string {
	t.Helper()
	out, err := d.Command(t.Context(), strings.Fields(command)...).CombinedOutput()
	if err == nil {
		t.Errorf("%s succeeds: %s", command, out)
	}
	return string(out)
}
