// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-lb/sluice/config"
)

// usageArgs makes wrong numbers of arguments, subcommands that do not exist, and flags that
// are missing or exclude each other, usage errors throughout the tree.
func usageArgs(cmd *cobra.Command) {
	if !cmd.Runnable() { // the command itself only groups subcommands
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	if cmd.HasSubCommands() && cmd.Args == nil || strings.Contains(cmd.CommandPath()+" ", " completion ") {
		cmd.Args = noArgs // cobra has no text for this error, or a different one
	}
	if inner := cmd.Args; inner != nil {
		if cmd.ValidArgsFunction == nil && cmd.ValidArgs == nil {
			cmd.ValidArgsFunction = cobra.NoFileCompletions // otherwise shells complete file names
		}
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := cmp.Or(inner(cmd, args), flagsTogether(cmd)); err != nil {
				return badUsage(cmd, err)
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		usageArgs(sub)
	}
}

// badUsage returns an error about the command line with the command's usage, or with its
// subcommands if the subcommand is unknown.
func badUsage(cmd *cobra.Command, err error) error {
	if path := strings.Fields(cmd.CommandPath())[1:]; len(path) > 0 {
		err = fmt.Errorf("%s: %w", strings.Join(path, " "), err)
	}
	if cmd.HasAvailableSubCommands() && !strings.Contains(cmd.Use, " ") { // accepts only subcommands
		return usageError(cmd, "%w", err)
	}
	return exitError{exitUsage, fmt.Errorf("%w\nUsage: %s", err, useLine(cmd, "       "))}
}

// requireArgs requires each of the named arguments.
func requireArgs(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return fmt.Errorf("which %s?", names[len(args)])
		}
		return surplusError(args, len(names))
	}
}

// atMost accepts up to n arguments.
func atMost(n int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error { return surplusError(args, n) }
}

func surplusError(args []string, n int) error {
	if len(args) > n {
		return fmt.Errorf("argument %q is one too many", args[n])
	}
	return nil
}

// noArgs refuses arguments. If the command has subcommands, the argument is reported as an unknown
// one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 || !cmd.HasAvailableSubCommands() {
		return surplusError(args, 0)
	}
	var known []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			known = append(known, sub.Name())
		}
	}
	hint := "there are " + strings.Join(known, ", ")
	if near := config.Nearest(args[0], known); near != "" {
		hint = "did you mean " + near + "?"
	} else if len(known) == 1 {
		hint = "there is only " + known[0]
	} else if !cmd.HasParent() {
		return fmt.Errorf("unknown command %q", args[0]) // the help lists all commands
	}
	return fmt.Errorf("unknown command %q: %s", args[0], hint)
}

// flagsTogether describes missing flags and flags that exclude each other.
func flagsTogether(cmd *cobra.Command) error {
	var missing []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Annotations[cobra.BashCompOneRequiredFlag] != nil && !f.Changed {
			missing = append(missing, "--"+f.Name)
		}
	})
	if len(missing) > 0 {
		return fmt.Errorf("%s %s missing", andList(missing), map[bool]string{true: "is", false: "are"}[len(missing) == 1])
	}
	err := cmd.ValidateFlagGroups()
	if err == nil {
		return nil
	}
	// cobra has no type for it: "... [all watch] were all set".
	_, set, _ := strings.Cut(err.Error(), "; [")
	set, _, found := strings.Cut(set, "] were all set")
	if !found {
		return err
	}
	names := strings.Fields(set)
	for i := range names {
		names[i] = "--" + names[i]
	}
	return fmt.Errorf("%s exclude each other: give one of them", andList(names))
}

// andList joins words as a sentence does.
func andList(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// flagError describes an invalid flag in the terms of this program.
func flagError(cmd *cobra.Command, err error) error {
	if args := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(args) > 0 {
		if err := cmd.Args(cmd, args); err != nil {
			return err // the flag was meant for a subcommand that does not exist
		}
	}
	var unknown *pflag.NotExistError
	var without *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() != "":
		err = fmt.Errorf("unknown flag -%s", unknown.GetSpecifiedName())
	case errors.As(err, &unknown):
		err = fmt.Errorf("unknown flag --%s", unknown.GetSpecifiedName())
		if near := config.Nearest(unknown.GetSpecifiedName(), flagNames(cmd)); near != "" {
			err = fmt.Errorf("%w: did you mean --%s?", err, near)
		}
	case errors.As(err, &without):
		err = fmt.Errorf("--%s: a value is missing", without.GetFlag().Name)
	case errors.As(err, &invalid):
		flag := invalid.GetFlag()
		if want := kinds[flag.Value.Type()]; want != "" {
			err = fmt.Errorf("%q is not %s", invalid.GetValue(), want)
		} else {
			err = invalid.Unwrap()
		}
		err = fmt.Errorf("--%s: %w", flag.Name, err)
	}
	return usageError(cmd, "%w", err)
}

// kinds are the values of flags by pflag's names for their types.
var kinds = map[string]string{
	"bool": "true or false", "duration": "a time with its unit, as 30s or 5m", "float64": "a number", "int": "a whole number",
	"uint32": "a whole number from 0 to 4294967295", "uint64": "a whole number from 0",
}

// flagNames lists the flags that a command knows.
func flagNames(cmd *cobra.Command) []string {
	var names []string
	for _, set := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.InheritedFlags()} {
		set.VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && !slices.Contains(names, f.Name) {
				names = append(names, f.Name)
			}
		})
	}
	return names
}
