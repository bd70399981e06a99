// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// TestUsageErrors: an error about the command line names the part, the fault, and the remedy.
func TestUsageErrors(t *testing.T) {
	for args, want := range map[string]string{
		"apply":                        "apply: which file?\nUsage: sluice apply FILE",
		"apply a b":                    "apply: argument \"b\" is one too many\nUsage: sluice apply FILE",
		"backend web":                  "backend: which backend?\nUsage: sluice backend SERVICE BACKEND up|drain|down|auto",
		"node":                         "node: which state?\nUsage: sluice node [NAME] drain|auto",
		"node stop":                    "state \"stop\": write drain or auto; see 'sluice node --help'",
		"import":                       "import: which source?\nUsage: sluice import ",
		"import iptabels x":            "unknown source \"iptabels\": did you mean iptables?; see 'sluice import --help'",
		"config show --origin x":       "--origin is about the running daemon: leave the file out; see 'sluice config show --help'",
		"load http":                    "load http: which URL?\nUsage: sluice load http [--from [LAB/]NODE] URL [flags]",
		"load packets --from lo":       "load packets: --dest and --source are missing\nUsage: sluice load packets --from PLACE",
		"plan x":                       "plan: argument \"x\" is one too many\nUsage: sluice plan [flags]",
		"run -c f --nftlb-key k":       "--nftlb-key goes with --nftlb-api ADDRESS:PORT",
		"run -c f --nftlb-api :5555":   "--nftlb-api :5555: write ADDRESS:PORT as in 127.0.0.1:5555 or [::1]:5555",
		"run -c f --nftlb-api [::]:55": "--nftlb-api [::]:55: whoever reaches it would be served: name --nftlb-key FILE",
		"tune router x":                "tune: argument \"x\" is one too many\nUsage: sluice tune [PROFILE] [flags]",
		"completion zsh x":             "completion zsh: argument \"x\" is one too many\nUsage: sluice completion zsh",
		"aply":                         "unknown command \"aply\": did you mean apply?; see 'sluice --help'",
		"rnu -c x":                     "unknown command \"rnu\": did you mean run?; see 'sluice --help'",
		"nosuchcommand":                "unknown command \"nosuchcommand\"; see 'sluice --help'",
		"show bakends":                 "show: unknown command \"bakends\": did you mean backends?; see 'sluice show --help'",
		"load nosuch --from x":         "load: unknown command \"nosuch\": there are flows, http, packets; see 'sluice load --help'",
		"conns nosuch":                 "conns: unknown command \"nosuch\": there is only delete; see 'sluice conns --help'",
		"conns --lsit":                 "unknown flag --lsit: did you mean --list?; see 'sluice conns --help'",
		"conns --nosuch":               "unknown flag --nosuch; see 'sluice conns --help'",
		"apply --jsno f":               "unknown flag --jsno: did you mean --json?; see 'sluice apply --help'",
		"plan -x":                      "unknown flag -x; see 'sluice plan --help'",
		"conns --list --by source":     "conns: --by and --list exclude each other: give one of them; see 'sluice conns --help'",
		"doctor --watch --all":         "doctor: --all and --watch exclude each other: give one of them\nUsage: sluice doctor [flags]",
		"doctor --try --watch":         "doctor: --try and --watch exclude each other: give one of them\nUsage: sluice doctor [flags]",
		"doctor --seconds":             "--seconds: a value is missing; see 'sluice doctor --help'",
		"doctor --seconds x":           "--seconds: \"x\" is not a number; see 'sluice doctor --help'",
		"conns --window 3":             "--window: \"3\" is not a time with its unit, as 30s or 5m; see 'sluice conns --help'",
		"conns --pool -1":              "--pool: \"-1\" is not a whole number from 0 to 4294967295; see 'sluice conns --help'",
		"plan --memory much":           "--memory: size \"much\": not a number with a unit such as 512MiB, 2GB or 1500; see 'sluice plan --help'",
		"show flows --json=perhaps":    "--json: \"perhaps\" is not true or false; see 'sluice show flows --help'",
		"bench packets --reps many":    "--reps: \"many\" is not a whole number; see 'sluice bench --help'",
		"load flows --rate 1 --dest x": "load flows: --from, --source and --to are missing\nUsage: sluice load flows --from",
	} {
		code, out, stderr := sluiceCommand("", strings.Fields(args)...)
		if code != exitUsage || out != "" || !strings.HasPrefix(stderr, "sluice: "+want) {
			t.Errorf("sluice %s: exit %d\n got %q\nwant %q", args, code, out+stderr, "sluice: "+want)
		}
	}
}

// TestArguments expects every command to check its own arguments, with short messages that fit the line.
func TestArguments(t *testing.T) {
	var look func(cmd *cobra.Command)
	look = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			look(sub)
		}
		for _, args := range [][]string{nil, {"nosuch"}, {"a", "b", "c", "d"}} {
			if cmd.Args == nil {
				continue // takes any
			}
			err := cmd.Args(cmd, args)
			if err == nil {
				continue
			}
			for _, foreign := range []string{"arg(s)", "flag(s)", " for \"", "if any flags"} {
				if strings.Contains(err.Error(), foreign) {
					t.Errorf("%s %v: %s", cmd.CommandPath(), args, err)
				}
			}
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if (strings.HasPrefix(line, " ") || strings.HasPrefix(line, "Usage:")) && utf8.RuneCountInString(line) > 80 {
					t.Errorf("%s %v: more than 80 columns: %s", cmd.CommandPath(), args, line)
				}
			}
		}
	}
	root := newRoot(&app{})
	root.InitDefaultCompletionCmd()
	usageArgs(root)
	look(root)
}
