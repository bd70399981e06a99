// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
)

// sluiceCommand runs one command line with stdin.
func sluiceCommand(stdin string, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = execute(context.Background(), args, strings.NewReader(stdin), &out, &err)
	return code, out.String(), err.String()
}

const badConfig = "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{address: 10.0.2.300}, {address: 10.0.2.3, weight: 999}]}\n"

func TestCheckExamples(t *testing.T) {
	files, _ := filepath.Glob("../../examples/*.yaml")
	if len(files) == 0 {
		t.Fatal("no examples")
	}
	for _, file := range files {
		if code, out, stderr := sluiceCommand("", "check", file); code != exitOK || !strings.Contains(out, ": valid: ") {
			t.Errorf("%s: exit %d\n%s%s", file, code, out, stderr)
		}
	}
}

func TestCheckCountsUplinks(t *testing.T) {
	for file, want := range map[string]string{"office-two-uplinks": ", 2 uplinks\n", "office": " firewall rules\n"} {
		if code, out, stderr := sluiceCommand("", "check", "../../examples/"+file+".yaml"); code != exitOK || !strings.HasSuffix(out, want) {
			t.Errorf("%s: exit %d, want %q\n%s%s", file, code, want, out, stderr)
		}
	}
}

func TestCheckBadFile(t *testing.T) {
	code, out, stderr := sluiceCommand(badConfig, "check", "-")
	if code != exitFailure || out != "" || !strings.Contains(stderr, "/dev/stdin:2:") || !strings.Contains(stderr, "^^^^^^^^^^") ||
		!strings.Contains(stderr, "weight 999 is out of range") || !strings.Contains(stderr, "2 errors") || strings.Contains(stderr, "\x1b") {
		t.Errorf("exit %d\n%s%s", code, out, stderr)
	}
	code, out, _ = sluiceCommand(badConfig, "check", "--json", "-")
	var result checkResult
	if err := json.Unmarshal([]byte(out), &result); err != nil || code != exitFailure || result.Valid || len(result.Errors) != 2 ||
		result.Errors[1].Path != "services[0].backends[1].weight" || result.Errors[1].Line != 2 || result.Errors[1].Hint == "" {
		t.Errorf("exit %d, %v\n%s", code, err, out)
	}
	if code, _, stderr = sluiceCommand(badConfig, "check", "--color", "always", "-"); code != exitFailure || !strings.Contains(stderr, "\x1b[1;31m") {
		t.Errorf("exit %d, no colour:\n%s", code, stderr)
	}
	if code, _, stderr = sluiceCommand("", "check", "/nonexistent.yaml"); code != exitFailure || !strings.Contains(stderr, "no such file") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if code, _, _ = sluiceCommand("", "check"); code != exitUsage {
		t.Errorf("exit %d without a file", code)
	}
}

func TestConfigSchemaAndShow(t *testing.T) {
	code, out, _ := sluiceCommand("", "config", "schema")
	if code != exitOK || !json.Valid([]byte(out)) || !strings.Contains(out, `"Sluice configuration"`) {
		t.Errorf("exit %d: %.200s", code, out)
	}
	code, out, stderr := sluiceCommand("", "config", "show", "../../examples/lb-dnat.yaml")
	if c, err := config.Decode("shown", []byte(out)); code != exitOK || err != nil || c.Services[0].Check.Fall != 2 {
		t.Errorf("exit %d, %v: %s%s", code, err, out, stderr)
	}
}

// TestHelpFits: help fits terminals of 80 columns, and shows the usage of a command.
func TestHelpFits(t *testing.T) {
	var look func(cmd *cobra.Command)
	look = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			look(sub)
		}
		generated := cmd.Name() == "help" || strings.Contains(cmd.CommandPath(), " completion")
		if !cmd.HasSubCommands() && cmd.Example == "" && !generated {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		_, out, _ := sluiceCommand("", append(strings.Fields(cmd.CommandPath())[1:], "--help")...)
		for line := range strings.Lines(out) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
				t.Errorf("%s --help: %d columns: %s", cmd.CommandPath(), n, line)
			}
		}
	}
	root := newRoot(&app{})
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	look(root)
}

// TestUnknownHelp: help about an unknown command is an error.
func TestUnknownHelp(t *testing.T) {
	for _, topic := range []string{"nosuch", "tune nosuch", "lab up nosuch"} {
		if code, out, stderr := sluiceCommand("", append([]string{"help"}, strings.Fields(topic)...)...); code != exitUsage || out != "" || !strings.Contains(stderr, topic) {
			t.Errorf("%s: exit %d, %q, %q", topic, code, out, stderr)
		}
	}
	if code, out, stderr := sluiceCommand("", "help", "tune", "status"); code != exitOK || !strings.Contains(out, "sluice tune status") {
		t.Errorf("help tune status: exit %d, %q, %q", code, out, stderr)
	}
}

// TestProfileToOutput: two output formats cannot share standard output.
func TestProfileToOutput(t *testing.T) {
	if code, out, stderr := sluiceCommand("", "profile", "--folded", "-", "--json"); code != exitUsage || !strings.Contains(out+stderr, "--folded - and --json") {
		t.Errorf("exit %d, %q, %q", code, out, stderr)
	}
}

// TestGroupsOfCommands: a command that only has subcommands prints its help, and refuses unknown subcommands.
func TestGroupsOfCommands(t *testing.T) {
	var visit func(cmd *cobra.Command, path []string)
	visit = func(cmd *cobra.Command, path []string) {
		for _, sub := range cmd.Commands() {
			visit(sub, append(slices.Clone(path), sub.Name()))
		}
		if !cmd.HasSubCommands() || cmd.Runnable() {
			return
		}
		if code, out, stderr := sluiceCommand("", path...); code != exitOK || !strings.Contains(out, "Available Commands") && len(path) > 0 {
			t.Errorf("%q: exit %d, %q, %q", path, code, out, stderr)
		}
		args := append(slices.Clone(path), "nosuch")
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, `unknown command "nosuch"`) {
			t.Errorf("%q: exit %d, %q, %q", args, code, out, stderr)
		}
	}
	root := &cobra.Command{Use: "sluice"}
	root.AddCommand(subcommands(&app{})...)
	visit(root, nil)
}

// TestUnknownSubcommand: a command with subcommands refuses unknown ones.
func TestUnknownSubcommand(t *testing.T) {
	for _, name := range []string{"", "completion"} {
		args := append(strings.Fields(name), "nosuch")
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, `unknown command "nosuch"`) {
			t.Errorf("%s: exit %d, %q, %q", args, code, out, stderr)
		}
	}
}
