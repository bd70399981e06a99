// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/google/nftables"
)

// savedRule is a rule of iptables-legacy, or the policy of a chain.
type savedRule struct {
	table, chain string
	policy       string   // of the chain; "" for a rule
	words        []string // -A CHAIN and its arguments, without quotes.
	text         string   // The same as printed.
	packets      uint64
}

// option returns the argument of the last of several options.
func (r *savedRule) option(names ...string) (value string) {
	for i := 2; i+1 < len(r.words); i++ {
		for _, name := range names {
			if r.words[i] == name {
				value = r.words[i+1]
			}
		}
	}
	return value
}

// target returns the jump target of a rule.
func (r *savedRule) target() string { return r.option("-j", "-g") }

// legacyProgram returns the iptables program of a family.
func legacyProgram(family nftables.TableFamily) string {
	if family == nftables.TableFamilyIPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// legacySave runs iptables-legacy-save and returns its rules with their counters; "" if iptables-legacy has no table
// in the calling thread's namespace.
func legacySave(ctx context.Context, family nftables.TableFamily) (string, error) {
	tables, err := os.ReadFile("/proc/thread-self/net/" + familyName(family) + "_tables_names")
	if err != nil || len(bytes.TrimSpace(tables)) == 0 {
		return "", nil
	}
	saved, err := run(ctx, legacyProgram(family)+"-legacy-save", "-c")
	if err != nil {
		return "", fmt.Errorf("rules of iptables-legacy: %w; install iptables to have them read", err)
	}
	return saved, nil
}

// run runs a program that prints rules.
func run(ctx context.Context, name string, args ...string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		path = "/usr/sbin/" + name
		if _, missing := os.Stat(path); missing != nil {
			return "", err
		}
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// parseSave parses the output of iptables-legacy-save, with or without counters.
func parseSave(text string) (list []savedRule) {
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		counters := ""
		if strings.HasPrefix(line, "[") {
			counters, line, _ = strings.Cut(line, " ")
		}
		words := splitWords(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":") && len(words) > 1: // :INPUT DROP [12:720]
			if len(words) > 2 {
				counters = words[2]
			}
			list = append(list, savedRule{table: table, chain: words[0][1:], policy: words[1], packets: savedPackets(counters)})
		case len(words) > 1 && words[0] == "-A":
			list = append(list, savedRule{table: table, chain: words[1], words: words, text: line, packets: savedPackets(counters)})
		}
	}
	return list
}

// savedPackets parses "[packets:bytes]".
func savedPackets(s string) uint64 {
	packets, _, _ := strings.Cut(strings.Trim(s, "[]"), ":")
	n, _ := strconv.ParseUint(packets, 10, 64)
	return n
}

// splitWords splits a line at blanks outside of quotes. A backslash within quotes escapes the next character.
func splitWords(line string) (words []string) {
	var word strings.Builder
	quoted, begun := false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '"':
			quoted, begun = !quoted, true
		case c == '\\' && quoted && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case (c == ' ' || c == '\t') && !quoted:
			if begun {
				words = append(words, word.String())
			}
			word.Reset()
			begun = false
		default:
			word.WriteByte(c)
			begun = true
		}
	}
	if begun {
		words = append(words, word.String())
	}
	return words
}
