// SPDX-License-Identifier: Apache-2.0

// Package doctor finds out why NAT on a host is slow or loses packets. It reads the host twice over
// a window, runs a list of named checks on the readings, and concludes which cause to act on first.
// It changes nothing.
package doctor

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/doctor/severity"
)

// Verdict is how bad a finding is.
type Verdict = severity.Level

// The verdicts, from good to bad. Unknown says that the check could not look.
const (
	OK       = severity.OK
	Unknown  = severity.Unknown
	Info     = severity.Info
	Warn     = severity.Warn
	Critical = severity.Critical
)

// Check is one thing that the doctor looks at.
type Check struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	About string `json:"about"` // the compared values
	// Host checks run once; the others in every namespace.
	Host bool `json:"host"`
	// Symptom is the effect for users. Remedy is the correction, with its cost and risk. They are
	// shown with verdicts of warn and critical.
	Symptom string `json:"symptom"`
	Remedy  Remedy `json:"remedy"`
	// Weight orders causes of equal verdict: causes before their consequences.
	Weight int                                        `json:"-"`
	Run    func(ctx context.Context, c *Case) Finding `json:"-"`
}

// Remedy is what to do about a finding.
type Remedy struct {
	Do string `json:"do"` // in words
	// Commands carry out the remedy. Each runs unchanged in a shell of the finding's namespace, or
	// of the host's own namespace if Do names it. The list is empty if the right command depends on
	// the user's intention.
	Commands []string `json:"commands"`
	Cost     string   `json:"cost,omitempty"`
	Risk     string   `json:"risk,omitempty"`
}

// Case is the input of a check: the host, and one of its namespaces.
type Case struct {
	*observe.Sample
	NS *observe.Namespace // nil for host checks
}

// Finding is the answer of a check.
type Finding struct {
	Check     string     `json:"check"`
	Name      string     `json:"name"`
	Namespace string     `json:"namespace,omitempty"` // empty: the whole host
	Verdict   Verdict    `json:"verdict"`
	Summary   string     `json:"summary"`
	Evidence  []Evidence `json:"evidence,omitempty"`
	Symptom   string     `json:"symptom,omitempty"`
	Remedy    *Remedy    `json:"remedy,omitempty"`
	// CausedBy is the check with the finding that explains this one; empty for causes.
	CausedBy string `json:"caused_by,omitempty"`
	// LostPerSecond is how many packets or connections the cause costs.
	LostPerSecond float64 `json:"lost_per_second,omitempty"`
	// Concerns is the traffic that the finding can explain; nil: any traffic of the namespace.
	Concerns *Concerns `json:"concerns,omitempty"`

	weight int
	fill   []string // words in the remedy of the check, each with its value here
}

// Evidence is a value and where it was read.
type Evidence struct {
	What   string `json:"what"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

// Report is the result of one examination.
type Report struct {
	At       time.Time     `json:"at"`
	Host     string        `json:"kernel"`
	Window   time.Duration `json:"window_ns"`
	Findings []Finding     `json:"findings"`
	// Conclusion names the most likely causes in the order in which to act, the worst
	// first. It is never empty.
	Conclusion []Conclusion `json:"conclusion"`
	Worst      Verdict      `json:"worst"`
	Limits     []string     `json:"limits,omitempty"`
	Namespaces []string     `json:"namespaces"`
	// CannotTell is set if too many checks had no data to conclude that nothing is wrong. Missing
	// are the capabilities that some checks lack.
	CannotTell bool     `json:"cannot_tell"`
	Missing    []string `json:"missing_capabilities,omitempty"`

	traffic map[string]*outcome.Report // by namespace
	first   *outcome.Class             // of the first conclusion
}

// exitCannotTell is the exit code of reports that found nothing without sufficient data. Code 3
// means that the examination failed.
const exitCannotTell = 4

// ExitCode is 2 for a critical finding, 1 for a warning, 4 for CannotTell, else 0.
func (r *Report) ExitCode() int {
	switch r.Worst {
	case Critical:
		return 2
	case Warn:
		return 1
	}
	if r.CannotTell {
		return exitCannotTell
	}
	return 0
}

// Examine reads the host, waits, reads it again, and judges.
func Examine(ctx context.Context, reader observe.Reader, o observe.Options) (*Report, error) {
	sample, err := observe.Take(ctx, reader, o)
	if err != nil {
		return nil, err
	}
	return Judge(ctx, sample), nil
}

// Judge runs all checks on a sample and concludes.
func Judge(ctx context.Context, s *observe.Sample) *Report {
	r := &Report{At: time.Now(), Host: s.After.Release, Window: s.Window, Limits: s.Limits}
	r.traffic = map[string]*outcome.Report{}
	for _, n := range s.Namespaces {
		r.Namespaces = append(r.Namespaces, n.Name)
		r.traffic[n.Name] = n.Traffic
	}
	for _, check := range Checks() {
		if check.Host {
			c := &Case{Sample: s}
			r.add(check, c, check.Run(ctx, c))
			continue
		}
		for _, n := range s.Namespaces {
			c := &Case{Sample: s, NS: n}
			r.add(check, c, check.Run(ctx, c))
		}
	}
	r.Missing = missingCapabilities(s)
	r.conclude(s)
	for _, f := range r.Findings {
		r.Worst = max(r.Worst, f.Verdict)
	}
	return r
}

// missingCapabilities returns the capabilities whose lack made data unreadable.
func missingCapabilities(s *observe.Sample) (names []string) {
	lack := func(err error, capabilities ...string) {
		if !errors.Is(err, os.ErrPermission) {
			return
		}
		for _, name := range capabilities {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	for _, n := range s.Namespaces {
		lack(n.TableErr, "CAP_NET_ADMIN")
		lack(n.RulesErr, "CAP_NET_ADMIN")
		lack(n.After.ConntrackErr, "CAP_NET_ADMIN")
		lack(n.DropsErr, "CAP_BPF", "CAP_PERFMON")
	}
	return names
}

// add completes a finding with the texts of its check.
func (r *Report) add(check Check, c *Case, f Finding) {
	f.Check, f.Name, f.weight = check.ID, check.Name, check.Weight
	if c.NS != nil {
		f.Namespace = c.NS.Name
	}
	if f.Verdict >= Warn {
		if f.Symptom == "" {
			f.Symptom = check.Symptom
		}
		if f.Remedy == nil {
			f.Remedy = &check.Remedy
		}
	}
	if f.Remedy != nil {
		f.Remedy = f.Remedy.filled(append(f.fill, c.tableSizes()...))
	}
	f.Summary = agree(f.Summary)
	for i := range f.Evidence {
		f.Evidence[i].Value = agree(f.Evidence[i].Value)
	}
	r.Findings = append(r.Findings, f)
}

// unfilled matches a word of a remedy for which this finding has nothing to put.
var unfilled = regexp.MustCompile(`\b(ADDRESS|BUDGET|BUCKETS|CHAIN|CPUS|DESTINATION|EXPORTER|IFACE|LARGER|LIMIT|MAX|MICROSECONDS|NAMESPACE|PORTS|RULE|SHARE|SMALLER|THRESHOLDS)\b`)

// filled replaces the words of a remedy by their values. It leaves out commands with a word that
// has no value, because they would not run.
func (m Remedy) filled(pairs []string) *Remedy {
	fill := strings.NewReplacer(pairs...)
	commands := []string{}
	for _, command := range m.Commands {
		if command = fill.Replace(command); !unfilled.MatchString(command) {
			commands = append(commands, withSlashes(command))
		}
	}
	m.Do, m.Commands = fill.Replace(m.Do), commands
	return &m
}

// interfaceSetting matches a setting of an interface in a command.
var interfaceSetting = regexp.MustCompile(`\b(net\.ipv[46]\.(?:conf|neigh)\.)([^ =]+)(\.\w+=)`)

// withSlashes writes the dots of interface names in settings as slashes, as sysctl(8) requires.
func withSlashes(command string) string {
	return interfaceSetting.ReplaceAllStringFunc(command, func(setting string) string {
		m := interfaceSetting.FindStringSubmatch(setting)
		return m[1] + strings.ReplaceAll(m[2], ".", "/") + m[3]
	})
}

// List returns the checks with an ID or name that begins with one of the words, or all checks
// without words.
func List(words ...string) []Check {
	var out []Check
	for _, c := range Checks() {
		match := len(words) == 0
		for _, w := range words {
			match = match || strings.HasPrefix(strings.ToLower(c.ID), strings.ToLower(w)) || strings.HasPrefix(c.Name, strings.ToLower(w))
		}
		if match {
			out = append(out, c)
		}
	}
	return out
}
