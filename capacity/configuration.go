// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"strings"
	"time"
)

// Setting is one kernel setting.
type Setting struct {
	Key   string `json:"key"` // as in sysctl: net.netfilter.nf_conntrack_max
	Value string `json:"value"`
	Why   string `json:"why"`
}

// Settings returns the kernel settings of the plan in the order of writing. Buckets precede the limit, so that chains
// do not grow in between.
func (p *Plan) Settings() []Setting {
	list := []Setting{
		{"net.netfilter.nf_conntrack_buckets", fmt.Sprint(p.Buckets),
			fmt.Sprintf("one for each entry: mean chain of two at a full table, %s", Bytes(p.Buckets*BucketBytes))},
		{"net.netfilter.nf_conntrack_max", fmt.Sprint(p.Entries),
			fmt.Sprintf("%d at the peak times %g, rounded up; %s when full", p.Peak, p.Load.headroom(), Bytes(p.Entries*p.EntryBytes))},
	}
	if p.NeighbourEntries > 512 {
		third := powerOfTwo(2 * p.NeighbourEntries)
		for i, v := range []uint64{third / 4, third / 2, third} {
			for _, family := range []string{"ipv4", "ipv6"} {
				list = append(list, Setting{fmt.Sprintf("net.%s.neigh.default.gc_thresh%d", family, i+1), fmt.Sprint(v),
					fmt.Sprintf("%d clients may be neighbours on one link", p.NeighbourEntries)})
			}
		}
	}
	return list
}

// SysctlFile renders the settings for /etc/sysctl.d, each with its reason.
func (p *Plan) SysctlFile() string {
	var b strings.Builder
	for _, s := range p.Settings() {
		fmt.Fprintf(&b, "# %s\n%s = %s\n", s.Why, s.Key, s.Value)
	}
	return b.String()
}

// Fragment renders the parts of a Sluice configuration that follow from the plan: the table sizes of the eBPF
// datapath and, with subscribers, the port block. It includes Sluice's default timeouts, because the table sizes
// depend on them.
func (p *Plan) Fragment() string {
	var b strings.Builder
	const most = 1 << 28 // entries of a table in the configuration
	flows := min(p.Flows, most)
	fmt.Fprintf(&b, "tables:\n  flows: %d\n  # flows6: %d  # instead, where clients have IPv6 addresses: NAT64, NAT66\n  half-open: %d\n",
		flows, flows, min(max(p.Flows/4, 1024), most))
	if n := p.NeighbourEntries; n > 0 {
		fmt.Fprintf(&b, "  clients: %d\n", min(powerOfTwo(2*n), most))
	}
	fmt.Fprintf(&b, "timeouts:\n")
	for _, t := range []struct {
		key  string
		kept time.Duration
	}{{"tcp-established", TimeoutTCPEstablished}, {"tcp-transitory", TimeoutTCPTransitory}, {"udp", TimeoutUDP}} {
		fmt.Fprintf(&b, "  %s: %s\n", t.key, strings.TrimSuffix(t.kept.String(), "0s"))
	}
	if p.PortBlock > 0 {
		fmt.Fprintf(&b, "# for the NAT rule of the subscribers:\n#   port-block: %d\n", p.PortBlock)
	}
	return b.String()
}
