// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"path/filepath"
	"slices"
)

// CheckPrograms returns an error if c has a check of type exec whose program is not the operator's. The
// daemon runs these programs as root. The operator's are the commands of the file and of the configuration
// in force, which may be nil, and the programs in the exec-directory of the file.
func (c *Config) CheckPrograms(file, inForce *Config) error {
	var errs Errors
	if c.ExecDirectory != file.ExecDirectory {
		errs = append(errs, &Error{Path: "exec-directory", Cause: "it can be changed in the daemon's file only", Hint: "change it there, and reload"})
	}
	var known [][]string
	for _, from := range []*Config{file, inForce} {
		if from == nil {
			continue
		}
		for i := range from.Services {
			if k := from.Services[i].Check; k != nil && k.Type == CheckExec {
				known = append(known, k.Command)
			}
		}
	}
	for i := range c.Services {
		s := &c.Services[i]
		if s.Check == nil || s.Check.Type != CheckExec || len(s.Check.Command) == 0 {
			continue
		}
		own := func(command []string) bool { return slices.Equal(command, s.Check.Command) }
		if program := s.Check.Command[0]; !file.isAllowedProgram(program) && !slices.ContainsFunc(known, own) {
			errs = append(errs, &Error{Path: fmt.Sprintf("services[%d].check.command", i), Object: "service " + s.Name,
				Cause: fmt.Sprintf("%q is not a command of the daemon's file", s.Check.Command), Hint: "write the check into that file and reload, or put the program into its exec-directory"})
		}
	}
	if len(errs) > 0 {
		return errs
	}
	return nil
}

// isAllowedProgram reports whether a program lies directly in the exec-directory.
func (c *Config) isAllowedProgram(program string) bool {
	return c.ExecDirectory != "" && filepath.Clean(program) == program && filepath.Dir(program) == filepath.Clean(c.ExecDirectory)
}
