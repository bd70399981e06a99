// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestChangedMeanwhile: addresses that change while they are copied are named as perhaps
// incomplete.
func TestChangedMeanwhile(t *testing.T) {
	l := labtest.New(t, lab.Topology{Name: "changing", Nodes: []lab.NodeSpec{{Name: "a"}}})
	h, err := l.Node("a").Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	address := func(i int) *netlink.Addr {
		a, err := netlink.ParseAddr(fmt.Sprintf("10.0.%d.%d/32", i>>8, i&255))
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for i := range 2000 { // more than one message of the kernel holds
		if err := h.AddrAdd(lo, address(i)); err != nil {
			t.Fatal(err)
		}
	}
	end, ended := make(chan struct{}), make(chan error, 1)
	last := address(2000)
	go func() {
		for {
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
			if err := errors.Join(h.AddrAdd(lo, last), h.AddrDel(lo, last)); err != nil {
				ended <- err
				return
			}
		}
	}()
	labtest.Eventually(t, time.Minute, "a note on addresses that changed", func() error {
		var omitted []string
		err := l.Node("a").Do(func() error {
			host, err := readHost()
			if err == nil {
				omitted = host.omitted
			}
			return err
		})
		if err == nil && !slices.Contains(omitted, "addresses changed while they were copied: some may be left out") {
			err = fmt.Errorf("notes %q", omitted)
		}
		return err
	})
	close(end)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
