// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
)

const (
	equalRules = "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -s 10.1.0.0/16 -o wan0 -j MASQUERADE\nCOMMIT\n"
	lossyRules = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080\nCOMMIT\n"
)

// TestImport: the imported configuration is valid, and the exit code reports lost parts.
func TestImport(t *testing.T) {
	for _, tc := range []struct {
		name, source, text string
		code               int
		out, err           string
	}{
		{"equal", "iptables", equalRules, exitOK, "type: masquerade", "1 object: all lines have an equivalent"},
		{"lossy", "iptables", lossyRules, exitLossy, "# line 3: no equivalent for a redirect", "line 3: lost\n    -A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080\n"},
		{"not of that program", "ipvs", equalRules, exitFailure, "", "sluice: -: no virtual service in it"},
		{"empty", "haproxy", "", exitFailure, "", "sluice: -: it is empty: pass /etc/haproxy/haproxy.cfg"},
	} {
		code, out, stderr := sluiceCommand(tc.text, "import", tc.source, "-")
		if code != tc.code || !strings.Contains(out, tc.out) || !strings.Contains(stderr, tc.err) || tc.out == "" && out != "" {
			t.Errorf("%s: exit %d\n%s\n%s", tc.name, code, out, stderr)
		}
		if tc.out == "" {
			continue
		}
		if _, err := config.Decode(tc.name, []byte(out)); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if code, _, stderr := sluiceCommand("", "import", "iptables", filepath.Join(t.TempDir(), "nosuch")); code != exitFailure || !strings.Contains(stderr, "no such file") {
		t.Errorf("no file: exit %d, %s", code, stderr)
	}
}

// TestImportJSON: --json prints one document with the configuration, its text and the notes.
func TestImportJSON(t *testing.T) {
	code, out, stderr := sluiceCommand(lossyRules, "import", "--json", "iptables", "-")
	var got struct {
		Source, File, YAML string
		Lost, Changed      int
		Config             map[string]any
		Notes              []struct {
			Kind, Text, Reason, Next string
			Line                     int
		}
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != exitLossy || stderr != "" {
		t.Fatalf("exit %d, %v: %s%s", code, err, out, stderr)
	}
	if got.Source != "iptables" || got.Lost != 1 || len(got.Notes) != 1 || got.Notes[0].Line != 3 || got.Notes[0].Kind != "lost" || got.Notes[0].Next == "" {
		t.Errorf("%s", out)
	}
	if _, err := config.Decode("import", []byte(got.YAML)); err != nil {
		t.Error(err)
	}
}

// TestImportRest: --rest writes the rules that must remain.
func TestImportRest(t *testing.T) {
	rest := filepath.Join(t.TempDir(), "keep.rules")
	for _, tc := range []struct{ text, want string }{
		{equalRules, ""},
		{strings.Replace(lossyRules, "COMMIT\n", "-A PREROUTING -d 192.0.2.1/32 -p tcp -m tcp --dport 25 -j DNAT --to-destination 10.0.0.2\nCOMMIT\n", 1), lossyRules},
	} {
		sluiceCommand(tc.text, "import", "iptables", "-", "--rest", rest)
		got, err := os.ReadFile(rest)
		if err != nil || string(got) != tc.want {
			t.Errorf("%v: got %q, want %q", err, got, tc.want)
		}
	}
	code, _, stderr := sluiceCommand(equalRules, "import", "iptables", "-", "--rest", filepath.Join(rest, "below"))
	if code != exitFailure || !strings.Contains(stderr, "rest of the rules") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// TestImportAddresses: with --addresses the import uses the host's own addresses. The text form of nft is
// equivalent to its JSON.
func TestImportAddresses(t *testing.T) {
	rules := "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 192.0.2.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.2\nCOMMIT\n"
	file := filepath.Join(t.TempDir(), "addr.json")
	if err := os.WriteFile(file, []byte(`[{"ifname":"wan0","addr_info":[{"local":"192.0.2.1","prefixlen":24}]},{}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := sluiceCommand(rules, "import", "iptables", "-"); code != exitLossy || !strings.Contains(stderr, "the output of 'ip -j addr'") {
		t.Errorf("without addresses: exit %d\n%s", code, stderr)
	}
	if code, _, stderr := sluiceCommand(rules, "import", "iptables", "-", "--addresses", file); code != exitOK || !strings.Contains(stderr, "translations: 1 of 1") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	if err := os.WriteFile(file, []byte("1: lo: <LOOPBACK,UP>"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := sluiceCommand(rules, "import", "iptables", "-", "--addresses", file); code != exitFailure || !strings.Contains(stderr, "'ip -j addr'") {
		t.Errorf("not JSON: exit %d\n%s", code, stderr)
	}
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Nftables)
	text := "table ip nat {\n chain post { type nat hook postrouting priority srcnat;\n ip saddr 10.0.0.0/24 oifname \"wan0\" masquerade\n }\n}\n"
	if code, out, stderr := sluiceCommand(text, "import", "nft", "-"); code != exitOK || !strings.Contains(out, "source: [10.0.0.0/24]") {
		t.Errorf("text of nft: exit %d\n%s%s", code, out, stderr)
	}
}

// TestImportVerify: --verify compares, and refuses sources without rules to load.
func TestImportVerify(t *testing.T) {
	if code, _, stderr := sluiceCommand("listen a\n bind 192.0.2.1:80\n server b 10.0.0.1:80\n", "import", "haproxy", "-", "--verify"); code != exitFailure || !strings.Contains(stderr, "cannot run haproxy") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack, labtest.BPF, labtest.Tool("iptables-nft-restore"))
	code, _, stderr := sluiceCommand(equalRules, "import", "iptables", "-", "--verify")
	if code != exitOK || !strings.Contains(stderr, "verify: 400 probes") || !strings.Contains(stderr, " 0 not\n") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
}
