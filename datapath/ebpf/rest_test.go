// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// memlock returns the memory of a map as reported by the kernel.
func memlock(t *testing.T, m *ebpf.Map) int {
	t.Helper()
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(info), "memlock:")
	bytes, err := strconv.Atoi(strings.Fields(rest + " ?")[0])
	if err != nil {
		t.Fatalf("memlock of map %s: %v", m, err)
	}
	return bytes
}

// TestMemoryAtRest bounds the memory of all maps on a machine with 24 GB without flows, and checks the size of
// the port table.
func TestMemoryAtRest(t *testing.T) {
	labtest.Require(t, labtest.Kernel("6.4", "the memory of every kind of map"))
	const most = 64 << 20 // plus memory per CPU
	l := labFor(t, lab.Balancer(), config.AttachTC)
	d := gateway(t, l.Node("gateway"), config.AttachTC, strings.Replace(oneServer, "{flows: 4096, flows6: 4096}", "{flows: 2100000, flows6: 1100000}", 1))
	sum := int(d.t.Flows4.Bytes() + d.t.Flows6.Bytes() + d.t.Index4.Bytes() + d.t.Index6.Bytes() + d.t.Owners.Bytes())
	for _, name := range []string{"adjusts", "client_rates", "stickies"} {
		sum += memlock(t, d.t.Late(name))
	}
	for _, m := range d.t.Maps {
		if m.Type() != ebpf.PerCPUArray {
			sum += memlock(t, m)
		}
	}
	t.Logf("%.1f MB", float64(sum)/1e6)
	if sum > most {
		t.Errorf("the maps take %d bytes, more than %d", sum, most)
	}
	var told uint64
	for _, use := range d.t.Use(0) {
		if use.Name == "ports" {
			told = use.Bytes
		}
	}
	if takes := int(d.t.Owners.Bytes()) + memlock(t, d.t.Maps["port_maps"]); takes < int(told) || takes > int(told)+1<<16 {
		t.Errorf("ports take %d bytes; the table of ports says %d", takes, told)
	}
}

// TestNumbersGetRoom adds a service that needs entries of adjusts, which is small until then. Numbered datagrams
// of another service continue meanwhile. The connections find their entries, and the next process adopts the map
// with either size.
func TestNumbersGetRoom(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	mirror(t, l.Node("s1"), ":8080")
	pins := pinsOf(t)
	path := filepath.Join(pins, "adjusts")
	d := openIn(t, l.Node("gateway"), pins)
	reopen := func(yaml string) {
		t.Helper()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		d = openIn(t, l.Node("gateway"), pins)
		apply(t, d, config.AttachTC, yaml)
	}
	apply(t, d, config.AttachTC, upgradeYAML)
	small := d.t.Late("adjusts").MaxEntries()
	load := startNumbered(t, l.Node("client"), "192.0.2.10:53", ":5353", l.Node("s1"), l.Node("s2"))
	load.await(10)

	// The same state as after a kill before a larger map replaces the small one.
	left, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	if err := left.Pin(path + "-new"); err != nil {
		t.Fatal(err)
	}
	reopen(upgradeYAML)
	if n := d.t.Late("adjusts").MaxEntries(); n != small {
		t.Errorf("adjusts has room for %d, before the process went for %d", n, small)
	}
	if _, err := os.Stat(path + "-new"); !os.IsNotExist(err) {
		t.Errorf("what the killed process left is there still (%v)", err)
	}

	withProxy := strings.Replace(upgradeYAML, "services:", `services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, client-address: proxy-v2,
     backends: [{name: a, address: 10.0.2.2, port: 8080}]}`, 1)
	apply(t, d, config.AttachTC, withProxy)
	if n := d.t.Late("adjusts").MaxEntries(); n <= small {
		t.Errorf("adjusts has room for %d, not for more than %d", n, small)
	}
	c := transfer(t, l.Node("client"), "192.0.2.10:80")
	if err := roundTrip(c); err != nil {
		t.Error(err)
	}
	reopen(withProxy)
	if err := roundTrip(c); err != nil {
		t.Error(err)
	}
	if n, err := table.Content[uint32, wire.Adjust](d.t.Late("adjusts")); len(n) != 1 || err != nil {
		t.Errorf("%d records of changed numbers (%v), want that of one connection", len(n), err)
	}
	load.await(10)
	if missing := load.end(patience); len(missing) > 0 {
		t.Errorf("datagrams are lost, by flow: %v", missing)
	}
	mustStay(t, load.arrivals())
	if err := d.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	d.Close()
}

// TestLateMaps adds services that use the maps of persistence and rates, which are small until then.
func TestLateMaps(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	for name, key := range map[string]string{
		"stickies":     "persistence: {key: [source-address]}",
		"client_rates": "limits: {new-connections-per-client: 10/s}",
		"adjusts":      "mss-clamp: true",
	} {
		t.Run(name, func(t *testing.T) {
			d := openIn(t, labFor(t, lab.Balancer(), config.AttachTC).Node("gateway"), pinsOf(t))
			defer d.Close()
			apply(t, d, config.AttachTC, oneServer)
			if n := d.t.Late(name).MaxEntries(); n != 64 {
				t.Errorf("%d elements before anything uses the map", n)
			}
			apply(t, d, config.AttachTC, strings.Replace(oneServer, "protocol: tcp", "protocol: tcp, "+key, 1))
			if n := d.t.Late(name).MaxEntries(); n <= 64 {
				t.Errorf("%d elements", n)
			}
			if err := d.Remove(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
