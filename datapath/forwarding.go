// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-lb/sluice/config"
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

// Unforwarded warns of the families that a snapshot forwards and the kernel does not, by the
// settings as read gives them. named: interfaces that the configuration names; each counts. Of
// all others, where packets may come in too, one that forwards is enough: forwarding may be off
// on purpose where only the host itself is reached. Without any only the setting for all
// interfaces is looked at.
func Unforwarded(s *Snapshot, read func(key string) string, named, others []string) (out []string) {
	four, six := families(s)
	for _, f := range []struct {
		needed, v6 bool
		name, key  string
	}{{four, false, "IPv4", "net.ipv4.ip_forward"}, {six, true, "IPv6", "net.ipv6.conf.all.forwarding"}} {
		if !f.needed {
			continue
		}
		off := unforwarded(read, named, f.v6)
		if len(named) == 0 {
			if off = unforwarded(read, others, f.v6); len(off) < len(others) {
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

func unforwarded(read func(key string) string, ifaces []string, v6 bool) (off []string) {
	for _, i := range ifaces {
		if why := ForwardingOff(read, i, v6); why != "" {
			off = append(off, why)
		}
	}
	return off
}

// families tells which families of packets a snapshot forwards.
func families(s *Snapshot) (four, six bool) {
	note := func(is4 bool) { four, six = four || is4, six || !is4 }
	for _, svc := range s.Services {
		for _, l := range svc.Listen {
			if !l.Follows() {
				note(l.Address.Is4())
				continue
			}
			for _, b := range svc.Backends {
				note(b.Address.Is4())
			}
		}
	}
	for _, n := range s.NAT {
		if n.Type == config.NATNAT64 || n.Type == config.NATSIIT {
			return true, true
		}
		for _, p := range n.Source {
			note(p.Addr().Is4())
		}
		if n.Listen != nil {
			note(n.To.Address.Is4())
		}
		if n.External.IsValid() {
			note(n.External.Addr().Is4())
		}
	}
	return four, six
}
