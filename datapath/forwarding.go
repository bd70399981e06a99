// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Sysctl reads a setting in the calling thread's network namespace, "" when it is not there.
// As in sysctl(8), a dot in a name of an interface is written as a slash.
func Sysctl(key string) string {
	text, _ := os.ReadFile(filepath.Join("/proc/sys", strings.NewReplacer(".", "/", "/", ".").Replace(key)))
	return strings.TrimSpace(string(text))
}

// ForwardingOff says by which setting, as read gives them, the kernel forwards nothing that
// arrives on an interface, and how that is changed; "" when it does forward.
func ForwardingOff(read func(key string) string, iface string, v6 bool) string {
	name, all, own := "IPv4", "net.ipv4.ip_forward", "net.ipv4.conf.%s.forwarding"
	if v6 {
		name, all, own = "IPv6", "net.ipv6.conf.all.forwarding", "net.ipv6.conf.%s.forwarding"
	}
	own = fmt.Sprintf(own, strings.ReplaceAll(iface, ".", "/"))
	allOff, ownOff := read(all) == "0", read(own) == "0"
	if !ownOff && !(v6 && allOff) { // IPv4 asks the interface alone, to which "all" is copied
		return ""
	}
	key := own
	if allOff {
		key = all
	}
	return fmt.Sprintf("%s is 0: the kernel forwards no %s packets that arrive on %s; write 1 with \"sysctl -w %s=1\"", key, name, iface, key)
}
