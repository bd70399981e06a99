// SPDX-License-Identifier: Apache-2.0

//go:build vm

package vm

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// suite is a package with privileged tests for the oldest kernel, and its tests that are feasible under software
// emulation. With -short, the tests of short run: those of code paths that differ between kernels.
type suite struct{ pkg, run, short string }

// shortCases are a quarter of the packet cases: of each mode, each kind of NAT and each edit of packets.
const shortCases = "^(fullnat|tunnel|dsr|stateless|mss|proxy|npt66|masquerade|hairpin|rp|toa|sctp|vlan0|nat64-[e-i]|(fragments|siit|snat|dnat|limit|static)-[a-d])"

var suites = []suite{
	{"lab", ".", "TestAddressesOfEveryTopologyAnswer|TestSocketsStayInTheirNamespace|TestOffloads"},
	{"conntrack", ".", "."},
	// iptables is not in the machine.
	{"doctor/tune", "^Test([^R]|R[^e]|Re[^m])", "TestApplyAndRollBack|TestReservesServices"},
	{"trace", "TestDropCauses/^[^l]|TestAskedPorts", "TestDropCauses/^(deny-rule|rp-filter|snat-ports)$|TestAskedPorts"},
	// All but TestConditions, which makes seventy faults: that takes an hour here; and TestPrintedCommands,
	// which needs programs that are not in the machine.
	{"doctor", "^Test([^CP]|C[^o]|Co[^n]|Con[^d]|P[^r])", "TestKernelFeatures|TestNotVisible"},
	{"datapath/ebpf", "TestProgramsLoad|TestIndexIsFilled|TestServiceMoves|TestDNAT|TestFullNATMixes|TestClientAddress|TestTunnelBackends|TestPacketCases/^(xdp|tc)$",
		"TestProgramsLoad|TestIndexIsFilled|TestServiceMoves|TestTunnelBackends|TestPacketCases/^(xdp|tc)$/" + shortCases},
	{"datapath/nft", "TestFlowtable|TestHelpers|TestSCTP|TestTimeouts|TestMSSClamp", "TestFlowtable$|TestHelpers$|TestSCTP|TestTimeouts"},
}

var modules = []string{
	"veth", "dummy", "bridge", "br_netfilter", "macvlan", "tun", "sch_ingress", "cls_bpf", "act_bpf", "sch_tbf",
	"nf_conntrack", "nf_conntrack_netlink", "nf_nat", "nf_tables", "nft_ct", "nft_nat", "nft_masq", "nft_redir", "nft_chain_nat",
	"nft_numgen", "nft_hash", "nft_log", "nft_limit", "nft_connlimit", "nft_reject", "nft_reject_inet", "nft_reject_ipv4", "nft_reject_ipv6", "nft_tproxy", "nft_fib", "nft_fib_inet", "nft_objref",
	"nft_fwd_netdev", "nft_dup_netdev", "nft_flow_offload", "nf_flow_table_inet", "nft_synproxy", "nf_log_syslog",
	"nf_nat_ftp", "nf_nat_tftp", "nf_nat_sip", "nf_nat_irc", "ts_kmp", "nf_nat_amanda", "nf_nat_pptp", "nf_nat_snmp_basic",
	"ipip", "ip6_tunnel", "fou", "fou6",
}

var only = flag.String("only", "", "run the suite of this package alone, for example datapath/nft")

func TestOldestKernel(t *testing.T) {
	suites := suites
	if *only != "" {
		suites = slices.DeleteFunc(slices.Clone(suites), func(s suite) bool { return s.pkg != *only })
	}
	kernels, err := filepath.Glob("/boot/vmlinuz-6.1.*")
	if err != nil || len(kernels) == 0 {
		t.Fatalf("no 6.1 kernel in /boot (%v): make deps-dev installs it", err)
	}
	dir := t.TempDir()
	m := Machine{Kernel: kernels[0], Modules: modules, Files: map[string]string{}, Output: consoleOf(t),
		Programs: []string{"nft", "ip", "tc", "ethtool"}}
	for _, s := range suites {
		run := s.run
		if testing.Short() {
			run = s.short
		}
		name := strings.ReplaceAll(s.pkg, "/", "-") + ".test"
		binary := filepath.Join(dir, name)
		build := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, "./"+s.pkg)
		build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", s.pkg, err, out)
		}
		// Tests find their files by relative paths, as in the tree.
		m.Files["src/"+s.pkg+"/"+name] = binary
		if _, err := os.Stat("../../" + s.pkg + "/testdata"); err == nil {
			m.Files["src/"+s.pkg+"/testdata"] = "../../" + s.pkg + "/testdata"
		}
		m.Commands = append(m.Commands, "/src/"+s.pkg+"/"+name+" -test.v -test.timeout 45m -test.run '"+run+"'")
	}
	m.Files["src/testdata"], m.Files["src/examples"] = "../../testdata", "../../examples"
	ctx, cancel := context.WithTimeout(t.Context(), 58*time.Minute)
	defer cancel()
	codes, err := m.Run(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i, code := range codes {
		if code != 0 {
			t.Errorf("%s: exit code %d on %s", suites[i].pkg, code, filepath.Base(kernels[0]))
		}
	}
}

// consoleOf logs the console line by line.
func consoleOf(t *testing.T) lineWriter { return lineWriter{t} }

type lineWriter struct{ t *testing.T }

func (w lineWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}
