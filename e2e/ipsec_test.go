// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestIPsecPoliciesAreMet adds a policy for one client, as an IKE daemon does for a remote user. The service
// moves to the datapath that applies the policy, with the connections of others. Replies to this client do not
// leave in clear text. If the operator has selected eBPF, a warning appears instead.
func TestIPsecPoliciesAreMet(t *testing.T) {
	labtest.Require(t, labtest.Root)
	t.Parallel()
	l := labtest.New(t, lab.Balancer())
	gateway, client := l.Node("gateway"), l.Node("client")
	lines, err := host.ServeLines(l.Node("s1"), "s1", "10.0.2.2:7")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lines.Stop() })
	ip(t, client, "addr add 10.0.1.77/24 dev eth0")
	const service = "  - {name: %s, listen: [{address: %s, ports: [7]}], protocol: tcp, mode: dnat, datapath: %s, backends: [{name: a, address: 10.0.2.2}]}\n"
	d := start(t, gateway, "services:\n"+fmt.Sprintf(service, "free", "192.0.2.10", "auto")+fmt.Sprintf(service, "chosen", "192.0.2.11", "ebpf"))
	on := func(want string) {
		t.Helper()
		labtest.Eventually(t, patience, "the service on "+want, func() error {
			list, err := d.Services(t.Context())
			if err == nil && (len(list) != 2 || list[0].Datapath != want || list[1].Datapath != "ebpf") {
				err = fmt.Errorf("services %+v", list)
			}
			return err
		})
	}
	dial := func(from, to string) (*host.Line, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		line, err := host.DialLine(ctx, client, netip.MustParseAddrPort(from+":0"), netip.MustParseAddrPort(to+":7"))
		if err == nil {
			t.Cleanup(func() { _ = line.Close() })
		}
		return line, err
	}
	on("ebpf")
	held, err := dial("10.0.1.2", "192.0.2.10")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial("10.0.1.77", "192.0.2.10"); err != nil {
		t.Fatal(err)
	}
	ip(t, gateway, "xfrm policy add dir out src 0.0.0.0/0 dst 10.0.1.77/32 tmpl src 10.0.1.1 dst 10.0.1.77 proto esp mode tunnel")
	on("nftables")
	if _, err := held.Ask(patience); err != nil {
		t.Errorf("a connection of another client: %v", err)
	}
	if _, err := dial("10.0.1.2", "192.0.2.10"); err != nil {
		t.Errorf("a new connection of another client: %v", err)
	}
	if _, err := dial("10.0.1.77", "192.0.2.10"); err == nil {
		t.Error("the client whose packets are to be encrypted was answered in clear text")
	}
	labtest.Eventually(t, patience, "a warning", func() error {
		status, err := d.Status(t.Context())
		if err == nil && !slices.ContainsFunc(status.Warnings, func(w string) bool {
			return strings.HasPrefix(w, "service chosen: its packets would bypass an IPsec policy")
		}) {
			err = fmt.Errorf("warnings %q", status.Warnings)
		}
		return err
	})
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}
