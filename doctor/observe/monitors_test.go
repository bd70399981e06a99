// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestMonitors finds a program by its name, and the namespace that it sees.
func TestMonitors(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "monitors", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node_exporter")
	if err := os.WriteFile(path, program, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := l.Node("gateway").Command(t.Context(), path, "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	labtest.Eventually(t, 10*time.Second, "the exporter", func() error {
		if !slices.Contains(monitors(os.DirFS("/")), Monitor{"node_exporter", ns.Inode, false}) {
			return errors.New("is not found")
		}
		return nil
	})
}
