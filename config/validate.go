// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Limits of a configuration.
const (
	maxNameLength   = 63   // A name is part of nftables chain names and of metrics labels.
	maxStringLength = 4096 // Any other text.
	maxTimeout      = 30 * 24 * time.Hour
)

// Validate returns all errors of c as Errors without positions, or nil. The defaults must be set.
func (c *Config) Validate() error {
	return c.validate().result()
}

// result returns the collected errors as Errors without positions.
func (v *validator) result() error {
	if len(v.errs) == 0 {
		return nil
	}
	for _, e := range v.errs {
		e.Path = e.path.String()
		e.Object = objectName(v.c, e.path)
	}
	return v.errs
}

// validator collects errors.
type validator struct {
	c    *Config
	path path // of the current value of walk
	errs Errors
	// malformed are the addresses and prefixes with an invalid form. Other errors about these
	// values are suppressed.
	malformed []path
	// truncated is set if there were more errors than maxErrors.
	truncated bool
}

func (c *Config) validate() *validator {
	v := &validator{c: c}
	v.walk(reflect.ValueOf(c).Elem())
	formal := len(v.errs)
	for i, name := range c.Interfaces {
		p := at("interfaces").index(i)
		v.ifname(p, name)
		if slices.Contains(c.Interfaces[:i], name) {
			v.errorf(p, "keep one of them", "interface %s is listed twice", name)
		}
	}
	if dir := c.ExecDirectory; dir != "" && (!filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/") {
		v.errorf(at("exec-directory"), "write an absolute path, as in /etc/sluice/checks", "%q is not the absolute path of a directory", dir)
	}
	v.services()
	v.nat()
	v.firewall()
	v.timeouts()
	v.cluster()
	v.uplinks()
	if mtu := v.c.LowestIPv6MTU; mtu > 0 && mtu < 1280 {
		v.errorf(path{{key: "lowest-ipv6-mtu"}}, "write 1280 or more", "%d is less than every IPv6 link carries, RFC 8200 §5", mtu)
	}
	if n := v.c.ICMPErrorsPerSecond; n > 1000000 {
		v.errorf(path{{key: "icmp-errors-per-second"}}, "write a number up to 1000000", "%d ICMP errors a second", n)
	}
	v.overlaps()
	v.prefixes()
	v.checkSIITRules()
	v.pools()
	v.checkShadowed()
	v.dropUseless(formal)
	return v
}

// dropUseless removes errors about malformed values, except the first.
func (v *validator) dropUseless(formal int) {
	v.errs = append(v.errs[:formal:formal], slices.DeleteFunc(v.errs[formal:], v.ofMalformed)...)
}

// ofMalformed reports whether an error concerns a malformed value or depends on one.
func (v *validator) ofMalformed(e *Error) bool {
	return slices.ContainsFunc(v.malformed, func(m path) bool {
		return e.path.within(m) || slices.ContainsFunc(e.depends, m.within)
	})
}

// addFormError records an address or prefix with an invalid form.
func (v *validator) addFormError(hint, format string, args ...any) {
	p := slices.Clone(v.path)
	v.malformed = append(v.malformed, p)
	v.errorf(p, hint, format, args...)
}

// errorf records an error at p; hint is the remedy.
func (v *validator) errorf(p path, hint, format string, args ...any) *Error {
	e := &Error{path: p, Cause: fmt.Sprintf(format, args...), Hint: hint}
	if len(v.errs) < maxErrors {
		v.errs = append(v.errs, e)
	} else {
		v.truncated = true
	}
	return e
}

// walk checks every value on its own: tags, ranges, the form of addresses.
func (v *validator) walk(rv reflect.Value) {
	t := rv.Type()
	switch {
	case t == targetType:
		v.withStep(step{key: "address"}, func() { v.address(rv.Interface().(Target).Address) })
		v.ranges(rv.Interface().(Target).Addresses)
	case t == reflect.TypeFor[[]AddressRange]():
		v.ranges(rv.Interface().([]AddressRange))
	case t == addrType:
		v.address(rv.Interface().(netip.Addr))
	case t == prefixType:
		v.prefix(rv.Interface().(netip.Prefix))
	case t == reflect.TypeFor[Match]():
		v.prefix(rv.Interface().(Match).Prefix)
	case t == reflect.TypeFor[Duration]():
		if d := rv.Interface().(Duration); d < 0 || d.D() > maxTimeout {
			v.errorf(slices.Clone(v.path), "write a time from 1ms to 720h", "%s is out of range", d)
		}
	case isText(t):
	case t.Kind() == reflect.Pointer:
		if !rv.IsNil() {
			v.walk(rv.Elem())
		}
	case t.Kind() == reflect.Struct:
		v.fields(rv)
	case t.Kind() == reflect.Slice:
		for i := range rv.Len() {
			v.withStep(step{index: i}, func() { v.walk(rv.Index(i)) })
		}
	case t.Kind() == reflect.Map:
		for it := rv.MapRange(); it.Next(); {
			v.withStep(step{key: it.Key().String()}, func() { v.walk(it.Value()) })
		}
	case t.Kind() == reflect.String && rv.Len() > maxStringLength:
		v.errorf(slices.Clone(v.path), fmt.Sprintf("write up to %d bytes", maxStringLength), "a text of %d bytes", rv.Len())
	}
}

func (v *validator) withStep(s step, f func()) {
	v.path = append(v.path, s)
	f()
	v.path = v.path[:len(v.path)-1]
}

func (v *validator) fields(rv reflect.Value) {
	l := layoutOf(rv.Type())
	for i := range l.fields {
		f := &l.fields[i]
		fv := rv.Field(f.index)
		if fv.IsZero() && (!f.required || f.zeroCounts) {
			continue
		}
		v.path = append(v.path, step{key: f.key})
		v.field(f, fv)
		v.path = v.path[:len(v.path)-1]
	}
}

func (v *validator) field(f *field, fv reflect.Value) {
	if fv.IsZero() {
		v.errorf(slices.Clone(v.path), f.hintMissing(), "%s is missing", f.key)
		return
	}
	if cause, hint := f.check(fv); cause != "" {
		v.errorf(slices.Clone(v.path), hint, "%s", cause)
		return
	}
	if fv.Kind() == reflect.Int && fv.Int() < 0 {
		v.errorf(slices.Clone(v.path), "write 0 or more", "%s %d is negative", f.key, fv.Int())
		return
	}
	v.walk(fv)
}

func (v *validator) address(a netip.Addr) {
	switch {
	case !a.IsValid():
	case a.Zone() != "":
		v.addFormError("write an address that is reached by a route, without %", "address %s has a zone", a)
	case a.Is4In6():
		v.addFormError("write "+a.Unmap().String(), "address %s is an IPv4 address in IPv6 form", a)
	}
}

func (v *validator) prefix(p netip.Prefix) {
	switch {
	case !p.IsValid():
	case p.Addr().Is4In6():
		hint := p.Addr().Unmap().String()
		if p.Bits() >= 96 {
			hint = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).String()
		}
		v.addFormError("write "+hint, "prefix %s is one of IPv4 addresses in IPv6 form", p)
	case p != p.Masked():
		v.errorf(slices.Clone(v.path), fmt.Sprintf("write %s for the network, %s for the one address", p.Masked(), p.Addr()),
			"prefix %s has bits set behind its length", p)
	}
}

func (v *validator) ranges(rs []AddressRange) {
	twice := spansOf(rs).overlaps()
	for i, r := range rs {
		v.withStep(step{index: i}, func() {
			if !r.First.IsValid() || !r.Last.IsValid() {
				v.errorf(slices.Clone(v.path), "write an address, a range or a prefix", "no address")
				return
			}
			v.address(r.First)
			if r.Last != r.First {
				v.address(r.Last)
			}
			if j, ok := twice[i]; ok {
				v.errorf(slices.Clone(v.path), "keep one of them", "%s overlaps %s, item %d of the same list", r, rs[j], j+1)
			}
		})
	}
}

// overlaps reports whether the two ranges share an address.
func (r AddressRange) overlaps(o AddressRange) bool {
	return r.First.IsValid() && r.First.BitLen() == o.First.BitLen() && r.First.Compare(o.Last) <= 0 && o.First.Compare(r.Last) <= 0
}

// name checks the name of an object, which becomes part of kernel objects' names.
func (v *validator) name(p path, name string) {
	ok := name != "" && len(name) <= maxNameLength
	safe := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:", r) {
			return r
		}
		ok = false
		return '-'
	}, name)
	if ok || name == "" {
		return // an empty name is already reported as missing
	}
	v.errorf(p, "write "+safe[:min(len(safe), maxNameLength)],
		"name %q is not made of up to %d letters, digits, and - _ . :", name, maxNameLength)
}

// ifname checks the name of a network interface (dev_valid_name of the kernel).
func (v *validator) ifname(p path, name string) {
	if name == "" {
		return
	}
	if len(name) > 15 || name == "." || name == ".." || strings.ContainsAny(name, "/: \t\n\v\f\r*\x00") {
		v.errorf(p, "write the name that ip link shows", "%q is not the name of an interface", name)
	}
}

// duplicate reports the second use of a name.
type seenNames map[string]int

// recordName records name at index i and returns its earlier index, or -1.
func (d seenNames) recordName(name string, i int) int {
	if first, ok := d[name]; ok {
		return first
	}
	d[name] = i
	return -1
}

func (v *validator) timeouts() {
	t := &v.c.Timeouts
	for _, f := range []struct {
		key   string
		value Duration
		floor time.Duration
		rfc   string
	}{
		{"tcp-established", t.TCPEstablished, defaultTCPEstablished, "RFC 5382 REQ-5"},
		{"tcp-transitory", t.TCPTransitory, defaultTCPTransitory, "RFC 5382 REQ-5"},
		{"udp", t.UDP, floorUDP, "RFC 4787 REQ-5"},
		{"icmp", t.ICMP, defaultICMP, "RFC 5508 REQ-2"},
		{"other", t.Other, time.Second, ""},
	} {
		p := path{{key: "timeouts"}, {key: f.key}}
		switch {
		case f.value < 0:
		case f.value.D() < time.Second:
			v.errorf(p, "write 1s or more", "%s is less than a second", f.value)
		case f.value.D() < f.floor && !t.Force:
			v.errorf(p, fmt.Sprintf("write %s or more, or set force: true", Duration(f.floor)),
				"%s is below the floor of %s, %s", f.value, f.rfc, Duration(f.floor))
		}
	}
}
