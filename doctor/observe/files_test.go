// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"fmt"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

func TestParseLog(t *testing.T) {
	got := ParseLog([]string{
		"4,100,5000000,-;nf_conntrack: nf_conntrack: table full in netns 4026532876, dropping packet\n SUBSYSTEM=x",
		"4,101,6000000,-;nf_conntrack: nf_conntrack: table full, dropping packet",
		"6,102,7000000,-;eth0: link up",
		"4,103,8000000,-;nf_conntrack: expectation table full",
		"broken",
	}, time.Minute)
	for i := range got {
		if ago := time.Since(got[i].At); ago < got[i].Age || ago > got[i].Age+time.Minute {
			t.Errorf("%q was written at %v, %v ago", got[i].Text, got[i].At, got[i].Age)
		}
		got[i].At = time.Time{}
	}
	want := []LogLine{
		{Age: 55 * time.Second, Text: "nf_conntrack: nf_conntrack: table full in netns 4026532876, dropping packet", Netns: 4026532876},
		{Age: 54 * time.Second, Text: "nf_conntrack: nf_conntrack: table full, dropping packet"},
		{Age: 52 * time.Second, Text: "nf_conntrack: expectation table full"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseNetlink(t *testing.T) {
	const head = "sk               Eth Pid        Groups   Rmem\n"
	for line, want := range map[string]int{
		"0 12  100        00000001 0\n": 1, // new flows
		"0 12  100        00000007 0\n": 1, // all
		"0 12  100        00000004 0\n": 0, // destroyed flows only: cheap
		"0 0   100        00000001 0\n": 0, // routes
	} {
		if got := parseNetlink(head + line); got != want {
			t.Errorf("%q: %d, want %d", line, got, want)
		}
	}
}

func TestHexEndpoint(t *testing.T) {
	for in, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"B80D0120000000000000000001000000:0035": "[2001:db8::1]:53",
		"0000000000000000FFFF00000100007F:0016": "127.0.0.1:22",
	} {
		if got, ok := hexEndpoint(in); !ok || got.String() != want {
			t.Errorf("%s: %s %v, want %s", in, got, ok, want)
		}
	}
	if _, ok := hexEndpoint("xyz"); ok {
		t.Error("nonsense was read")
	}
}

func TestParseInterrupts(t *testing.T) {
	got := parseInterrupts("           CPU0       CPU1\n 24:       5000       7   PCI-MSI 65536-edge      virtio0-input.0\n" +
		" 25:  1 2 PCI-MSI 1-edge ahci\nLOC:    1000000    1000000   Local timer interrupts\n")
	if diff := cmp.Diff(map[string][]uint64{"virtio0-input.0 24:": {5000, 7}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestRingCounters(t *testing.T) {
	for name, want := range map[string]bool{
		"rx_missed_errors": true, "rx_no_buffer_count": true, "rx_out_of_buffer": true, "port.rx_dropped": true,
		"tx_dropped": false, "rx0_out_of_buffer": false, "rx_queue_0_drops": false, "rx_xdp_drop": false, "rx_bytes": false,
	} {
		if got := ringCounter(name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestProcessFiles(t *testing.T) {
	limits := func(n string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte("Limit                     Soft Limit           Hard Limit           Units\nMax open files            " + n + "                 4096                 files\n")}
	}
	root := fstest.MapFS{
		"proc/7/limits": limits("1024"), "proc/7/comm": {Data: []byte("nginx\n")}, "proc/7/fd/0": {}, "proc/7/fd/1": {}, "proc/7/fd/2": {},
		"proc/8/limits": limits("64"), "proc/8/comm": {Data: []byte("small\n")}, "proc/8/fd/0": {}, "proc/8/fd/1": {},
		"proc/10/limits": limits("1"), "proc/10/comm": {Data: []byte("sshd\n")}, "proc/10/fd/0": {}, "proc/10/fd/1": {},
		"proc/11/limits": limits("4"), "proc/11/comm": {Data: []byte("sandbox\n")}, "proc/11/fd/0": {}, "proc/11/fd/1": {},
		"proc/12/limits": limits("64"), "proc/12/comm": {Data: []byte("lowered\n")},
		"proc/9/limits": limits("unlimited"), "proc/9/fd/0": {},
		"proc/self/fd/0": {},
	}
	for i := range 70 {
		root[fmt.Sprint("proc/12/fd/", i)] = &fstest.MapFile{}
	}
	if got, want := worstFiles(root), (ProcessFiles{Name: "small", PID: 8, Open: 2, Limit: 64, Hard: 4096}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestInterfaces reads what the kernel says of a veth and of hardware, if there is any.
func TestInterfaces(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "vitalslink", Nodes: []lab.NodeSpec{{Name: "a"}, {Name: "b"}},
		Links: []lab.LinkSpec{{A: lab.End{Node: "a", Iface: "x", GRO: true, Addresses: []string{"192.0.2.1/24"}}, B: lab.End{Node: "b", Iface: "y", Addresses: []string{"192.0.2.2/24"}}}}})
	err := l.Node("a").Do(func() error {
		links, err := readLinks()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(links, func(l Link) bool { return l.Name == "x" })
		if i < 0 || links[i].Kind != "veth" || !links[i].Up || links[i].GRO != 1 || links[i].LRO != 0 || links[i].Index == 0 {
			t.Errorf("%+v", links)
		}
		if links[i].XDPKnown == (netdev.XDPFeatures(nil) == nil) {
			t.Errorf("features of %+v", links[i])
		}
		tool, err := openEthtool()
		if err != nil {
			return err
		}
		defer tool.close()
		if got := tool.feature("x", "rx-gro"); got != 1 {
			t.Errorf("rx-gro is %d", got)
		}
		if got := tool.feature("x", "rx-udp-gro-forwarding"); got != 0 {
			t.Errorf("rx-udp-gro-forwarding is %d, want off", got)
		}
		if got := tool.feature("x", "no such feature"); got != -1 {
			t.Errorf("an unknown feature is %d", got)
		}
		if names := tool.names("x", ethSetStats); len(names) == 0 {
			t.Error("a veth has counters of its own, none were read")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
