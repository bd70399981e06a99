// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestGlobal: others know an interface by its first proper address of a family.
func TestGlobal(t *testing.T) {
	address := func(cidr string, scope, flags int) netlink.Addr {
		ip, n, err := net.ParseCIDR(cidr)
		if err != nil {
			t.Fatal(err)
		}
		n.IP = ip
		return netlink.Addr{IPNet: n, Scope: scope, Flags: flags}
	}
	held4, held6 := address("192.0.2.9/32", unix.RT_SCOPE_LINK, 0), address("2001:db8::9/128", 0, unix.IFA_F_DEPRECATED)
	second, first := address("192.0.2.2/24", 0, unix.IFA_F_SECONDARY), address("192.0.2.1/24", 0, 0)
	link, temporary := address("fe80::1/64", unix.RT_SCOPE_LINK, 0), address("2001:db8::77/64", 0, unix.IFA_F_TEMPORARY)
	old, fresh := address("2001:db8::1/64", 0, unix.IFA_F_DEPRECATED), address("2001:db8:1::1/64", 0, 0)
	tentative, ppp := address("2001:db8::5/64", 0, unix.IFA_F_TENTATIVE), address("192.0.2.50/32", 0, 0)
	static, added := address("2001:db8::a/64", 0, unix.IFA_F_PERMANENT), address("2001:db8::b/64", 0, unix.IFA_F_PERMANENT)
	for _, c := range []struct {
		list []netlink.Addr
		v6   bool
		want string
	}{
		{[]netlink.Addr{held4, second, first}, false, "192.0.2.1"},
		{[]netlink.Addr{held4, second}, false, "192.0.2.2"},
		{[]netlink.Addr{held4, ppp}, false, "192.0.2.50"},
		{[]netlink.Addr{held4, fresh}, false, "invalid IP"},
		{[]netlink.Addr{link, tentative, held6, old, temporary, fresh, first}, true, "2001:db8:1::1"},
		{[]netlink.Addr{link, held6, old, temporary}, true, "2001:db8::77"},
		{[]netlink.Addr{link, held6, old}, true, "2001:db8::1"},
		{[]netlink.Addr{link, held6, tentative, first}, true, "invalid IP"},
		{[]netlink.Addr{added, fresh, temporary, static, link}, true, "2001:db8::a"},
		{[]netlink.Addr{fresh, address("2001:db8:2::1/64", 0, 0), link}, true, "2001:db8:1::1"},
		{[]netlink.Addr{address("192.0.2.3/24", 0, unix.IFA_F_PERMANENT), address("198.51.100.3/24", 0, unix.IFA_F_PERMANENT)}, false, "192.0.2.3"},
	} {
		if got, ok := Global(c.list, c.v6); got.String() != c.want || ok != got.IsValid() {
			t.Errorf("%v: got %s, want %s", c.list, got, c.want)
		}
	}
}
