// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
)

// calmUplinks are twoUplinks with probes that a slow machine answers in time.
var calmUplinks = strings.NewReplacer("interval: 200ms", "interval: 1s, timeout: 900ms", "fall: 2", "fall: 3", "rise: 2", "rise: 1").Replace(twoUplinks)

// cutBeyond drops the packets of the office behind a provider's router, and returns the repair. The router itself
// answers.
func (o *uplinkOffice) cutBeyond(provider string) (repair func()) {
	o.t.Helper()
	nft(o.t, o.Node(provider), "table inet beyond { chain passing { type filter hook forward priority 0; drop; }; }", "-f", "-")
	return func() { nft(o.t, o.Node(provider), "", "delete", "table", "inet", "beyond") }
}

// TestUplinkFaults cuts uplinks behind their providers' routers: one, repeatedly, and both.
func TestUplinkFaults(t *testing.T) {
	o := newUplinkOffice(t, calmUplinks)
	o.becomes("carrying standby")
	repair := o.cutBeyond("fiber")
	o.becomes("down carrying")
	o.datagrams(radio4, "after a cut behind the router")
	moved := o.dial("10.1.10.20:7001", server4+":7")
	for range 2 {
		o.asks(moved, radio4, "on the other uplink, while the first is down")
		repair()
		o.becomes("carrying standby")
		o.asks(moved, radio4, "on the other uplink, while the first works again")
		repair = o.cutBeyond("fiber")
		o.becomes("down carrying")
	}
	for range 4 { // without a wait for the probes
		repair()
		repair = o.cutBeyond("fiber")
		o.asks(moved, radio4, "on the other uplink, during changes of the first")
	}
	repairRadio := o.cutBeyond("radio")
	o.becomes("down down")
	if got := output(t, o.d, "show uplinks"); !strings.Contains(got, "it still gets new connections") {
		t.Errorf("no uplink works, and the reason does not name the use of the first:\n%s", got)
	}
	repairRadio()
	o.becomes("down carrying")
	o.datagrams(radio4, "after the repair of one of two")
	repair()
	o.becomes("carrying standby")
	o.datagramsTo("203.0.113.21:5060", fiber4, "after the repair of both")
	o.noForeign()
}

// TestDaemonEndsDuringCut kills and restarts the daemon while an uplink is down. An invalid configuration changes
// nothing, and stop removes all rules and routes.
func TestDaemonEndsDuringCut(t *testing.T) {
	o := newUplinkOffice(t, calmUplinks)
	gateway := o.Node("gateway")
	defaults := mainDefaults(t, gateway)
	o.becomes("carrying standby")
	repair := o.cut("fiber", "")
	o.becomes("down carrying")
	moved := o.dial("10.1.10.20:7001", server4+":7")
	o.asks(moved, radio4, "during the cut")

	kept, rules := ownRules(t, gateway), nft(t, gateway, "", "-s", "list", "ruleset")
	unchanged := func(when string) {
		t.Helper()
		if got := ownRules(t, gateway); got != kept {
			t.Errorf("%s, rules and routes:\n%s\nbefore:\n%s", when, got, kept)
		}
	}
	for _, refused := range []string{
		strings.Replace(calmUplinks, "interface: wan1", "interface: wan0", 1),
		strings.Replace(calmUplinks, "type: masquerade", "type: npt66", 1),
		"datapath: ebpf\n" + calmUplinks,
	} {
		cmd := o.d.Command(t.Context(), "apply", "-")
		cmd.Stdin = strings.NewReader(refused)
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Errorf("accepted:\n%s\n%s", refused, out)
		}
		unchanged("after an invalid configuration")
		if got := nft(t, gateway, "", "-s", "list", "ruleset"); got != rules {
			t.Errorf("after an invalid configuration:\n%s\nbefore:\n%s", got, rules)
		}
	}

	if err := o.d.Kill(); err != nil {
		t.Fatal(err)
	}
	unchanged("after kill -9")
	o.asks(moved, radio4, "without a daemon")
	o.asks(o.dial("10.1.10.20:7002", server4+":7"), radio4, "opened without a daemon")
	if err := o.d.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.becomes("down carrying")
	unchanged("after the restart")
	o.asks(moved, radio4, "after the restart")
	o.asks(o.dial("10.1.10.20:7003", server4+":7"), radio4, "opened after the restart")

	repair()
	o.becomes("carrying standby")
	o.asks(moved, radio4, "after the repair")
	o.asks(o.dial("10.1.10.20:7004", server4+":7"), fiber4, "after the repair")
	o.noForeign()
	repair = o.cut("fiber", "")
	o.becomes("down carrying")
	output(t, o.d, "stop")
	if got := ownRules(t, gateway); strings.TrimSpace(got) != "" {
		t.Errorf("after stop:\n%s", got)
	}
	if got := nft(t, gateway, "", "list", "tables"); strings.Contains(got, "sluice") {
		t.Errorf("after stop:\n%s", got)
	}
	if got := mainDefaults(t, gateway); got != defaults {
		t.Errorf("default routes after stop:\n%s\nbefore:\n%s", got, defaults)
	}
	repair()
}

// mainDefaults returns the default routes of the main table.
func mainDefaults(t *testing.T, n *lab.Node) string {
	t.Helper()
	out, err := n.Command(t.Context(), "ip", "route", "show", "default").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}
