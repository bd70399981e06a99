// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/config"
)

// TestDiffMerges: merging the result of Diff into the first configuration gives the second one, and vice versa.
// Merging it into the second one changes nothing.
func TestDiffMerges(t *testing.T) {
	var all []*config.Config
	files, _ := filepath.Glob("testdata/*.txt")
	examples, _ := filepath.Glob("../examples/*.yaml")
	for _, file := range append(files, examples...) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text, _, _ := strings.Cut(string(data), divider)
		if c, err := config.Decode(file, []byte(text)); err == nil {
			all = append(all, c)
		}
	}
	if len(all) < 10 {
		t.Fatalf("%d configurations to compare", len(all))
	}
	for _, a := range all {
		before := marshal(t, a)
		for _, b := range all {
			edits := config.Diff(a, b)
			got, needed, conflicts, err := config.Merge(a, edits)
			if err != nil || len(conflicts) > 0 {
				t.Fatalf("%v %v\n%v", err, conflicts, edits)
			}
			if diff := cmp.Diff(marshal(t, b), marshal(t, got)); diff != "" {
				t.Errorf("by %d edits (-want +got):\n%s", len(edits), diff)
			}
			if len(needed) != len(edits) {
				t.Errorf("%d of %d edits were needed", len(needed), len(edits))
			}
			again, needed, conflicts, err := config.Merge(b, edits)
			if err != nil || len(conflicts) > 0 || len(needed) > 0 || marshal(t, again) != marshal(t, b) {
				t.Errorf("merged again: %v, conflicts %v, needed %v", err, conflicts, needed)
			}
		}
		if marshal(t, a) != before {
			t.Fatal("Merge changed its argument")
		}
	}
}

func marshal(t *testing.T, c *config.Config) string {
	t.Helper()
	b, err := config.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestMerge has a changed file, and edits that are older than the change.
func TestMerge(t *testing.T) {
	service := func(name string, more ...string) string {
		return "  - {name: " + name + ", listen: [{address: 192.0.2." + name[1:] + ", ports: [80]}], protocol: tcp, mode: dnat, " +
			strings.Join(append(more, "backends: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]"), ", ") + "}\n"
	}
	base := "services:\n" + service("s1") + service("s2") + service("s3")
	for _, c := range []struct {
		name, changed, file string
		want                string   // services and their backends
		conflicts           []string // paths
	}{
		{"other objects", "services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"),
			"services:\n" + service("s1") + service("s3") + service("s4"), "s1:lc s3:rr s4:rr", nil},
		{"other keys of one object", "services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"),
			"services:\n" + service("s1", "mss-clamp: true") + service("s2") + service("s3"), "s1:lc s2:rr s3:rr", nil},
		{"the same change", "services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"),
			"services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"), "s1:lc s2:rr s3:rr", nil},
		{"another change of the same key", "services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"),
			"services:\n" + service("s1", "scheduler: wrr") + service("s2") + service("s3"), "", []string{"services/s1/scheduler"}},
		{"changed here, removed there", "services:\n" + service("s1", "scheduler: lc") + service("s2") + service("s3"),
			"services:\n" + service("s2") + service("s3"), "", []string{"services/s1/scheduler"}},
		{"removed here, changed there", "services:\n" + service("s2") + service("s3"),
			"services:\n" + service("s1", "scheduler: wrr") + service("s2") + service("s3"), "", []string{"services/s1"}},
		{"removed both", "services:\n" + service("s2") + service("s3"),
			"services:\n" + service("s2") + service("s3"), "s2:rr s3:rr", nil},
		{"added both, not alike", base + service("s5", "scheduler: lc"),
			base + service("s5", "scheduler: wrr"), "", []string{"services/s5"}},
		{"another order here, a new one there", "services:\n" + service("s3") + service("s2") + service("s1"),
			"services:\n" + service("s1") + service("s9") + service("s2") + service("s3"), "s3:rr s2:rr s1:rr s9:rr", nil},
		{"two orders", "services:\n" + service("s3") + service("s2") + service("s1"),
			"services:\n" + service("s2") + service("s1") + service("s3"), "", []string{"services/@order"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			decode := func(text string) *config.Config {
				cfg, err := config.Decode("f.yaml", []byte(text))
				if err != nil {
					t.Fatal(err)
				}
				return cfg
			}
			merged, _, conflicts, err := config.Merge(decode(c.file), config.Diff(decode(base), decode(c.changed)))
			if err != nil {
				t.Fatal(err)
			}
			var paths []string
			for _, conflict := range conflicts {
				paths = append(paths, conflict.Path)
			}
			if !slices.Equal(paths, c.conflicts) {
				t.Fatalf("conflicts %q, want %q", paths, c.conflicts)
			}
			if merged == nil {
				return
			}
			var got []string
			for _, s := range merged.Services {
				got = append(got, s.Name+":"+string(s.Scheduler))
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("got %s, want %s", strings.Join(got, " "), c.want)
			}
		})
	}
}

// TestMergeRefuses: an edit that does not fit the model is an error, not a conflict. A merged configuration is
// validated like a file.
func TestMergeRefuses(t *testing.T) {
	c, err := config.Decode("f.yaml", []byte("services: []"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []config.Edit{
		{Path: "nonsense", After: "1"},
		{Path: "datapath/x", Before: "auto", After: "ebpf"},
		{Path: "datapath", Before: "auto", After: "{"},
		{Path: "datapath", Before: "auto", After: "dpdk"},
		{Path: "services/web", After: "{name: web, protocol: tcp, mode: dnat}"},
	} {
		if _, _, _, err := config.Merge(c, []config.Edit{e}); err == nil {
			t.Errorf("%v is accepted", e)
		}
	}
}
