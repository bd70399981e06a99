// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

// helpKnows makes 'help' of a command that does not exist an error, which cobra passes over.
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

// fitHelp makes the help of all commands fit a terminal of 80 columns, but for lines that
// are there to be copied.
func fitHelp(root *cobra.Command) {
	cobra.AddTemplateFunc("fit", fit)
	root.SetHelpTemplate(strings.Replace(root.HelpTemplate(), "{{. | trim", "{{fit . | trim", 1))
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages ", ".FlagUsagesWrapped 80 "))
}

// item is the beginning of a line of a list: what it is about, and the space behind.
var item = regexp.MustCompile(`^ +(\S+( \S+)* {2,})?`)

// fit wraps paragraphs that have lines of more than 80 columns. Lists, whose lines begin
// with a space, keep their lines, and what is too long hangs below its beginning.
func fit(text string) string {
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
