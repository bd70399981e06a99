// SPDX-License-Identifier: Apache-2.0

// Package golden reads packet cases from text files and runs them on a Subject:
// the reference model, or a datapath. A case is a configuration, a host, and a
// sequence of packets with what is expected of each:
//
//	# A client's packets reach the backend, the answers come from the service.
//	-- config --
//	services:
//	  - name: web
//	    ...
//	-- packets --
//	in wan0: ip4(src=203.0.113.5,dst=192.0.2.10)/udp(sport=4000,dport=53)/data(20)
//	forward flow-new
//	out lan0: same ip4(dst=10.0.2.2,ttl=63)
//	flows 1
//	wait 5m1s
//	flows 0
//	count service web connections=1 packets=1 bytes=48 refused=0
//	map RULE udp 10.0.2.2:4000 203.0.113.1:4000 (a host asked for it), unmap the same
//	host mtu lan0 1400 (any line of the section "host": the host changes, as traffic flows)
//	apply NAME (the configuration of the section "config NAME" takes the place of the one in force; without a name the first one)
//
// A packet's text may leave the Ethernet header out: it is then what the host's
// interfaces and neighbours call for. "same" edits the packet that came in;
// "{in}" stands for that packet's IP part inside an ICMP error. A $name in an
// expected packet matches any value the first time and must be that value from
// then on, and $name+1 the next number; "where $p even" and the like constrain it. A drop with an "out" line
// is a packet that was answered. Every service and NAT rule is counted; by reason a
// datapath must have counted what the case expects of its packets. Adding a case is adding
// a file.
//
// A section "skip" names subjects that a case does not run on, and why: "tc: ...". On
// nftables a case runs up to a line, from which on that datapath does something else:
// "nftables: line 12: ...", and "from line 12" where it may.
package golden

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/nat"
)

// Subject is what a case is run on.
type Subject interface {
	// Name of the subject: "model", "xdp", "tc", "tc-complete".
	Name() string
	// Reset forgets everything and carries the configuration on the host.
	Reset(*config.Config, nat.Host) error
	// Step lets a frame arrive.
	Step(nat.Arrival) (nat.Outcome, error)
	// Advance lets time pass. A subject that cannot turn its clock makes
	// everything it remembers older.
	Advance(time.Duration) error
	// Apply puts another configuration in the place of the one in force, as a reload does.
	Apply(*config.Config) error
	// SetHost changes addresses, routes, neighbours and links of the host to those.
	SetHost(nat.Host) error
	// SetState changes the state of a backend.
	SetState(service, backend string, s datapath.State) error
	// Map makes a mapping that an inside host requests, Unmap ends it.
	Map(datapath.Mapping) error
	Unmap(datapath.Mapping) error
	// Flows lists the flows alive.
	Flows() ([]flow.Flow, error)
	// Counters reads what was counted since Reset.
	Counters() (*datapath.Counters, error)
}

// Case is one file.
type Case struct {
	Name   string // of the file, without directory and suffix
	Path   string
	About  string // the comment at its top
	Config *config.Config
	// Later are configurations that take the place of another, by their names; "" is Config.
	Later map[string]*config.Config
	Host  nat.Host
	// Skip holds, by subject, why the case does not run on it.
	Skip  map[string]string
	Steps []Step
}

// Step is one line of the packets section, or a packet with what is expected of it.
type Step struct {
	Line int
	Kind StepKind
	// Packet
	Interface string
	Text      string // as written
	Piece     piece
	Action    nat.Action
	Reason    nat.Reason // empty: any
	Out       []Expected
	passed    bool // what becomes of it is the kernel's affair
	// Wait
	Wait time.Duration
	// Flows
	Count int
	// Counters, Backend, Where, Apply, Host: the words of the line.
	Words []string
}

// StepKind tells steps apart.
type StepKind uint8

// Kinds of steps.
const (
	StepPacket StepKind = iota
	StepWait
	StepFlows
	StepCount
	StepBackend
	StepMap
	StepUnmap
	StepWhere
	StepApply
	StepHost
)

// Expected is a packet that is to leave.
type Expected struct {
	Interface string
	Text      string // "same EDIT" or a packet, maybe with {in} and $names
}

// piece asks for one fragment of the packet: number n of those of size bytes.
type piece struct {
	n, size int
	id      uint32
}

// Load reads every *.txt file of a directory, sorted by name.
func Load(dir string) ([]*Case, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no packet cases", dir)
	}
	var cases []*Case
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		c, err := Read(f, string(b))
		if err == nil {
			err = c.counts()
		}
		if err != nil {
			return nil, err
		}
		cases = append(cases, c)
	}
	return cases, nil
}

// Read parses the text of one case; path names it in errors.
func Read(path, text string) (*Case, error) {
	c := &Case{Name: strings.TrimSuffix(filepath.Base(path), ".txt"), Path: path, Skip: map[string]string{}, Later: map[string]*config.Config{}, Host: StandardHost()}
	configurations := map[string]string{"": ""}
	section := ""
	for i, line := range strings.Split(text, "\n") {
		if head, ok := strings.CutPrefix(line, "-- "); ok {
			section = strings.TrimSuffix(head, " --")
			continue
		}
		trimmed := strings.TrimSpace(line)
		name, configures := configSection(section)
		if !configures && (trimmed == "" || strings.HasPrefix(trimmed, "#")) {
			if section == "" {
				c.About = strings.TrimSpace(c.About + " " + strings.TrimLeft(trimmed, "# "))
			}
			continue
		}
		if configures {
			configurations[name] += line + "\n"
			continue
		}
		var err error
		switch section {
		case "host":
			err = readHost(&c.Host, trimmed)
		case "skip":
			subject, why, _ := strings.Cut(trimmed, ":")
			c.Skip[strings.TrimSpace(subject)] = strings.TrimSpace(why)
		case "packets":
			err = c.step(i+1, trimmed)
		default:
			err = fmt.Errorf("text outside of the sections config, config NAME, host, skip and packets")
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, i+1, err)
		}
	}
	for name, text := range configurations {
		cfg, err := config.Decode(path, []byte(text))
		if err != nil {
			return nil, fmt.Errorf("%s: config %s: %w", path, name, err)
		}
		if c.Later[name] = cfg; name == "" {
			c.Config = cfg
		}
	}
	return c, c.check()
}

// configSection tells whether a section holds a configuration, and which: the first one has no name.
func configSection(section string) (name string, ok bool) {
	if section == "config" {
		return "", true
	}
	return strings.CutPrefix(section, "config ")
}

// check refuses cases that expect nothing of a packet.
func (c *Case) check() error {
	packets := 0
	for _, s := range c.Steps {
		if s.Kind == StepApply && c.Later[strings.Join(s.Words, " ")] == nil {
			return fmt.Errorf("%s:%d: apply NAME, of a section \"config NAME\"; without a name it is the first one", c.Path, s.Line)
		}
		if s.Kind == StepPacket {
			packets++
			if s.Action == "" {
				return fmt.Errorf("%s:%d: nothing is expected of this packet: write forward, drop or pass and a reason", c.Path, s.Line)
			}
		}
	}
	if packets == 0 {
		return fmt.Errorf("%s: no packets", c.Path)
	}
	return nil
}

// counts refuses cases that expect nothing of the counters.
func (c *Case) counts() error {
	counted := map[string]bool{}
	for _, s := range c.Steps {
		if s.Kind == StepCount && len(s.Words) > 1 {
			name, _, _ := strings.Cut(s.Words[1], "/")
			counted[name] = true
		}
	}
	last := c.Config
	for _, s := range c.Steps {
		if s.Kind == StepApply {
			last = c.Later[strings.Join(s.Words, " ")]
		}
	}
	for _, s := range last.Services {
		if !counted[s.Name] {
			return fmt.Errorf("%s: nothing is expected of the counters: write count service %s connections=N packets=N bytes=N refused=N", c.Path, s.Name)
		}
	}
	for _, r := range last.NAT {
		if !counted[r.Name] {
			return fmt.Errorf("%s: nothing is expected of the counters: write count nat %s packets=N bytes=N", c.Path, r.Name)
		}
	}
	return nil
}

// OnTheWire returns the case as somebody sees it who only watches the wires: without
// actions, reasons, flows and counters, and up to where time passes, a host asks for a
// mapping, or the given line; 0 is none.
func (c *Case) OnTheWire(line int) *Case {
	seen := *c
	seen.Steps = nil
	for _, s := range c.Steps {
		if line > 0 && s.Line >= line {
			break
		}
		switch s.Kind {
		case StepPacket:
			s.passed = s.Action == nat.Pass
			s.Action, s.Reason = "", ""
		case StepFlows, StepCount:
			continue
		case StepWait, StepMap, StepUnmap:
			return &seen
		}
		seen.Steps = append(seen.Steps, s)
	}
	return &seen
}
