// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpKnows makes 'help' of an unknown command an error, which cobra ignores.
func helpKnows(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"})
	help.Run = nil
	help.RunE = func(cmd *cobra.Command, args []string) error {
		about, rest, err := cmd.Root().Find(args)
		if err != nil || len(rest) > 0 {
			return usageError(cmd.Root(), "unknown help topic %q", strings.Join(args, " "))
		}
		about.InitDefaultHelpFlag()
		about.InitDefaultVersionFlag()
		return about.Help()
	}
}

// fitHelp wraps the help of all commands at 80 columns. It processes cobra's output: a custom
// template would keep every method in the program, because templates find methods by name.
func fitHelp(root *cobra.Command) {
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		if about := cmp.Or(cmd.Long, cmd.Short); about != "" {
			fmt.Fprintln(cmd.OutOrStdout(), strings.TrimSpace(wrapText(about))+"\n")
		}
		if cmd.Runnable() || cmd.HasSubCommands() {
			fmt.Fprint(cmd.OutOrStdout(), cmd.UsageString())
		}
	})
	usage := new(cobra.Command).UsageFunc()
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		out, text := cmd.OutOrStderr(), new(strings.Builder)
		cmd.SetOut(text)
		err := usage(cmd)
		cmd.SetOut(out)
		fitted := strings.Replace(text.String(), "  "+cmd.UseLine(), "  "+useLine(cmd, "      "), 1)
		for _, flags := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.InheritedFlags()} {
			fitted = strings.Replace(fitted, strings.TrimSpace(flags.FlagUsages()), strings.TrimSpace(flags.FlagUsagesWrapped(reportWidth)), 1)
		}
		fmt.Fprint(out, fitted)
		return err
	})
}

// valued is a flag with its value, which stay on one line.
var valued = regexp.MustCompile(`(--[a-z-]+) ([A-Z])`)

// useLine returns the usage of a command, with further lines indented.
func useLine(cmd *cobra.Command, indent string) string {
	glued := valued.ReplaceAllString(cmd.UseLine(), "$1\x00$2")
	return strings.ReplaceAll(wrap(glued, reportWidth-len(indent), "\n"+indent), "\x00", " ")
}

// item matches the start of a list item: its name and the space after it.
var item = regexp.MustCompile(`^ +(\S+( \S+)* {2,})?`)

// wrapText wraps paragraphs with lines of more than 80 columns. List items, which begin with a space,
// keep their lines; overlong items get a hanging indent.
func wrapText(text string) string {
	var out []string
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		var prose []string
		long := false
		flush := func() {
			if joined := strings.Join(prose, "\n"); long {
				out = append(out, wrap(joined, reportWidth, "\n"))
			} else if joined != "" {
				out = append(out, joined)
			}
			prose, long = nil, false
		}
		for line := range strings.SplitSeq(paragraph, "\n") {
			if begin := item.FindString(line); begin != "" {
				flush()
				if len(line) > reportWidth {
					line = begin + wrap(line[len(begin):], reportWidth-len(begin), "\n"+strings.Repeat(" ", len(begin)))
				}
				out = append(out, line)
				continue
			}
			prose = append(prose, line)
			long = long || len(line) > reportWidth
		}
		flush()
		out = append(out, "")
	}
	return strings.Join(out, "\n")
}
