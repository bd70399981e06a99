// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

func TestListeners(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	line := func(local, remote, state string, uid, inode int) string {
		return fmt.Sprintf("   0: %s %s %s 00000000:00000000 00:00000000 00000000 %5d        0 %d 2 0000 0\n", local, remote, state, uid, inode)
	}
	const none, some, none6, some6 = "00000000:0000", "0900000A:0035", "00000000000000000000000000000000:0000", "B80D0120000000000000000001000000:0035"
	r := NamespaceReading{Sysctl: map[string]string{"net.ipv4.ip_local_port_range": "32768\t60999"}}
	root := fstest.MapFS{
		threadNet + "tcp": {Data: []byte(head + line("0100007F:1F90", none, "0A", 33, 1) + line("0100000A:9C40", some, "01", 0, 2) +
			line("0200000A:9C40", some, "06", 0, 2) + line("0200000A:9C41", some, "01", 0, 2) + line("0100000A:01BB", some, "01", 0, 2))},
		threadNet + "tcp6": {Data: []byte(head + line("00000000000000000000000000000000:9C41", none6, "0A", 0, 3))},
		threadNet + "udp":  {Data: []byte(head + line("00000000:CA6C", none, "07", 0, 4) + line("0100000A:9C42", some, "01", 53, 5))},
		threadNet + "udp6": {Data: []byte(head + line("00000000000000000000000000000000:9C43", none6, "07", 53, 6) +
			line("00000000000000000000000000000000:9C44", some6, "01", 53, 7))},
	}
	r.readTCP(root)
	r.readUDP(root)
	want := []Listener{
		{trace.LocalPort{Protocol: flow.TCP, Port: 8080}, 33, 1}, {trace.LocalPort{Protocol: flow.TCP, Port: 40001}, 0, 3},
		{trace.LocalPort{Protocol: flow.UDP, Port: 51820}, 0, 4}, {trace.LocalPort{Protocol: flow.UDP, Port: 40003}, 53, 6},
	}
	if diff := cmp.Diff(want, r.Listeners); diff != "" {
		t.Error(diff)
	}
	to := netip.MustParseAddrPort("10.0.0.9:53")
	remotes := map[Remote]int{{netip.MustParseAddr("10.0.0.1"), to}: 1, {netip.MustParseAddr("10.0.0.2"), to}: 2}
	if !maps.Equal(r.Remotes, remotes) {
		t.Errorf("local ports in use: %v, want %v", r.Remotes, remotes)
	}
	r.Sysctl["net.ipv4.ip_local_reserved_ports"] = "40000-40002"
	if got := r.ExposedListeners(); !slices.Equal(got, want[2:]) {
		t.Errorf("exposed %+v, want %+v", got, want[2:])
	}
}

// TestLongList wants a list that is cut to be known for one.
func TestLongList(t *testing.T) {
	for lines, cut := range map[int]bool{manySockets: false, manySockets + 1: true} {
		text := "sl\n" + strings.Repeat("0: 00000000:0000 00000000:0000 07\n", lines)
		if _, got := ReadListeners(fstest.MapFS{threadNet + "udp": {Data: []byte(text)}}); got != cut {
			t.Errorf("%d lines: cut %v", lines, got)
		}
	}
}

// TestAsked reads for which ports programs asked, where there are any in the local range.
func TestAsked(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, lab.Topology{Name: "asked", Nodes: []lab.NodeSpec{{Name: "host"}}})
	var open []io.Closer
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	listen := func(addresses ...string) {
		err := l.Node("host").Do(func() error {
			for _, address := range addresses {
				c, err := net.ListenPacket("udp", address)
				if err != nil {
					return err
				}
				open = append(open, c)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	live := NewLive(nil)
	ns, err := netdev.NamespaceAt(l.Node("host").Path())
	if err != nil {
		t.Fatal(err)
	}
	read := func() NamespaceReading {
		r, err := live.Namespace(t.Context(), ns, nil)
		if err != nil || r.AskedErr != nil {
			t.Fatal(err, r.AskedErr)
		}
		return r
	}
	listen(":53")
	if r := read(); r.Asked != nil {
		t.Errorf("%v were looked up without need", r.Asked)
	}
	listen(":0", "127.0.0.1:51820")
	if r := read(); len(r.ExposedListeners()) != 2 || !r.Asked[trace.LocalPort{Protocol: flow.UDP, Port: 51820}] || len(r.Asked) != 2 {
		t.Errorf("listeners %+v, asked for %v", r.Listeners, r.Asked)
	}
	listen("[::1]:51821") // results of earlier look-ups do not cover this socket
	if r := read(); !r.Asked[trace.LocalPort{Protocol: flow.UDP, Port: 51821}] {
		t.Errorf("asked for %v", r.Asked)
	}
}
