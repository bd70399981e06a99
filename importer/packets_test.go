// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// TestPackets sends the packets of each testdata/SOURCE/NAME.packets through the sample's own rules in one
// namespace, and through the import with the remaining rules in another. The same frames must leave by the same
// interfaces, and must equal the frames in the file. A packet marked "differs LINE" must leave differently, and
// the report must name that line.
//
// TestPackets runs the import on nftables. Files with the line "-- ebpf --" also run on eBPF, which selects
// other source ports than the kernel.
//
// The file is a packet case (package golden) without a configuration. A first section "names" renames the
// interfaces of the standard host: "lan0 docker0".
func TestPackets(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	files, err := filepath.Glob("testdata/*/*.packets")
	if err != nil || len(files) == 0 {
		t.Fatal("no packets in testdata", err)
	}
	for _, f := range files {
		source, name := filepath.Base(filepath.Dir(f)), strings.TrimSuffix(filepath.Base(f), ".packets")
		for _, program := range map[string][]string{"iptables": {"iptables-nft-restore", "iptables-legacy-restore"}, "nftables": {"nft"}, "nftlb": {"nftlb"}}[source] {
			t.Run(source+"/"+name+"/"+program, func(t *testing.T) {
				labtest.Require(t, labtest.Tool(program))
				s := readSample(t, source, name)
				r, err := importer.Import(s.source, s.text, s.options)
				if err != nil {
					t.Fatal(err)
				}
				text, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				c, differs := packetCase(t, f, string(text), r.YAML)
				for _, name := range []string{"nftables", "ebpf"} {
					if name == "ebpf" && !strings.Contains(string(text), "\n-- ebpf --\n") {
						continue
					}
					t.Run(name, func(t *testing.T) {
						b := &both{t: t, program: program, sample: s, imported: r, differs: differs, ebpf: name == "ebpf", dir: t.TempDir()}
						t.Cleanup(b.drop) // before the removal of its directory, where a bpffs may be mounted
						if err := c.OnTheWire(0).Run(b); err != nil {
							t.Error(err)
						}
					})
				}
			})
		}
	}
}

// packetCase reads the file and inserts the configuration. It returns the lines of the source that cause
// differences, by the number of the packet.
func packetCase(t *testing.T, path, text, yaml string) (*golden.Case, map[int]int) {
	t.Helper()
	about, rest, _ := strings.Cut(strings.Replace(text, "-- ebpf --\n", "", 1), "-- ")
	names := []string{}
	if after, ok := strings.CutPrefix(rest, "names --\n"); ok {
		section, more, _ := strings.Cut(after, "-- ")
		names, rest = strings.Fields(section), more
	}
	differs, packets := map[int]int{}, 0
	lines := strings.Split(rest, "\n")
	for i, l := range lines {
		var line int
		if strings.HasPrefix(l, "in ") {
			packets++
		} else if n, _ := fmt.Sscanf(l, "differs %d", &line); n == 1 {
			differs[packets], lines[i] = line, ""
		}
	}
	// Only leaving packets are compared; a file has neither actions nor reasons.
	for i, l := range lines {
		if strings.HasPrefix(l, "in ") {
			lines[i] = l + "\nforward any"
		}
	}
	c, err := golden.Read(path, about+"-- config --\n"+yaml+"\n-- "+strings.Join(lines, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(names); i += 2 {
		rename(&c.Host, names[i], names[i+1])
	}
	return c, differs
}

func rename(h *model.Host, from, to string) {
	change := func(s *string) {
		if *s == from {
			*s = to
		}
	}
	for i := range h.Interfaces {
		change(&h.Interfaces[i].Name)
	}
	for i := range h.Neighbours {
		change(&h.Neighbours[i].Interface)
	}
	for i := range h.Routes {
		change(&h.Routes[i].Interface)
	}
}

// both has the host with its own rules, and a second host with the import.
type both struct {
	t        *testing.T
	program  string
	sample   sample
	imported *draft.Result
	differs  map[int]int
	packets  int
	ebpf     bool
	dir      string // of the datapath

	original, copied *wire
	d                interface {
		Apply(context.Context, *datapath.Snapshot) (*datapath.Change, error)
		Remove(context.Context) error
		Close() error
	}
}

var _ golden.Subject = (*both)(nil)

func (b *both) Name() string { return "import" }

func (b *both) drop() {
	if b.d != nil {
		err := b.copied.inside(func() error { return b.d.Remove(context.Background()) })
		if err := errors.Join(err, b.d.Close()); err != nil {
			b.t.Error(err)
		}
	}
	for _, w := range []*wire{b.original, b.copied} {
		if w != nil {
			w.close()
		}
	}
}

// Reset implements golden.Subject.
func (b *both) Reset(c *config.Config, h model.Host) (err error) {
	if b.original, err = newWire(h); err != nil {
		return err
	}
	if b.copied, err = newWire(h); err != nil {
		return err
	}
	if err := b.original.load(b.program, b.sample.text); err != nil {
		return err
	}
	return b.copied.inside(func() error {
		if b.ebpf {
			c.Attach, c.HoldAddresses = config.AttachTC, config.SwitchOff
			b.copied.atFarEnds = true
			b.d, err = ebpf.Open(ebpf.Options{StateDir: b.dir})
		} else {
			b.d, err = nft.Open()
		}
		if err != nil {
			return err
		}
		if _, err := b.d.Apply(context.Background(), golden.Snapshot(c)); err != nil {
			return err
		}
		return restore(b.program, b.imported.Rest)
	})
}

// Step implements golden.Subject.
func (b *both) Step(in model.Arrival) (model.Outcome, error) {
	b.packets++
	one, err := b.original.step(in)
	if err != nil {
		return model.Outcome{}, err
	}
	other, err := b.copied.step(in)
	if err != nil {
		return model.Outcome{}, err
	}
	line, differs := b.differs[b.packets]
	switch same := sameFrames(one, other); {
	case !differs && !same:
		b.t.Errorf("packet %d: %s\noriginal:\n%simported:\n%s", b.packets, packet.Parse(in.Frame), frames(one), frames(other))
	case differs && same:
		b.t.Errorf("packet %d: the same leaves, though the file says that line %d makes a difference", b.packets, line)
	case differs && !b.noted(line):
		b.t.Errorf("packet %d: the report says nothing of line %d", b.packets, line)
	}
	return model.Outcome{Out: one}, nil
}

func (b *both) noted(line int) bool {
	for _, n := range b.imported.Notes {
		if n.Line == line && n.Kind != draft.Implied {
			return true
		}
	}
	return false
}

func sameFrames(a, b []model.Departure) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Interface != b[i].Interface || !bytes.Equal(a[i].Frame, b[i].Frame) {
			return false
		}
	}
	return true
}

func frames(list []model.Departure) string {
	var s strings.Builder
	for _, d := range list {
		fmt.Fprintf(&s, "  out %s: %s\n", d.Interface, packet.Parse(d.Frame))
	}
	if len(list) == 0 {
		return "  nothing\n"
	}
	return s.String()
}

// The other methods of golden.Subject: these files do not use them.

func (b *both) Advance(time.Duration) error                   { return errors.ErrUnsupported }
func (b *both) Apply(*config.Config) error                    { return errors.ErrUnsupported }
func (b *both) SetHost(model.Host) error                      { return errors.ErrUnsupported }
func (b *both) SetState(string, string, datapath.State) error { return errors.ErrUnsupported }
func (b *both) Map(datapath.Mapping) error                    { return errors.ErrUnsupported }
func (b *both) Unmap(datapath.Mapping) error                  { return errors.ErrUnsupported }
func (b *both) Flows() ([]flow.Flow, error)                   { return nil, errors.ErrUnsupported }
func (b *both) Counters() (*datapath.Counters, error)         { return nil, errors.ErrUnsupported }
