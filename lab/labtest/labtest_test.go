// SPDX-License-Identifier: Apache-2.0

package labtest

import "testing"

func TestKernelVersions(t *testing.T) {
	for _, tc := range []struct {
		have, want string
		enough     bool
	}{
		{"6.1.0-28-amd64", "6.1", true},
		{"6.1.0-28-amd64", "6.1.1", false},
		{"6.18.44-fc-v595", "6.6", true},
		{"5.15.0", "6.1", false},
		{"6.6", "6.6", true},
		{"10.0-rc1", "6.18", true},
	} {
		if got := atLeast(tc.have, tc.want); got != tc.enough {
			t.Errorf("kernel %s is at least %s: %t, want %t", tc.have, tc.want, got, tc.enough)
		}
	}
}

func TestRequire(t *testing.T) {
	lacking := Need{func() (string, bool) { return "a unicorn", false }}
	tooOld := Need{func() (string, bool) { return "kernel 99", true }}
	for _, tc := range []struct {
		name string
		ci   string
		need Need
		skip bool
		fail bool
	}{
		{"lacking", "", lacking, true, false},
		{"lacking on CI", "true", lacking, false, true},
		{"too old", "", tooOld, true, false},
		{"too old on CI", "true", tooOld, true, false},
		{"present", "true", Need{func() (string, bool) { return "", false }}, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("CI", tc.ci)
			r := &recorder{TB: t}
			Require(r, tc.need)
			if r.skipped != tc.skip || r.failed != tc.fail {
				t.Errorf("skipped %t, failed %t; want %t, %t", r.skipped, r.failed, tc.skip, tc.fail)
			}
		})
	}
}

// recorder records the calls of a test.
type recorder struct {
	testing.TB
	skipped, failed bool
}

func (r *recorder) Helper()               {}
func (r *recorder) Skipf(string, ...any)  { r.skipped = true }
func (r *recorder) Fatalf(string, ...any) { r.failed = true }
