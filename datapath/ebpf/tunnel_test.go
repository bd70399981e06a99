// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
)

const tunnelsYAML = `
services:
  - {name: 4in4, listen: [{address: 192.0.2.30, ports: [44]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}
  - {name: 4in6, listen: [{address: 192.0.2.30, ports: [46]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: 6in6, listen: [{address: "2001:db8::30", ports: [66]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: gue4, listen: [{address: 192.0.2.30, ports: [80]}], protocol: tcp, mode: tunnel, tunnel: {type: gue}, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]}
  - {name: gue6, listen: [{address: "2001:db8::30", ports: [80]}], protocol: tcp, mode: tunnel, tunnel: {type: gue}, scheduler: rr, backends: [{name: a, address: "fd00:2::2"}]}
tables: {flows: 4096, flows6: 4096}
`

// TestTunnelBackends lets a backend's kernel decapsulate every kind of tunnel, set up by the lines of
// examples/tunnel-backend.sh. Connections open and transfer more than a segment.
func TestTunnelBackends(t *testing.T) {
	recipe, err := os.ReadFile("../../examples/tunnel-backend.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			backend := l.Node("s1")
			for line := range strings.Lines(string(recipe)) {
				words := strings.Fields(line)
				switch {
				case len(words) == 0 || words[0] == "#" || words[0] == "#!/bin/sh":
				case words[0] == "sysctl":
					key, value, _ := strings.Cut(words[2], "=")
					if err := backend.Sysctl(key, value); err != nil {
						t.Error(err)
					}
				default:
					out, err := backend.Command(t.Context(), words[0], words[1:]...).CombinedOutput()
					if strings.Contains(string(out), "Unknown device type") || strings.Contains(string(out), "not supported") {
						t.Skipf("this kernel unwraps no tunnels: %s%s", line, out)
					}
					if err != nil {
						t.Fatalf("%s%v: %s", line, err, out)
					}
				}
			}
			for _, port := range []string{":44", ":46", ":66", ":80"} {
				mirror(t, backend, port)
			}
			d := gateway(t, l.Node("gateway"), hook, tunnelsYAML)
			for _, to := range []string{"192.0.2.30:44", "192.0.2.30:46", "[2001:db8::30]:66", "192.0.2.30:80", "[2001:db8::30]:80"} {
				c := transfer(t, l.Node("client"), to)
				if err := roundTrip(c); err != nil {
					t.Errorf("%s: %v\n%s", to, err, describeReasons(d))
				} else if err := sendMuch(c); err != nil {
					t.Errorf("%s, much: %v\n%s", to, err, describeReasons(d))
				}
			}
		})
	}
}
