// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"strings"
)

// The settings that turn on forwarding for all interfaces of a family.
const (
	forwardAllIPv4 = "net.ipv4.ip_forward"
	forwardAllIPv6 = "net.ipv6.conf.all.forwarding"
)

// ForwardingOff returns the setting, as read returns its value, because of which the kernel forwards
// no packets that arrive on an interface, and how to change it; "" when the kernel forwards them.
func ForwardingOff(read func(key string) string, iface string, v6 bool) string {
	name, all, own := "IPv4", forwardAllIPv4, "net.ipv4.conf.%s.forwarding"
	if v6 {
		name, all, own = "IPv6", forwardAllIPv6, "net.ipv6.conf.%s.forwarding"
	}
	own = fmt.Sprintf(own, strings.ReplaceAll(iface, ".", "/"))
	allOff, ownOff := read(all) == "0", read(own) == "0"
	if !ownOff && !(v6 && allOff) { // for IPv4 the setting of the interface alone counts; writing "all" changes it too
		return ""
	}
	key := own
	if allOff {
		key = all
	}
	return fmt.Sprintf("%s is 0: the kernel forwards no %s packets that arrive on %s; write 1 with \"sysctl -w %s=1\"", key, name, iface, key)
}

// ForwardingWarnings warns when the kernel does not forward a family of which v4 and v6 say that it
// must. read returns the value of a setting. Each of the interfaces in named must forward. Of the
// others, where packets may arrive too, one that forwards is enough: an administrator may have turned
// forwarding off where only the host itself is reached. Without any interface only the setting for
// all interfaces is read.
func ForwardingWarnings(read func(key string) string, v4, v6 bool, named, others []string) (out []string) {
	for _, f := range []struct {
		needed, v6 bool
		name, key  string
	}{{v4, false, "IPv4", forwardAllIPv4}, {v6, true, "IPv6", forwardAllIPv6}} {
		if !f.needed {
			continue
		}
		off := forwardingOffOn(read, named, f.v6)
		if len(named) == 0 {
			if off = forwardingOffOn(read, others, f.v6); len(off) < len(others) {
				off = nil
			}
		}
		if read(f.key) == "0" && len(off) >= len(named) && (len(off) > 0 || len(named)+len(others) == 0) {
			off = []string{fmt.Sprintf("%s is 0: the kernel forwards no %s packets, and drops those to backends and of NAT rules; write 1 with \"sysctl -w %s=1\"", f.key, f.name, f.key)}
		}
		out = append(out, off...)
	}
	return out
}

func forwardingOffOn(read func(key string) string, ifaces []string, v6 bool) (off []string) {
	for _, i := range ifaces {
		if why := ForwardingOff(read, i, v6); why != "" {
			off = append(off, why)
		}
	}
	return off
}
