// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/golden"
)

// mapping is a request of TestMappings: inside endpoint, outside endpoint, and the expected result.
type mapping struct {
	inside, outside string
	exact           bool
	want            string // outside endpoint, "ADDRESS:" for any port, or an error
}

// TestMappings requests mappings with each method of port allocation.
func TestMappings(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	const rest = "0.0.0.0:0"
	cases := []struct {
		name, yaml string
		requests   []mapping
	}{
		{"one address", "{name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1], ports: 2000-4000, pcp: true}", []mapping{
			{"10.0.0.2:3000", rest, false, "203.0.113.1:3000"},
			{"10.0.0.2:80", "203.0.113.1:2001", false, "203.0.113.1:2001"},
			{"10.0.0.2:81", "203.0.113.1:2002", true, "203.0.113.1:2002"},
			{"10.0.0.3:3000", rest, false, "203.0.113.1:"},
			{"10.0.0.3:81", "203.0.113.1:2002", true, "no such"},
			{"10.0.0.3:82", "203.0.113.9:2003", true, "no such"},
			{"10.0.0.3:83", "203.0.113.1:80", true, "no such"},
			{"10.0.0.3:84", "203.0.113.9:2003", false, "203.0.113.1:2003"},
		}},
		{"two addresses", "{name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1, 203.0.113.2], pcp: true}", []mapping{
			{"10.0.0.2:3000", "203.0.113.2:3000", false, "203.0.113.2:3000"},
			{"10.0.0.2:3001", "203.0.113.1:3001", false, "203.0.113.2:3001"}, // paired
			{"10.0.0.2:3002", "203.0.113.1:3002", true, "no such"},
			{"10.0.0.3:3000", "203.0.113.1:3000", true, "203.0.113.1:3000"},
			{"10.0.0.4:3003", "203.0.113.2:0", true, "203.0.113.2:"},
		}},
		{"quota", "{name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1], ports-per-client: 2, pcp: true}", []mapping{
			{"10.0.0.2:3000", rest, false, "203.0.113.1:3000"},
			{"10.0.0.2:3001", "203.0.113.1:3000", true, "no such"}, // ignored
			{"10.0.0.2:3002", rest, false, "203.0.113.1:3002"},
			{"10.0.0.2:3003", rest, false, "the client's quota"},
			{"10.0.0.3:3003", rest, false, "203.0.113.1:3003"},
		}},
		{"exhausted", "{name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1], ports: 2000-2001, pcp: true}", []mapping{
			{"10.0.0.2:3000", rest, false, "203.0.113.1:2000"}, // the same parity as the inside port
			{"10.0.0.2:3002", rest, false, "203.0.113.1:2001"},
			{"10.0.0.3:3000", rest, false, "no such"},
		}},
		{"blocks", "{name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1], ports: 2000-2007, port-block: 4, pcp: true}", []mapping{
			{"10.0.0.2:3000", "203.0.113.1:0", false, "203.0.113.1:"},
			{"10.0.0.2:3001", "203.0.113.1:9", true, "no such"},
			{"10.0.0.3:3000", rest, false, "203.0.113.1:"},
		}},
		{"deterministic", "{name: office, type: snat, source: [10.0.0.0/30], out: wan0, to: [203.0.113.1], ports: 2000-2015, port-block: 4, deterministic: true, pcp: true}", []mapping{
			{"10.0.0.2:3000", "203.0.113.1:2010", false, "203.0.113.1:2010"},
			{"10.0.0.2:3001", "203.0.113.1:2012", true, "no such"},
			{"10.0.0.3:3001", "203.0.113.1:2012", true, "203.0.113.1:2012"},
		}},
		{"masquerade", "{name: office, type: masquerade, source: [10.0.0.0/24, \"fd00::/64\"], out: wan0, pcp: true}\n" +
			"  - {name: web, type: port-forward, listen: {address: 198.51.100.1, ports: [8000-8099]}, protocol: tcp, to: {address: 10.0.0.9}}", []mapping{
			{"10.0.0.2:3000", rest, false, "198.51.100.1:3000"},
			{"[fd00::2]:3000", "[::]:0", false, "[2001:db8::1]:3000"},
			{"[fd00::3]:3000", rest, false, "[2001:db8::1]:"}, // no IPv4 behind this rule
			{"10.0.0.2:8080", "198.51.100.1:8080", true, "no such"},
			{"10.0.0.2:8081", "198.51.100.1:8081", false, "198.51.100.1:"},
			{"10.0.0.2:5000", "198.51.100.1:5000", true, "no such"}, // a socket of the gateway's
		}},
		{"nat64", "{name: office, type: nat64, source: [\"fd00::/64\"], out: wan0, prefix: \"64:ff9b::/96\", pool: [203.0.113.1], pcp: true}", []mapping{
			{"[fd00::2]:3000", rest, false, "203.0.113.1:3000"},
			{"[fd00::3]:3000", "[2001:db8::1]:3001", false, "203.0.113.1:3001"},
		}},
	}
	// All in parallel: each rule has its own networks.
	at := func(i int, text string) string {
		n := strconv.Itoa(i + 1)
		return strings.NewReplacer("office", "office"+n, "10.0.0.", "10.0."+n+".", "203.0.113.", "203.0."+n+".", "fd00::", "fd00:"+n+"::").Replace(text)
	}
	yaml := "nat:\n"
	for i, c := range cases {
		yaml += "  - " + at(i, c.yaml) + "\n"
	}
	d := mappingGateway(t, mappingLab(t), yaml+"tables: {flows: 4096, flows6: 4096}\n")
	made := 0
	for i, c := range cases {
		for k, w := range c.requests {
			m := datapath.Mapping{Rule: at(i, "office"), Protocol: flow.TCP, Inside: netip.MustParseAddrPort(at(i, w.inside)),
				Outside: netip.MustParseAddrPort(at(i, w.outside)), Nonce: [12]byte{byte(k)}, Expires: time.Duration(k)}
			before := usedPorts(d)
			got, err := d.Map(m, w.exact)
			text := got.Outside.String()
			if err != nil {
				text = err.Error()
			} else {
				made++
			}
			if want := at(i, w.want); !strings.Contains(text, want) || err == nil && !strings.HasPrefix(text, want) {
				t.Errorf("%s: %s, wishing for %s: %s, want %s", c.name, m.Inside, m.Outside, text, want)
			}
			// An endpoint that was released because another program answers there has a hold-down.
			if used := usedPorts(d); err != nil && used != before && c.name != "masquerade" {
				t.Errorf("%s: %s: %d ports are used, %d before it was refused", c.name, m.Inside, used, before)
			}
		}
	}
	if list, err := d.Mappings(); err != nil || len(list) != made {
		t.Errorf("%v, %d mappings are listed, want %d", err, len(list), made)
	}
}

// mappingLab is a gateway with a socket on port 5000.
func mappingLab(t *testing.T) *lab.Lab {
	t.Helper()
	l := labtest.New(t, lab.Topology{Name: "mappings", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "outside"}},
		Links: []lab.LinkSpec{{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24", "2001:db8::1/64"}}, B: lab.End{Node: "outside", Iface: "eth0"}}}})
	socket, err := l.Node("gateway").Listen("0.0.0.0:5000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	return l
}

// mappingGateway is a datapath in this lab, without traffic.
func mappingGateway(t *testing.T, l *lab.Lab, yaml string) *Datapath {
	t.Helper()
	var d *Datapath
	err := l.Node("gateway").Do(func() (err error) {
		d, err = Open(Options{Dir: pinsOf(t), NoAttach: true, Log: slog.New(slog.DiscardHandler)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	putConfig(t, d, yaml)
	return d
}

func putConfig(t *testing.T, d *Datapath, yaml string) {
	t.Helper()
	c, err := config.Decode("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Apply(context.Background(), golden.Snapshot(c)); err != nil {
		t.Fatal(err)
	}
}

func usedPorts(d *Datapath) (n uint32) {
	for i := range d.t.Ports.Values {
		n += d.t.Ports.Values[i].Used
	}
	return n
}

// TestMappingsOutliveTheProcess opens the tables of a datapath again, renews and ends a mapping, and removes the
// rule of another one.
func TestMappingsOutliveTheProcess(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	yaml := func(more string) string {
		return "nat:\n  - {name: office, type: snat, source: [10.0.0.0/24], out: wan0, to: [203.0.113.1]" + more + "}\ntables: {flows: 4096, flows6: 4096}\n"
	}
	d := mappingGateway(t, mappingLab(t), yaml(", pcp: true"))
	var want []datapath.Mapping
	for i, p := range []flow.Protocol{flow.TCP, flow.UDP} {
		m, err := d.Map(datapath.Mapping{Rule: "office", Protocol: p, Inside: netip.MustParseAddrPort("10.0.0.2:3000"), Outside: netip.MustParseAddrPort("0.0.0.0:0"),
			Nonce: [12]byte{1, 2, 3}, Expires: time.Duration(i+1) * time.Hour}, false)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, m)
	}
	epoch := d.Epoch()
	if now := kernel.SinceBoot(); epoch > now || epoch < now-time.Hour {
		t.Errorf("the epoch began at %v, now is %v", epoch, now)
	}
	second := &Datapath{opt: d.opt, ns: d.ns, cookie: d.cookie, hz: d.hz, regions: map[uint32]table.Region{}, attached: map[attachPoint]*attachment{}}
	t.Cleanup(func() { second.release() })
	time.Sleep(1100 * time.Millisecond) // the epoch counts seconds: a restart would change it
	putConfig(t, second, yaml(", pcp: true"))
	expect := func(want []datapath.Mapping) {
		t.Helper()
		got, err := second.Mappings()
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(got, func(a, b datapath.Mapping) int { return int(a.Protocol) - int(b.Protocol) })
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("mappings\n%v\nwant\n%v", got, want)
		}
	}
	expect(want)
	want[0].Expires += time.Hour
	if err := errors.Join(second.Renew(want[0]), second.Unmap(want[1])); err != nil {
		t.Fatal(err)
	}
	expect(want[:1])
	if err := second.Renew(want[1]); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a mapping that has ended is renewed: %v", err)
	}
	if second.Epoch() != epoch {
		t.Errorf("the epoch was %v and is %v, though nothing was lost", epoch, second.Epoch())
	}
	if s := bindingOf(second, want[1]); s != wire.EntryHold {
		t.Errorf("the binding of a mapping that was ended is in state %d", s)
	}
	if s := bindingOf(second, want[0]); s != wire.EntryLive {
		t.Errorf("the binding of a mapping is in state %d", s)
	}
	putConfig(t, second, yaml(""))
	expect(nil)
	if s := bindingOf(second, want[0]); s != wire.EntryHold {
		t.Errorf("the binding of a mapping whose rule allows none any more is in state %d", s)
	}
	if second.Epoch() == epoch {
		t.Error("a mapping was lost, and the epoch is the same")
	}
}

// bindingOf returns the state of the entry that binds an inside IPv4 endpoint.
func bindingOf(d *Datapath, m datapath.Mapping) uint8 {
	for i := range d.t.Flows4.Values {
		k := &d.t.Flows4.Values[i].Key
		if k.Kind == wire.KindBinding && k.L4Proto == uint8(m.Protocol) && wire.PortOf(k.Sport) == m.Inside.Port() {
			return k.State
		}
	}
	return wire.EntryFree
}
