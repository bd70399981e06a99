// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/capacity"
)

// TestTunesSysctlsAlone wants every profile and every planned load to keep to settings of
// this list: no mitigation, no offload, no MTU, no forwarding.
func TestTunesSysctlsAlone(t *testing.T) {
	known := strings.Fields(`net.core.netdev_budget net.core.netdev_max_backlog net.core.somaxconn
		net.ipv4.ip_local_port_range net.ipv4.ip_local_reserved_ports net.ipv4.tcp_max_syn_backlog net.ipv4.tcp_max_tw_buckets
		net.ipv4.neigh.default.gc_thresh1 net.ipv4.neigh.default.gc_thresh2 net.ipv4.neigh.default.gc_thresh3
		net.ipv6.neigh.default.gc_thresh1 net.ipv6.neigh.default.gc_thresh2 net.ipv6.neigh.default.gc_thresh3
		net.netfilter.nf_conntrack_max net.netfilter.nf_conntrack_buckets net.netfilter.nf_conntrack_acct
		net.netfilter.nf_conntrack_tcp_timeout_established net.netfilter.nf_conntrack_tcp_timeout_close_wait
		net.netfilter.nf_conntrack_udp_timeout net.netfilter.nf_conntrack_udp_timeout_stream net.netfilter.nf_conntrack_icmp_timeout`)
	s := fake(t)
	var proposals []*Proposal
	for _, profile := range Profiles {
		p, err := Propose(s, profile, Options{})
		if err != nil {
			t.Fatal(err)
		}
		proposals = append(proposals, p)
	}
	p, err := ProposeFor(s, capacity.Load{Classes: []capacity.Class{{Name: "a", Clients: 100000, Connections: 100}}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(proposals, p) {
		if len(p.Changes) == 0 {
			t.Errorf("%s changes nothing", p.Profile)
		}
		for _, c := range p.Changes {
			if !slices.Contains(known, c.Key) {
				t.Errorf("%s would set %s", p.Profile, c.Key)
			}
		}
	}
}
