// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// resident returns the private memory of the process in bytes. Pages of the maps belong to the kernel and do not
// count.
func resident(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	kB, err := strconv.Atoi(strings.Fields(rest + " ?")[0])
	if err != nil {
		t.Fatalf("RssAnon of /proc/self/status: %v", err)
	}
	return kB << 10
}

// TestFlowsMemory lists a table of 200,000 flows, or of SLUICE_FLOW_MEMORY flows, and bounds the memory of the
// process. The bound does not depend on the number of flows.
func TestFlowsMemory(t *testing.T) {
	const bound = 16 << 20
	flows, err := strconv.Atoi(cmp.Or(os.Getenv("SLUICE_FLOW_MEMORY"), "200000"))
	if err != nil {
		t.Fatal(err)
	}
	if list := flows * int(unsafe.Sizeof(flow.Flow{})); list < 2*bound {
		t.Fatalf("a list of %d flows takes %d bytes, too few to be told from the bound", flows, list)
	}
	l := labFor(t, lab.Topology{Name: "memory", Nodes: []lab.NodeSpec{{Name: "gateway", Forward: true}, {Name: "client"}}, Links: []lab.LinkSpec{
		{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"10.0.1.1/24"}}, B: lab.End{Node: "client", Iface: "eth0"}},
	}}, config.AttachTC)
	d := gateway(t, l.Node("gateway"), config.AttachTC, fmt.Sprintf(`
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.1.2, port: 8080}]}
tables: {flows: %d, flows6: 4096}
`, flows))
	atomic.StoreUint32(&d.t.Stock4.Values[0].Fresh, d.t.Entries4) // grows the table
	labtest.Eventually(t, patience, "the whole table", func() error {
		if room := atomic.LoadUint32(&d.t.Stock4.Values[0].Room); room != d.t.Entries4 {
			return fmt.Errorf("%d of %d entries", room, d.t.Entries4)
		}
		return nil
	})
	entries := d.t.Flows4.Values
	if len(entries) < 2*flows {
		t.Fatalf("the table has %d entries, not two for each of %d flows", len(entries), flows)
	}
	now := d.ticks()
	for i := range 2 * flows {
		e := &entries[i]
		e.Key.Saddr, e.Key.Daddr, e.Key.L4Proto = uint32(i), 0x0a02000a, uint8(flow.TCP)
		e.Meta.Twin, e.Meta.Seen, e.Meta.Flags = uint32(i^1), now, wire.EntrySettled|wire.EntryPrimary&^uint8(i)
		e.Key.Kind, e.Key.State = wire.KindFlow, wire.EntryLive
	}
	debug.FreeOSMemory()
	before, most, n := resident(t), 0, 0
	err = d.Flows(context.Background(), func(f flow.Flow) bool {
		if n++; n%(flows/20) == 0 {
			most = max(most, resident(t))
		}
		return true
	})
	if err != nil || n != flows {
		t.Errorf("%d flows, %v; want %d", n, err, flows)
	}
	if grown := most - before; grown > bound {
		t.Errorf("listing %d flows took %d more bytes of memory, more than %d", flows, grown, bound)
	} else {
		t.Logf("%d flows: %d kB at most beside %d kB before", flows, grown>>10, before>>10)
	}
}
