// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
)

// Validate reports everything that is wrong with c as an Errors without
// positions, nil when nothing is. It expects the defaults to be set.
func (c *Config) Validate() error {
	errs := c.validate()
	if len(errs) == 0 {
		return nil
	}
	for _, e := range errs {
		e.Path = e.path.String()
		e.Object = objectName(c, e.path)
	}
	return errs
}

// validator collects what is wrong.
type validator struct {
	c    *Config
	errs Errors
}

func (c *Config) validate() Errors {
	v := &validator{c: c}
	return v.errs
}

// errorf records that the value at p is wrong; hint says what to write instead.
func (v *validator) errorf(p path, hint, format string, args ...any) *Error {
	e := &Error{path: p, Cause: fmt.Sprintf(format, args...), Hint: hint}
	v.errs = append(v.errs, e)
	return e
}
