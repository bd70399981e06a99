// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"unsafe"
)

// A gateway may have 10,000 services while an edit changes one. An edited configuration therefore
// shares all unchanged services with its original, so that comparing the two is cheap.

// Is reports whether o is s, or a copy that shares all referenced data with s. It is cheap, and
// true only for equal services.
func (s *Service) Is(o *Service) bool {
	const size = unsafe.Sizeof(*s)
	return s == o || bytes.Equal(unsafe.Slice((*byte)(unsafe.Pointer(s)), size), unsafe.Slice((*byte)(unsafe.Pointer(o)), size))
}

// Equal reports whether both services are equal.
func (s *Service) Equal(o *Service) bool { return s.Is(o) || reflect.DeepEqual(s, o) }

// sameBytes reports whether two variables of one type have the same bytes, and thus reference the
// same data.
func sameBytes(a, b reflect.Value) bool {
	size := a.Type().Size()
	memory := func(v reflect.Value) []byte { return unsafe.Slice((*byte)(v.Addr().UnsafePointer()), size) }
	return bytes.Equal(memory(a), memory(b))
}

// Same reports whether two configurations are equal; it is cheap where they share most services.
func (c *Config) Same(o *Config) bool {
	if len(c.Services) != len(o.Services) {
		return false
	}
	for i := range c.Services {
		if !c.Services[i].Equal(&o.Services[i]) {
			return false
		}
	}
	x, y := *c, *o
	x.Services, y.Services, x.draft, y.draft = nil, nil, false, false
	return reflect.DeepEqual(x, y)
}

// Share replaces services of c by the equal services of an older configuration. The caller must be
// the only user of c.
func (c *Config) Share(old *Config) {
	at := make(map[string]int, len(old.Services))
	for i := range old.Services {
		at[old.Services[i].Name] = i
	}
	for i := range c.Services {
		if j, ok := at[c.Services[i].Name]; ok && c.Services[i].Equal(&old.Services[j]) {
			c.Services[i] = old.Services[j]
		}
	}
}

// Draft returns a configuration equal to c that Put, Add, Patch, Remove and Elements change in
// place, so that a series of changes costs no copies. A refused change leaves it unmodified. Other
// users may receive it after the last change and a call of [Config.Finish].
func (c *Config) Draft() *Config {
	d := c.copy()
	d.draft = true
	return d
}

// Finish ends the changes of a draft.
func (c *Config) Finish() { c.draft = false }

// copy returns a configuration with its own lists of the same objects.
func (c *Config) copy() *Config {
	d := *c
	d.draft = false
	d.Services, d.NAT = slices.Clone(c.Services), slices.Clone(c.NAT)
	d.Firewall.Rules, d.Firewall.Sets = slices.Clone(c.Firewall.Rules), maps.Clone(c.Firewall.Sets)
	return &d
}

// withEdit returns c after an edit whose Before is the current value.
func (c *Config) withEdit(e Edit) (*Config, error) {
	steps := Split(e.Path)
	if at := c.serviceAt(steps); at >= 0 {
		return c.editedService(at, func(part *Config) error { return part.mustEdit(e) })
	}
	next := c.copy()
	if f := layoutOf(reflect.TypeFor[Config]()).byKey[steps[0]]; f != nil && f.key != "services" { // only the list of services changes in place
		clone(reflect.ValueOf(next).Elem().Field(f.index), reflect.ValueOf(c).Elem().Field(f.index))
	}
	if err := next.mustEdit(e); err != nil {
		return nil, err
	}
	next.SetDefaults()
	if err := next.Validate(); err != nil {
		return nil, err
	}
	if !c.draft {
		return next, nil
	}
	*c = *next
	c.draft = true
	return c, nil
}

// serviceAt returns the index of the service that contains a path, or -1.
func (c *Config) serviceAt(steps []string) int {
	if len(steps) > 1 && steps[0] == "services" {
		for i := range c.Services {
			if c.Services[i].Name == steps[1] {
				return i
			}
		}
	}
	return -1
}

// editedService returns c after an edit of the service at an index.
func (c *Config) editedService(at int, edit func(part *Config) error) (*Config, error) {
	part := &Config{Services: make([]Service, 1)}
	clone(reflect.ValueOf(&part.Services[0]).Elem(), reflect.ValueOf(&c.Services[at]).Elem())
	if err := edit(part); err != nil {
		return nil, err
	}
	part.SetDefaults()
	next := c
	if !c.draft {
		next = c.copy()
	}
	if len(part.Services) == 0 {
		if next.Services = slices.Delete(next.Services, at, at+1); len(next.Services) == 0 {
			next.Services = nil // as in a file without the key
		}
		return next, nil // nothing else is wrong because a service is gone
	}
	was := next.Services[at]
	next.Services[at] = part.Services[0]
	if err := next.validateService(at, &was); err != nil {
		next.Services[at] = was
		return nil, err
	}
	return next, nil
}

// mustEdit makes an edit that fits.
func (c *Config) mustEdit(e Edit) error {
	done, now, err := c.edit(e)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", e.Path, err)
	case !done && now != e.After: // an element of the path does not exist
		return fmt.Errorf("%s: %w", e.Path, ErrNoObject)
	}
	return nil
}

// validateService validates a configuration that was valid except for the service at an index.
func (c *Config) validateService(at int, was *Service) error {
	s := &c.Services[at]
	if s.Name != was.Name {
		return c.Validate()
	}
	v := &validator{c: c, path: path{{key: "services"}, {index: at}}}
	v.walk(reflect.ValueOf(s).Elem())
	v.path = nil
	formal := len(v.errs)
	p := path{{key: "services"}, {index: at}}
	v.name(p.key("name"), s.Name)
	v.service(p, s)
	if s.Mode == ModeStateless || was.Mode == ModeStateless || s.Protocol != was.Protocol || !reflect.DeepEqual(s.Listen, was.Listen) ||
		slices.ContainsFunc(s.Listen, Listen.Follows) {
		v.overlaps()
	}
	v.pools()
	v.dropUseless(formal)
	return v.result()
}
