// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"
)

// TestPrintedCommands: the command line accepts each command of this program that the doctor prints.
func TestPrintedCommands(t *testing.T) {
	list, err := os.ReadFile("../../doctor/testdata/printed-commands")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(list)) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "sluice" {
			continue
		}
		root := newRoot(&app{})
		cmd, args, err := root.Find(words[1:])
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if err = cmd.ParseFlags(args); err == nil {
			err = cmd.ValidateArgs(cmd.Flags().Args())
		}
		if err == nil {
			err = cmd.ValidateFlagGroups()
		}
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
