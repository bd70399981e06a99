// SPDX-License-Identifier: Apache-2.0

package netdev

import "testing"

// TestNamespacesAt: a namespace that is named twice is listed once; "all" and no name mean every namespace.
func TestNamespacesAt(t *testing.T) {
	list, err := NamespacesAt([]string{"/proc/self/ns/net", "/proc/thread-self/ns/net"})
	if err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	for _, names := range [][]string{nil, {"/proc/self/ns/net", "all"}} {
		if list, err := NamespacesAt(names); list != nil || err != nil {
			t.Errorf("%v: %v, %v", names, list, err)
		}
	}
	if _, err := NamespacesAt([]string{"no such namespace"}); err == nil {
		t.Error("an unknown name is accepted")
	}
}
