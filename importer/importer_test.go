// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
)

var update = flag.Bool("update", false, "rewrite the expected output of testdata")

// sample is a file below testdata/SOURCE: the configuration of a program.
type sample struct {
	source, name, path string
	options            importer.Options
	text               string
}

// samples reads all samples. Options of an import are in a file with the same name: NAME.outside.
func samples(t *testing.T) (list []sample) {
	t.Helper()
	for _, s := range importer.Sources {
		files, err := filepath.Glob(filepath.Join("testdata", s.Name, "*.in"))
		if err != nil || len(files) == 0 {
			t.Fatal("no samples of ", s.Name, err)
		}
		for _, f := range files {
			list = append(list, readSample(t, s.Name, strings.TrimSuffix(filepath.Base(f), ".in")))
		}
	}
	return list
}

func readSample(t *testing.T, source, name string) sample {
	t.Helper()
	s := sample{source: source, name: name, path: filepath.Join("testdata", source, name)}
	data, err := os.ReadFile(s.path + ".in")
	if err != nil {
		t.Fatal(err)
	}
	s.text = string(data)
	if outside, err := os.ReadFile(s.path + ".outside"); err == nil {
		s.options.Outside = strings.Fields(string(outside))
	}
	return s
}

// TestSamples imports each sample. The configuration, which must be valid, and the report must equal the files
// with the same name. -update writes them.
func TestSamples(t *testing.T) {
	for _, s := range samples(t) {
		t.Run(s.source+"/"+s.name, func(t *testing.T) {
			r, err := importer.Import(s.source, s.text, s.options)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := config.Decode(s.name, []byte(r.YAML)); err != nil {
				t.Errorf("not valid: %v\n%s", err, r.YAML)
			}
			everyLine(t, s, r)
			places(t, s, r)
			carried(t, s.name, r.YAML)
			var report strings.Builder
			if err := r.Report(&report, true); err != nil {
				t.Fatal(err)
			}
			for _, l := range strings.Split(report.String(), "\n") {
				if len([]rune(l)) > 80 {
					t.Errorf("more than 80 columns: %s", l)
				}
			}
			expect(t, s.path+".yaml", r.YAML)
			expect(t, s.path+".report", report.String())
			if r.Rest != "" {
				expect(t, s.path+".rest", r.Rest)
			}
		})
	}
}

// carried expects nftables to support the objects that the import assigns to it, and the firewall rules.
func carried(t *testing.T, name, yaml string) {
	t.Helper()
	c, err := config.Decode(name, []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	n := (*nft.Datapath)(nil)
	forced := func(own config.DatapathChoice) bool {
		return own == config.DatapathNftables || own == "" && c.Datapath == config.DatapathNftables
	}
	for i := range c.Services {
		if err := n.CarriesService(&c.Services[i]); err != nil && forced(c.Services[i].Datapath) {
			t.Errorf("service %s: %v", c.Services[i].Name, err)
		}
	}
	for i := range c.NAT {
		if err := n.CarriesNAT(&c.NAT[i]); err != nil && forced(c.NAT[i].Datapath) {
			t.Errorf("nat %s: %v", c.NAT[i].Name, err)
		}
	}
	for i := range c.Firewall.Rules {
		if err := n.CarriesRule(&c.Firewall.Rules[i]); err != nil {
			t.Errorf("rule %s: %v", c.Firewall.Rules[i].Name, err)
		}
	}
}

// everyLine expects each rule to be the origin of an object, or to have a note.
func everyLine(t *testing.T, s sample, r *draft.Result) {
	said := map[int]bool{}
	for _, n := range r.Notes {
		said[n.Line] = true
	}
	for _, o := range r.Objects {
		for _, n := range o.Lines {
			said[n] = true
		}
	}
	for i, l := range strings.Split(s.text, "\n") {
		if strings.HasPrefix(l, "-A ") && !strings.Contains(l, "-j ") && !strings.Contains(l, "-g ") && !said[i+1] {
			t.Errorf("nothing is said of line %d: %s", i+1, l)
		}
	}
}

// places expects each line of the source to be classified once, and the remaining rules to be in the text of the
// rest.
func places(t *testing.T, s sample, r *draft.Result) {
	t.Helper()
	at := map[int]draft.Disposition{}
	for _, l := range r.Lines {
		if at[l.Number] != "" {
			t.Errorf("line %d has two places", l.Number)
		}
		at[l.Number] = l.Place
	}
	if s.source != "iptables" {
		return
	}
	kept := map[string]bool{}
	for _, l := range strings.Split(r.Rest, "\n") {
		kept[l] = true
	}
	for i, l := range strings.Split(s.text, "\n") {
		if l == "" || l[0] == '#' {
			continue
		}
		if at[i+1] == "" {
			t.Errorf("line %d has no place: %s", i+1, l)
		}
		if l[0] == '-' && at[i+1] == draft.InRest && !kept[l] {
			t.Errorf("line %d is not in the rest: %s", i+1, l)
		}
	}
}

// TestRefusedRules: the rules of an object that validation refuses are in the rest. Forwarded packets then pass
// nftables.
func TestRefusedRules(t *testing.T) {
	const refused = "-A POSTROUTING -j MASQUERADE"
	text := "*nat\n:PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n-A PREROUTING -d 192.0.2.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.2\n" + refused + "\nCOMMIT\n"
	r, err := importer.Import("iptables", text, importer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.Rest, refused+"\n") || strings.Contains(r.Rest, "DNAT") || r.Config.Datapath != config.DatapathNftables || r.Count(draft.Lost) == 0 {
		t.Errorf("rest:\n%s\n%s", r.Rest, r.YAML)
	}
}

// TestPolicy: -P among the rules is the policy. A policy that became a firewall rule does not drop in the rest.
func TestPolicy(t *testing.T) {
	text := "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n-P INPUT DROP\nCOMMIT\n" +
		"*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080\nCOMMIT\n"
	r, err := importer.Import("iptables", text, importer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(r.Rest, "INPUT DROP") || strings.Contains(r.YAML, "not understood") {
		t.Errorf("rest:\n%s\n%s", r.Rest, r.YAML)
	}
	if rules := r.Config.Firewall.Rules; len(rules) != 3 || rules[2].Action != config.ActionDrop {
		t.Errorf("%s", r.YAML)
	}
}

func expect(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got):\n%s", path, d)
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct{ source, text, want string }{
		{"iptables", "", "it is empty: pass the output of 'iptables-save'"},
		{"iptables", "a\x00b", "it is not text"},
		{"haproxy", strings.Repeat("listen a\n", importer.MaxLines+1), "more than 500000 lines"},
		{"iptables", "Chain INPUT (policy ACCEPT)\ntarget prot opt source destination\n", "no table in it: pass the output of iptables-save"},
		{"nftables", "table ip nat {\n}\n", "unshare -rn sh -c 'nft -f FILE && nft -j list ruleset'"},
		{"nftables", `{"nftables": []}`, "no rules in it"},
		{"ipvs", "IP Virtual Server version 1.2.1 (size=4096)\n", "ipvsadm -L is another form"},
		{"keepalived", "global_defs", "no block in it"},
		{"keepalived", "virtual_server 192.0.2.1 80 {\n", "line 1: the brace is not closed"},
		{"keepalived", "}\n", "line 1: a closing brace has no opening brace"},
		{"haproxy", "bind :80\n", "line 1: \"bind\" is outside of all sections"},
		{"nftlb", "{\"farms\": [\n", "line 1: not JSON: the text is incomplete"},
		{"nftlb", "{}", "no farm in it"},
		{"docker", "[]", "docker ps does not print addresses"},
		{"docker", "CONTAINER ID   IMAGE\n", "pass the output of 'docker inspect $(docker ps -q)'"},
		{"nosuch", "x", "unknown source"},
	} {
		_, err := importer.Import(tc.source, tc.text, importer.Options{})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s %q: got %v, want %q", tc.source, tc.text, err, tc.want)
		}
	}
}

// FuzzImport: no text makes an import panic or write an invalid configuration.
func FuzzImport(f *testing.F) {
	for i, s := range importer.Sources {
		files, _ := filepath.Glob(filepath.Join("testdata", s.Name, "*.in"))
		for _, file := range files {
			if data, err := os.ReadFile(file); err == nil {
				f.Add(uint8(i), string(data))
			}
		}
	}
	f.Fuzz(func(t *testing.T, n uint8, text string) {
		if len(text) > 1<<16 {
			t.Skip("larger than what is tried")
		}
		s := importer.Sources[int(n)%len(importer.Sources)]
		r, err := importer.Import(s.Name, text, importer.Options{Outside: []string{"wan0"}})
		if err != nil {
			if strings.Contains(err.Error(), "fault of sluice") {
				t.Error(err)
			}
			return
		}
		if _, err := config.Decode("imported", []byte(r.YAML)); err != nil {
			t.Errorf("not valid: %v\n%s", err, r.YAML)
		}
	})
}

// TestLargeTextsAreRefused: texts with more lines or sections than an import handles are refused with the
// limit.
func TestLargeTextsAreRefused(t *testing.T) {
	for source, text := range map[string]string{
		"haproxy":    strings.Repeat("listen a\n  bind :80\n", 300_000/2),
		"keepalived": strings.Repeat("virtual_server 192.0.2.1 80 {\n}\n", 150_000),
		"iptables":   strings.Repeat("-A INPUT -j ACCEPT\n", 600_000),
	} {
		if _, err := importer.Import(source, text, importer.Options{}); err == nil || !strings.Contains(err.Error(), "import it in parts") {
			t.Errorf("%s: %v", source, err)
		}
	}
}
