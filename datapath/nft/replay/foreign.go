// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/datapath/nft/nfnl"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Rules are all rules of a network namespace in the output format of the host's own programs: nftables, iptables-nft
// and iptables-legacy.
type Rules struct {
	tables  []foreignTable
	saved   []savedTables
	omitted []string
}

// foreignTable is a table of nftables.
type foreignTable struct{ family, name, text string }

func (t foreignTable) String() string { return t.family + " " + t.name }

// savedTables are tables that an iptables program saves and restores: "iptables-legacy".
type savedTables struct{ program, text string }

// ReadRules reads the rules of the calling thread's network namespace.
func ReadRules(ctx context.Context) (*Rules, error) {
	r := &Rules{}
	list, err := program(ctx, "", "nft", "list", "tables")
	switch {
	case errors.Is(err, exec.ErrNotFound):
		r.omitted = append(r.omitted, "rules of nftables: nft is not installed")
	case err != nil:
		return nil, fmt.Errorf("rules of the host: %w", err)
	}
	managed := map[string]bool{} // programs of iptables-nft
	for line := range strings.Lines(list) {
		words := strings.Fields(line)
		if len(words) != 3 || words[0] != "table" {
			continue
		}
		t := foreignTable{family: words[1], name: words[2]}
		if t.text, err = program(ctx, "", "nft", "list", "table", t.family, t.name); err != nil {
			r.omitted = append(r.omitted, fmt.Sprintf("table %s: %v", t, err))
			continue
		}
		if xtables := map[string]string{"ip": "iptables-nft", "ip6": "ip6tables-nft"}[t.family]; xtables != "" && iptablesSteps(t) {
			managed[xtables] = true
			continue
		}
		r.tables = append(r.tables, t)
	}
	for _, name := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		if strings.HasSuffix(name, "-nft") && !managed[name] {
			continue
		}
		text, err := program(ctx, "", name+"-save")
		if err != nil && !errors.Is(err, exec.ErrNotFound) || err != nil && managed[name] {
			r.omitted = append(r.omitted, fmt.Sprintf("rules of %s: %v", name, err))
		}
		if text = saveWarning.ReplaceAllString(text, ""); strings.Contains(text, "*") {
			r.saved = append(r.saved, savedTables{name, text})
		}
	}
	return r, nil
}

// saveWarning matches warnings that an iptables program prints among its rules.
var saveWarning = regexp.MustCompile(`(?m)^# Warning.*\n`)

// iptablesSteps reports whether a table belongs to iptables-nft. nft prints some of its rules in a syntax that nft does
// not accept.
func iptablesSteps(t foreignTable) bool {
	switch t.name {
	case "raw", "mangle", "nat", "filter", "security":
		return strings.Contains(t.text, " xt ") || regexp.MustCompile(`(?m)^\tchain (PREROUTING|POSTROUTING|INPUT|FORWARD|OUTPUT) \{`).MatchString(t.text)
	}
	return false
}

// Names lists the owners of the rules.
func (r *Rules) Names() (names []string) {
	for _, t := range r.tables {
		names = append(names, "table "+t.String())
	}
	for _, s := range r.saved {
		names = append(names, s.program)
	}
	return names
}

// load loads the rules in the calling thread's network namespace, with counters at zero, and returns the parts that
// failed.
func (r *Rules) load(ctx context.Context) (omitted []string) {
	omitted = append(omitted, r.omitted...)
	for _, t := range r.tables {
		if _, err := program(ctx, t.text, "nft", "-f", "-"); err != nil {
			omitted = append(omitted, fmt.Sprintf("table %s, which nft does not take again: %v", t, err))
		}
	}
	for _, s := range r.saved {
		if _, err := program(ctx, s.text, s.program+"-restore"); err != nil {
			omitted = append(omitted, fmt.Sprintf("rules of %s: %v", s.program, err))
		}
	}
	return omitted
}

// addMatched adds the rules on the packet's path. Traces report rules of nftables, counters report rules of iptables-legacy.
func (r *Rules) addMatched(ctx context.Context, traces []nfnl.Trace, a *Answer) {
	texts := map[string]map[uint64]string{}
	for _, t := range traces {
		if strings.HasPrefix(t.Chain.Name, "explain-") || t.Kind == nfnl.TraceReturn {
			continue
		}
		step := Step{Chain: ruleset.ID{Table: t.Chain.Table, Name: t.Table + " " + t.Chain.Name}, Verdict: t.Verdict, Goes: t.Verdict.Code == verdictContinue}
		switch {
		case t.Kind == nfnl.TraceRule:
			key := t.Chain.Table.String() + " " + t.Table
			if texts[key] == nil {
				texts[key] = ruleTexts(ctx, t.Chain.Table.String(), t.Table)
			}
			if step.Rule.Text = texts[key][t.Handle]; step.Rule.Text == "" {
				continue
			}
		case t.Verdict.Code == ruleset.Drop:
			step.Rule.Text = "policy drop"
		default:
			continue
		}
		a.Steps = append(a.Steps, step)
	}
	for _, s := range r.saved {
		if !strings.HasSuffix(s.program, "-legacy") {
			continue
		}
		text, err := program(ctx, "", s.program+"-save", "-c")
		if err != nil {
			a.Omitted = append(a.Omitted, fmt.Sprintf("which rules of %s matched it: %v", s.program, err))
			continue
		}
		a.Steps = append(a.Steps, countedRules(s.program, text)...)
	}
}

// ruleTexts returns the texts of a table's rules by handle.
func ruleTexts(ctx context.Context, family, name string) map[uint64]string {
	texts := map[uint64]string{}
	text, err := program(ctx, "", "nft", "-a", "-n", "list", "table", family, name)
	if err != nil {
		return texts
	}
	for line := range strings.Lines(text) {
		rule, number, there := strings.Cut(strings.TrimSpace(line), " # handle ")
		if handle, err := strconv.ParseUint(number, 10, 64); there && err == nil {
			texts[handle] = rule
		}
	}
	return texts
}

// countedRule is a line of iptables-save -c: "[1:60] -A FORWARD -p tcp -j DROP".
var countedRule = regexp.MustCompile(`^\[(\d+):\d+\] -A (\S+) (.*?)(?:-[jg] (\S+).*)?$`)

// countedPolicy is a policy line of a chain: ":FORWARD DROP [1:60]".
var countedPolicy = regexp.MustCompile(`^:(\S+) DROP \[([1-9]\d*):`)

// countedRules finds the rules with a nonzero counter in the output of iptables-legacy-save -c.
func countedRules(name, text string) (steps []Step) {
	family, table := ruleset.IP, ""
	if strings.HasPrefix(name, "ip6") {
		family = ruleset.IP6
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if t, is := strings.CutPrefix(line, "*"); is {
			table = t
		}
		step := Step{Chain: ruleset.ID{Table: family}, Verdict: ruleset.Verdict{Code: verdictContinue}, Goes: true}
		if m := countedPolicy.FindStringSubmatch(line); m != nil {
			step.Chain.Name, step.Rule.Text = name+" "+table+" "+m[1], "policy DROP"
			step.Verdict.Code, step.Goes = ruleset.Drop, false
			steps = append(steps, step)
		}
		m := countedRule.FindStringSubmatch(line)
		if m == nil || m[1] == "0" {
			continue
		}
		step.Chain.Name, step.Rule.Text = name+" "+table+" "+m[2], line[strings.Index(line, "-A ")+len("-A "+m[2]+" "):]
		switch m[4] {
		case "ACCEPT":
			step.Verdict.Code, step.Goes = ruleset.Accept, false
		case "DROP", "REJECT":
			step.Verdict.Code, step.Goes = ruleset.Drop, false
		}
		steps = append(steps, step)
	}
	return steps
}

// program runs a program in the calling thread's network namespace.
func program(ctx context.Context, input, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(input)
	var errText strings.Builder
	cmd.Stderr = &errText
	out, err := cmd.Output()
	if err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(errText.String()), "\n")
		return "", fmt.Errorf("%s: %w %s", name, err, first)
	}
	return string(out), nil
}
