// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/importer"
	"github.com/sluice-lb/sluice/importer/verify"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

var (
	sets = flag.Int("sets", 300, "rule sets that TestRandomRules compares")
	seed = flag.Uint64("seed", 1, "of TestRandomRules; 0 takes a new one")
)

// randomHost is the gateway that the random rules are for: two uplinks and two inside networks.
func randomHost() model.Host {
	h := model.Host{}
	add := func(name string, mtu int, n byte, addresses ...string) {
		i := model.Interface{Name: name, MAC: packet.MAC{2, 0, 0, 0, n, 1}, MTU: mtu}
		for _, a := range addresses {
			i.Addresses = append(i.Addresses, netip.MustParsePrefix(a))
		}
		h.Interfaces = append(h.Interfaces, i)
	}
	add("wan0", 1400, 1, "198.51.100.1/24", "198.51.100.10/24")
	add("wan1", 1500, 2, "203.0.113.1/25")
	add("lan0", 1500, 3, "10.0.2.1/24")
	add("dmz0", 1500, 4, "10.0.3.1/24")
	neighbour := func(iface, address string, n, last byte) {
		h.Neighbours = append(h.Neighbours, model.Neighbour{Interface: iface, Address: netip.MustParseAddr(address), MAC: packet.MAC{2, 0, 0, 0, n, last}})
	}
	neighbour("wan0", "198.51.100.2", 1, 2)
	neighbour("wan1", "203.0.113.2", 2, 2)
	neighbour("wan1", "203.0.113.77", 2, 77)
	for i := byte(2); i < 12; i++ {
		neighbour("lan0", netip.AddrFrom4([4]byte{10, 0, 2, i}).String(), 3, i)
		neighbour("dmz0", netip.AddrFrom4([4]byte{10, 0, 3, i}).String(), 4, i)
	}
	route := func(to, via, iface string) {
		h.Routes = append(h.Routes, model.Route{To: netip.MustParsePrefix(to), Via: netip.MustParseAddr(via), Interface: iface})
	}
	route("0.0.0.0/0", "198.51.100.2", "wan0")
	route("192.0.2.128/25", "203.0.113.2", "wan1")
	return h
}

// gateway carries a configuration as the daemon does: each object on the datapath that can.
type gateway struct {
	engine *engine.Engine
}

func openGateway(dir string) (verify.Datapath, error) {
	log := slog.New(slog.DiscardHandler)
	e, err := ebpf.Open(ebpf.Options{StateDir: dir, Log: log})
	if err != nil {
		return nil, err
	}
	n, err := nft.Open()
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &gateway{engine.New(engine.Options{Datapaths: []datapath.Datapath{e, n}, Log: log})}, nil
}

func (g *gateway) Apply(ctx context.Context, c *config.Config) error {
	_, err := g.engine.Apply(ctx, c)
	return err
}

func (g *gateway) Close() error { return g.engine.Stop(context.Background(), false) }

// TestRandomRules compares random rules of iptables and nftables with their import: each probe that
// has another fate must be announced by a note about a rule that matched, or about its object.
func TestRandomRules(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack, labtest.BPF, labtest.Tool("iptables-nft-restore"), labtest.Tool("nft"))
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", *seed)
	h := randomHost()
	dir := t.TempDir()
	pair, err := verify.NewPair(h, func() (verify.Datapath, error) { return openGateway(dir) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pair.Close(); err != nil {
			t.Error(err)
		}
	})
	differences, silent, probes := 0, 0, 0
	for n := range *sets {
		c := chance{rand.New(rand.NewPCG(*seed, uint64(n)))}
		set := c.ruleSet()
		source, program, text := "iptables", verify.IPTables, set.iptables()
		if n%3 == 1 {
			source, program = "nftables", verify.Nftables
			if text, err = verify.JSON(set.nftables()); err != nil {
				t.Fatalf("set %d: %v\n%s", n, err, set.nftables())
			}
		}
		o := importer.Options{}
		if c.one(2) {
			o.Outside = []string{"wan0"}
		}
		if c.one(2) {
			o.Addresses = map[string][]netip.Prefix{}
			for _, i := range h.Interfaces {
				o.Addresses[i.Name] = i.Addresses
			}
		}
		r, err := importer.Import(source, text, o)
		if err != nil {
			t.Fatalf("set %d: %v\n%s", n, err, text)
		}
		if err := pair.Load(program, text, r); err != nil {
			t.Errorf("set %d: %v\n%s\n%s", n, err, text, r.YAML)
			continue
		}
		list := verify.Probes(h, r, 40, c.Rand)
		probes += len(list)
		found, err := pair.Compare(context.Background(), list)
		if err != nil {
			t.Fatal(err)
		}
		differences += len(found)
		said := 0
		for _, d := range found {
			if !d.Announced && d.Known == "" {
				silent++
				if said++; said == 1 {
					var report strings.Builder
					_ = r.Report(&report, true)
					if source == "nftables" {
						text = set.nftables()
					}
					t.Errorf("set %d (%s, outside %v, addresses %t): %s\noriginal, lines %v:\n  %s\nimported:\n  %s\n%s\n%s\n%s\nrest:\n%s", n, source, o.Outside, o.Addresses != nil, d.Probe, d.Lines,
						strings.Join(d.Original, "\n  "), strings.Join(d.Imported, "\n  "), text, r.YAML, report.String(), r.Rest)
				}
			}
		}
		if silent > 20 {
			t.Fatal("too many")
		}
	}
	t.Logf("%d rule sets, %d probes, %d differences announced, %d silent", *sets, probes, differences-silent, silent)
}

// TestFieldRules compares real-world rules with their import, on a guessed host: the rules of testdata, and the
// samples of package importer. Every difference must be announced.
func TestFieldRules(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack, labtest.BPF, labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"), labtest.Tool("nft"))
	var files []string
	for _, pattern := range []string{"testdata/*.v4", "../testdata/iptables/*.in", "../testdata/nftables/*.in"} {
		list, err := filepath.Glob(pattern)
		if err != nil || len(list) == 0 {
			t.Fatal("no rules in", pattern, err)
		}
		files = append(files, list...)
	}
	for n, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := exec.LookPath("ipset"); err != nil && strings.Contains(string(data), "\ncreate ") {
			continue // its sets need ipset, which is no package of the tests
		}
		source, program := "iptables", []verify.Program{verify.IPTables, verify.IPTablesLegacy}[n%2]
		if strings.Contains(file, "nftables") {
			source, program = "nftables", verify.Nftables
		}
		for _, known := range []bool{false, true} {
			name := filepath.Base(file)
			if known {
				name += "/addresses"
			}
			t.Run(name, func(t *testing.T) { compareFile(t, source, program, string(data), known) })
		}
	}
}

// compareFile imports rules, with the addresses of the guessed host or without, and compares.
func compareFile(t *testing.T, source string, program verify.Program, text string, known bool) {
	o := importer.Options{}
	r, err := importer.Import(source, text, o)
	if err != nil {
		t.Fatal(err)
	}
	h := verify.Guess(r, o.Outside, nil)
	if known {
		o.Addresses = map[string][]netip.Prefix{}
		for _, i := range h.Interfaces {
			o.Addresses[i.Name] = i.Addresses
		}
		if r, err = importer.Import(source, text, o); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	pair, err := verify.NewPair(h, func() (verify.Datapath, error) { return openGateway(dir) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pair.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := pair.Load(program, text, r); err != nil {
		t.Fatalf("%v\n%s\nrest:\n%s", err, r.YAML, r.Rest)
	}
	found, err := pair.Compare(context.Background(), verify.Probes(h, r, 150, rand.New(rand.NewPCG(1, 1))))
	if err != nil {
		t.Fatal(err)
	}
	announced := 0
	for _, d := range found {
		if d.Announced || d.Known != "" {
			announced++
			continue
		}
		t.Errorf("%s\noriginal, lines %v:\n  %s\nimported:\n  %s", d.Probe, d.Lines, strings.Join(d.Original, "\n  "), strings.Join(d.Imported, "\n  "))
	}
	if t.Failed() {
		var report strings.Builder
		_ = r.Report(&report, true)
		t.Logf("host: %s\n%s\n%s\nrest:\n%s", verify.Describe(h), r.YAML, report.String(), r.Rest)
	}
	t.Logf("%d differences, announced or known: %d", len(found), announced)
}
