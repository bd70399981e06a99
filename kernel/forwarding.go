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

// ForwardingOff returns the setting that makes the kernel drop packets from an interface instead of forwarding them,
// with its remedy. It returns "" if the kernel forwards them. read returns the value of a setting.
func ForwardingOff(read func(key string) string, iface string, v6 bool) string {
	name, all, own := "IPv4", forwardAllIPv4, "net.ipv4.conf.%s.forwarding"
	if v6 {
		name, all, own = "IPv6", forwardAllIPv6, "net.ipv6.conf.%s.forwarding"
	}
	own = fmt.Sprintf(own, strings.ReplaceAll(iface, ".", "/"))
	allOff, ownOff := read(all) == "0", read(own) == "0"
	if !ownOff && !(v6 && allOff) { // for IPv4 only the setting of the interface counts; writing "all" changes it too
		return ""
	}
	key := own
	if allOff {
		key = all
	}
	return fmt.Sprintf("%s is 0: the kernel forwards no %s packets that arrive on %s; write 1 with \"sysctl -w %s=1\"", key, name, iface, key)
}

// ForwardingWarnings returns a warning for each required family (v4, v6) that the kernel does not forward. read
// returns the value of a setting. All interfaces in named must forward. Among others one is enough: an administrator
// may have disabled forwarding on interfaces of the host itself. Without any interface only the setting for all
// interfaces is read.
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
