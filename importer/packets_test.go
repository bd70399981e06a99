// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/nat/golden"
	"github.com/sluice-lb/sluice/packet"
)

// TestPackets sends the packets of each testdata/SOURCE/NAME.packets through the sample's own rules
// in one namespace and through what was imported in another, with the rest of the rules beside it:
// the same frames must leave by the same interfaces, and they must be those that the file expects.
// A packet for which the file says "differs LINE" must leave otherwise, and the report must say so
// of that line.
//
// The file is a packet case (package golden) without a configuration. A first section "names" gives
// the interfaces of the standard host other names: "lan0 docker0".
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
				if _, err := exec.LookPath(program); program == "nftlb" && err != nil {
					t.Skip("needs the program nftlb") // of the packages for comparisons
				}
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
				b := &both{t: t, program: program, sample: s, imported: r, differs: differs}
				t.Cleanup(b.drop)
				if err := c.OnTheWire(0).Run(b); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// packetCase reads the file with the configuration in its place, and the lines of the source that
// packets differ by, by the number of the packet.
func packetCase(t *testing.T, path, text, yaml string) (*golden.Case, map[int]int) {
	t.Helper()
	about, rest, _ := strings.Cut(text, "-- ")
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
	// Only what leaves is compared; a file names neither actions nor reasons.
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

func rename(h *nat.Host, from, to string) {
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

// both is the host with its own rules, and a second one with what was imported of them.
type both struct {
	t        *testing.T
	program  string
	sample   sample
	imported *draft.Result
	differs  map[int]int
	packets  int

	original, copied *wire
	d                *nft.Datapath
}

var _ golden.Subject = (*both)(nil)

func (b *both) Name() string { return "import" }

func (b *both) drop() {
	if b.d != nil {
		if err := b.d.Close(); err != nil {
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
func (b *both) Reset(c *config.Config, h nat.Host) (err error) {
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
		if b.d, err = nft.Open(); err != nil {
			return err
		}
		if _, err := b.d.Apply(context.Background(), golden.Snapshot(c)); err != nil {
			return err
		}
		return restore(b.program, b.imported.Rest)
	})
}

// Step implements golden.Subject.
func (b *both) Step(in nat.Arrival) (nat.Outcome, error) {
	b.packets++
	one, err := b.original.step(in)
	if err != nil {
		return nat.Outcome{}, err
	}
	other, err := b.copied.step(in)
	if err != nil {
		return nat.Outcome{}, err
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
	return nat.Outcome{Out: one}, nil
}

func (b *both) noted(line int) bool {
	for _, n := range b.imported.Notes {
		if n.Line == line && n.Kind != draft.Implied {
			return true
		}
	}
	return false
}

func sameFrames(a, b []nat.Departure) bool {
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

func frames(list []nat.Departure) string {
	var s strings.Builder
	for _, d := range list {
		fmt.Fprintf(&s, "  out %s: %s\n", d.Interface, packet.Parse(d.Frame))
	}
	if len(list) == 0 {
		return "  nothing\n"
	}
	return s.String()
}

// The rest of golden.Subject: nothing of it stands in these files.

func (b *both) Advance(time.Duration) error                   { return errors.ErrUnsupported }
func (b *both) SetState(string, string, datapath.State) error { return errors.ErrUnsupported }
func (b *both) Map(datapath.Mapping) error                    { return errors.ErrUnsupported }
func (b *both) Unmap(datapath.Mapping) error                  { return errors.ErrUnsupported }
func (b *both) Flows() ([]flow.Flow, error)                   { return nil, errors.ErrUnsupported }
func (b *both) Counters() (*datapath.Counters, error)         { return nil, errors.ErrUnsupported }

// wire is a network namespace that is a case's host, with the far ends of its interfaces in another.
type wire struct {
	thread      chan func() // runs what it is given in the namespace, on one CPU
	names       map[int]string
	peers       map[string]int
	far         netns.NsHandle
	send, watch int
}

func newWire(h nat.Host) (*wire, error) {
	w := &wire{thread: make(chan func()), send: -1, watch: -1}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		made <- w.build(h)
		for f := range w.thread {
			f()
		}
		w.far.Close()
	}()
	err := <-made
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *wire) close() {
	unix.Close(w.send)
	unix.Close(w.watch)
	close(w.thread)
}

func (w *wire) build(h nat.Host) (err error) {
	if _, _, err := kernel.OneCPU(); err != nil {
		return err
	}
	if w.far, err = netns.New(); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0o644); err != nil {
		return err
	}
	if w.send, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(w.send, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		return err
	}
	home, err := netns.New()
	if err != nil {
		return err
	}
	home.Close() // the thread is in it
	ifaces, peers, err := labtest.CaseHost(h, w.far)
	if err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/auto_flowlabels", []byte("0"), 0o644); err != nil {
		return err
	}
	w.names, w.peers = map[int]string{}, peers
	for name, index := range ifaces {
		w.names[index] = name
	}
	every := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	if w.watch, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(every)); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(int64(10 * time.Second))
	return unix.SetsockoptTimeval(w.watch, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
}

// inside runs f in the namespace.
func (w *wire) inside(f func() error) error {
	done := make(chan error)
	w.thread <- func() { done <- f() }
	return <-done
}

func (w *wire) load(program, rules string) error {
	return w.inside(func() error { return restore(program, rules) })
}

// restore loads rules in the calling thread's namespace. Those of ip6tables stand behind those of
// iptables.
func restore(program, rules string) error {
	v4, v6 := rules, ""
	if at := strings.Index(rules, "# Generated by ip6tables-save"); at >= 0 {
		v4, v6 = rules[:at], rules[at:]
	}
	for _, part := range []struct{ program, rules string }{{program, v4}, {"ip6" + strings.TrimPrefix(program, "ip"), v6}} {
		if strings.TrimSpace(part.rules) == "" {
			continue
		}
		cmd := exec.Command(part.program)
		switch program {
		case "nft":
			cmd = exec.Command("nft", "-j", "-f", "-")
		case "nftlb":
			file, err := os.CreateTemp("", "nftlb") // it takes no pipe
			if err != nil {
				return err
			}
			defer os.Remove(file.Name())
			if _, err := file.WriteString(rules); err != nil {
				return err
			}
			file.Close()
			cmd = exec.Command("nftlb", "-e", "-L", "1", "-c", file.Name())
		}
		cmd.Stdin = strings.NewReader(part.rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", part.program, err, out)
		}
	}
	return nil
}

// marker is the type of a frame that follows a packet: when it has come in, the packet is through.
const marker = 0x88b5

// step sends a frame and returns what left until the marker has arrived.
func (w *wire) step(in nat.Arrival) (out []nat.Departure, err error) {
	mark := packet.Packet{&packet.Ethernet{Type: packet.Force(marker)}, &packet.Data{Bytes: make([]byte, 46)}}.Build()
	for _, frame := range [][]byte{in.Frame, mark} {
		if err := unix.Sendto(w.send, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.peers[in.Interface]}); err != nil {
			return nil, err
		}
	}
	buf := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(w.watch, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("await the marker: %w", err)
		}
		l, ok := from.(*unix.SockaddrLinklayer)
		if !ok || n < 14 {
			continue
		}
		name, ours := w.names[l.Ifindex]
		switch own := buf[0] == 0x33; { // multicast of the host's own IPv6
		case !ours || own:
		case l.Pkttype == unix.PACKET_OUTGOING:
			out = append(out, nat.Departure{Interface: name, Frame: plain(packet.Parse(buf[:n]))})
		case binary.BigEndian.Uint16(buf[12:]) == marker:
			return out, nil
		}
	}
}

// plain builds a packet. Of what the kernel itself makes, which has a new identification each time,
// it leaves that out.
func plain(p packet.Packet) []byte {
	if ip, ok := packet.Find[*packet.IPv4](p); ok && ip.TTL == 64 {
		ip.ID, ip.Checksum = 0, packet.Forced{}
	}
	return p.Build()
}
