// SPDX-License-Identifier: Apache-2.0

// Package golden reads packet cases from text files and runs them on a Subject: the reference model, or a datapath. A
// case is a configuration, a host, and a sequence of packets with the expected results:
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
//	map RULE udp 10.0.2.2:4000 203.0.113.1:4000 (a host requests a mapping), unmap the same
//	host mtu lan0 1400 (any line of the section "host": the host changes during traffic)
//	apply NAME (applies the section "config NAME"; without a name the first configuration)
//
// A packet's text may omit the Ethernet header. It then follows from the host's interfaces and neighbours. "same"
// edits the received packet; "{in}" is that packet's IP part inside an ICMP error. A $name in an expected packet
// matches any value the first time and the same value later; $name+1 matches the next number. "where $p even" and
// similar lines constrain a value. A drop with an "out" line is a packet with an answer.
//
// Every service and NAT rule must have a counter line. A datapath's counts by reason must equal the expected results.
// Each new case is a new file.
//
// A configuration with the nodes of a cluster runs as its first node.
//
// A section "skip" names the subjects that skip a case, with the reason: "tc: ...". On nftables a case runs up to the
// line from which that datapath behaves differently: "nftables: line 12: ...", or "from line 12" if it may differ.
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
	"github.com/sluice-lb/sluice/model"
)

// Subject is the implementation that runs a case.
type Subject interface {
	// Name of the subject: "model", "xdp", "tc", "tc-complete".
	Name() string
	// Reset discards all state and applies the configuration on the host.
	Reset(*config.Config, model.Host) error
	// Step receives a frame.
	Step(model.Arrival) (model.Outcome, error)
	// Advance advances the time. A subject with a fixed clock ages all its state instead.
	Advance(time.Duration) error
	// Apply replaces the configuration, as a reload does.
	Apply(*config.Config) error
	// SetHost replaces addresses, routes, neighbours and links of the host.
	SetHost(model.Host) error
	// SetState changes the state of a backend.
	SetState(service, backend string, s datapath.State) error
	// Map creates a mapping requested by an inside host; Unmap ends it.
	Map(datapath.Mapping) error
	Unmap(datapath.Mapping) error
	// Flows returns the live flows.
	Flows() ([]flow.Flow, error)
	// Counters returns the counts since Reset.
	Counters() (*datapath.Counters, error)
}

// Case is one file.
type Case struct {
	Name   string // of the file, without directory and suffix
	Path   string
	About  string // the comment at the top of the file
	Config *config.Config
	// Later are further configurations by name; "" is Config.
	Later map[string]*config.Config
	Host  model.Host
	// Skip is the reason by subject why the case does not run on it.
	Skip  map[string]string
	Steps []Step
}

// Step is one line of the packets section, or a packet with its expected results.
type Step struct {
	Line int
	Kind StepKind
	// Packet
	Interface string
	Text      string // the line as written in the file
	Piece     fragmentSelector
	Action    model.Action
	Reason    model.Reason // empty means any
	Out       []Expected
	passed    bool // the kernel decides about the packet
	// Wait
	Wait time.Duration
	// Flows
	Count int
	// Counters, Backend, Where, Apply, Host: the words of the line.
	Words []string
}

// StepKind is the kind of a step.
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

// Expected is an expected outgoing packet.
type Expected struct {
	Interface string
	Text      string // "same EDIT" or a packet, possibly with {in} and $names
}

// fragmentSelector selects one fragment of the packet: number n of the fragments with size bytes.
type fragmentSelector struct {
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

// Read parses the text of one case; errors contain path.
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
			err = c.parsePacketLine(i+1, trimmed)
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
		if nodes := cfg.Nodes(); len(nodes) > 0 {
			cfg = cfg.ForNode(nodes[0].Name)
		}
		if c.Later[name] = cfg; name == "" {
			c.Config = cfg
		}
	}
	return c, c.check()
}

// configSection reports whether a section is a configuration, and returns its name. The first configuration has no
// name.
func configSection(section string) (name string, ok bool) {
	if section == "config" {
		return "", true
	}
	return strings.CutPrefix(section, "config ")
}

// check rejects cases with a packet without expected results.
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

// counts rejects cases without expected counters.
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

// OnTheWire returns the part of the case that is visible on the wires: no actions, reasons, flows or counters. It
// ends where time advances, at a mapping, or at the given line; 0 is none.
func (c *Case) OnTheWire(line int) *Case {
	seen := *c
	seen.Steps = nil
	for _, s := range c.Steps {
		if line > 0 && s.Line >= line {
			break
		}
		switch s.Kind {
		case StepPacket:
			s.passed = s.Action == model.Pass
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
