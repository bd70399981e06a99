// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestHostNamespaceWhileMainThreadIsAway: /proc/self shows the namespace of the main thread, which
// is another one while a goroutine on it works there.
func TestHostNamespaceWhileMainThreadIsAway(t *testing.T) {
	labtest.Require(t, labtest.Root)
	before := netdev.HostNamespace()
	l := labtest.New(t, lab.Topology{Name: "away", Nodes: []lab.NodeSpec{{Name: "node"}}})
	ns, err := netdev.NamespaceAt(l.Node("node").Path())
	if err != nil {
		t.Fatal(err)
	}
	// Threads are kept in the namespace until the main one is among them.
	away, release := make(chan bool), make(chan struct{})
	var working sync.WaitGroup
	defer working.Wait()
	defer close(release)
	for range 200 {
		working.Go(func() {
			if err := ns.Do(func() error {
				away <- unix.Gettid() == os.Getpid()
				<-release
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
		if <-away {
			break
		}
	}
	if after := netdev.HostNamespace(); after != before {
		t.Errorf("the host's namespace is %v, and was %v", after, before)
	}
	if all, _ := netdev.Namespaces(); all[0] != before {
		t.Errorf("the first namespace is %v, want %v", all[0], before)
	}
	if err := before.Do(func() error {
		if now := netdev.CurrentNamespace(); now.Inode != before.Inode {
			t.Errorf("in %v, want %v", now, before)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
