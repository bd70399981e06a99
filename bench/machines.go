// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// machine is one machine with committed results.
type machine struct {
	dir       string // Relative to the results; "" for the main machine.
	name      string // CPU name.
	results   map[string]*Result
	explained map[string]map[string]*explanation
	// others are the explanations of the main machine, which apply here too.
	others map[string]map[string]*explanation
}

// machineRun is a suite's result on a machine. The machine is nil for a run of this process.
type machineRun struct {
	*Result
	machine *machine
	named   bool // several machines have results, so each is named
}

// readMachines reads the results of the main machine, then those in each subdirectory. A directory without results is
// skipped.
func readMachines(root string) (machines []*machine, err error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	dirs := []string{""}
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, e.Name())
		}
	}
	var others map[string]map[string]*explanation
	for _, dir := range dirs {
		m := &machine{dir: dir, results: map[string]*Result{}, others: others}
		if m.explained, err = readExplanations(root, dir); err != nil {
			return nil, err
		}
		if dir == "" {
			others = m.explained
		}
		if err := m.read(root); err != nil {
			return nil, err
		}
		if len(m.results) == 0 {
			continue
		}
		if slices.ContainsFunc(machines, func(o *machine) bool { return o.name == m.name }) {
			m.name += " (" + dir + ")"
		}
		machines = append(machines, m)
	}
	return machines, nil
}

// read reads the result of every suite that has one.
func (m *machine) read(root string) error {
	var first Environment
	for _, s := range Suites() {
		file := filepath.Join(root, m.dir, s.Name+".json")
		r, err := Load(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		r.summarize(s) // the comparisons may be newer than the repetitions
		m.results[s.Name] = r
		if m.name == "" {
			first, m.name = r.Environment, r.Environment.shortCPU()
		}
		if !r.Environment.sameMachine(first) {
			return fmt.Errorf("%s: measured on %s, others beside it on %s: a directory holds results of one machine", file, r.Environment.cpu(), first.cpu())
		}
	}
	return nil
}

// runsOf returns the results of a suite, the main machine's first.
func runsOf(s Suite, machines []*machine) (runs []machineRun) {
	for _, m := range machines {
		if r := m.results[s.Name]; r != nil {
			runs = append(runs, machineRun{r, m, len(machines) > 1})
		}
	}
	return runs
}

// machineSuffix names the machine if there are several.
func (r machineRun) machineSuffix() string {
	if !r.named {
		return ""
	}
	return " on " + r.machine.name
}

func (r machineRun) ratio(what string) *Ratio {
	for i := range r.Ratios {
		if r.Ratios[i].What == what {
			return &r.Ratios[i]
		}
	}
	return nil
}

// findExplanation returns the explanation of a ratio by this machine or by the main one, or nil.
func (r machineRun) findExplanation(what string) *explanation {
	if e := r.machine.explained[r.Suite][what]; e != nil {
		return e
	}
	return r.machine.others[r.Suite][what]
}

// allRatios returns the ratios of all runs, each once.
func allRatios(runs []machineRun) (all []Ratio) {
	for _, r := range runs {
		for _, q := range r.Ratios {
			if !slices.ContainsFunc(all, func(o Ratio) bool { return o.What == q.What }) {
				all = append(all, q)
			}
		}
	}
	return all
}

// sameMachine reports whether two runs used the same kind of machine.
func (e Environment) sameMachine(o Environment) bool { return e.cpu() == o.cpu() }

func (e Environment) cpu() string {
	s := e.Machine
	if e.Family != "" {
		s += ", family " + e.Family
	}
	s += fmt.Sprintf(", %d CPUs", e.CPUs)
	if e.Virtual != "" {
		s += " (" + e.Virtual + ")"
	}
	return s
}

// shortCPU returns the CPU model without marks and words that all names share.
func (e Environment) shortCPU() string {
	model, _, _ := strings.Cut(strings.NewReplacer("(R)", "", "(TM)", "", "(tm)", "").Replace(e.Machine), "@")
	words := slices.DeleteFunc(strings.Fields(model), func(w string) bool { return w == "CPU" || w == "Processor" })
	return strings.Join(words, " ")
}

// facts returns the properties of the machine, one map per group of the table.
func (e Environment) facts() []map[string]string {
	mitigations, sysctls := map[string]string{}, maps.Clone(e.Sysctls)
	for k, v := range e.Mitigations {
		mitigations["mitigation: "+k] = v
	}
	delete(sysctls, conntrackMax) // each suite sets its own limit
	return []map[string]string{
		{"CPU": e.cpu(), "memory": fmt.Sprintf("%.1f GiB", float64(e.MemoryBytes)/(1<<30)), "kernel": e.Kernel, "clock": e.Clock},
		mitigations, sysctls, e.Versions,
	}
}

// writeMachines renders the properties of all machines, one column each. If the results of one machine differ in a
// property, as after an upgrade, the cell lists all values.
func writeMachines(b *bytes.Buffer, machines []*machine) {
	if len(machines) == 0 {
		return
	}
	head, line := "| |", "|---|"
	var groups [4]map[string]bool // keys of the properties in each column group
	values := make([]map[string][]string, len(machines))
	for i, m := range machines {
		head, line = head+" "+m.name+" |", line+"---|"
		values[i] = map[string][]string{}
		for _, s := range Suites() {
			if m.results[s.Name] == nil {
				continue
			}
			for g, facts := range m.results[s.Name].Environment.facts() {
				for k, v := range facts {
					if groups[g] == nil {
						groups[g] = map[string]bool{}
					}
					groups[g][k] = true
					if !slices.Contains(values[i][k], v) {
						values[i][k] = append(values[i][k], v)
					}
				}
			}
		}
	}
	fmt.Fprintf(b, "## Machines\n\n%s\n%s\n", head, line)
	for _, keys := range groups {
		for _, k := range slices.Sorted(maps.Keys(keys)) {
			fmt.Fprintf(b, "| %s |", k)
			for i := range machines {
				fmt.Fprintf(b, " %s |", cmp.Or(strings.Join(values[i][k], "; "), "-"))
			}
			b.WriteString("\n")
		}
	}
	b.WriteString("\n")
}
