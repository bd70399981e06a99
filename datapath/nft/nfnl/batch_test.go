// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// compiled returns the ruleset of an example file.
func compiled(t *testing.T, file string) *ruleset.Ruleset {
	t.Helper()
	c, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	s := &datapath.Snapshot{Config: c}
	for i := range c.Services {
		if compile.Carries(&c.Services[i]) == nil {
			s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: make([]datapath.State, len(c.Services[i].Backends))})
		}
	}
	for i := range c.NAT {
		if compile.CarriesNAT(&c.NAT[i]) == nil {
			s.NAT = append(s.NAT, &c.NAT[i])
		}
	}
	for i := range c.Firewall.Rules {
		s.Rules = append(s.Rules, &c.Firewall.Rules[i])
	}
	lan := compile.Interface{Name: "lan0", Index: 2}
	r, err := compile.Compile(s, compile.Env{
		Timeouts:   true,
		Interfaces: []compile.Interface{lan},
		Route:      func(netip.Addr) (compile.Interface, error) { return lan, nil },
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r.Ruleset
}

// TestWrittenIsRead decodes the messages of a transaction as if the kernel had
// sent them back.
func TestWrittenIsRead(t *testing.T) {
	files, err := filepath.Glob("../../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			want := compiled(t, file)
			var b batch
			b.delta(ruleset.Diff(nil, want))
			got := decodeMessages(t, b.buf)
			left := ruleset.Diff(&ruleset.Ruleset{Fragments: []*ruleset.Fragment{got}}, want)
			if !left.Empty() {
				t.Errorf("read differs from written: %+v", left)
			}
		})
	}
}

func decodeMessages(t *testing.T, buf []byte) *ruleset.Fragment {
	t.Helper()
	f := &ruleset.Fragment{}
	chains := make(map[ruleset.ID]*ruleset.Chain)
	sets := make(map[ruleset.ID]*ruleset.Set)
	lists := make(map[ruleset.ID][]ruleset.Element)
	ends := make(map[ruleset.ID][]string)
	for {
		m, rest, ok := nextMessage(buf)
		if !ok {
			break
		}
		buf = rest
		family, attrs := m.body[0], m.body[genHeader:]
		switch int(m.kind & 0xff) {
		case unix.NFT_MSG_NEWTABLE:
		case unix.NFT_MSG_NEWCHAIN:
			c := decodeChain(family, attrs)
			f.Chains, chains[c.ID] = append(f.Chains, c), c
		case unix.NFT_MSG_NEWSET:
			s := decodeSet(family, attrs)
			f.Sets, sets[s.ID] = append(f.Sets, s), s
		case unix.NFT_MSG_NEWOBJ:
			o, _ := decodeObject(family, attrs)
			f.Objects = append(f.Objects, o)
		case unix.NFT_MSG_NEWRULE:
			id, r, _ := decodeRule(family, attrs)
			chains[id].Rules = append(chains[id].Rules, r)
		case unix.NFT_MSG_NEWSETELEM:
			id := ruleset.ID{Table: ruleset.Family(family)}
			attrsOf(attrs, func(k uint16, v []byte) {
				if k == unix.NFTA_SET_ELEM_LIST_SET {
					id.Name = cstring(v)
				}
			})
			decodeElements(id, attrs, func(e rawElement) {
				if e.intervalEnd {
					ends[id] = append(ends[id], e.Key)
				} else {
					lists[id] = append(lists[id], e.Element)
				}
			})
		default:
			t.Fatalf("message %d", m.kind&0xff)
		}
	}
	for id, list := range lists {
		if s := sets[id]; s.Interval && len(s.Key) == 1 {
			closeRanges(list, ends[id])
		}
		f.Elements = append(f.Elements, list...)
	}
	return f
}

// TestRefusalNamesTheElement gives an answer as the kernel does: the errno, the
// refused message's header and the offset of the attribute that it stumbled on.
func TestRefusalNamesTheElement(t *testing.T) {
	want := compiled(t, "../../../examples/router.yaml")
	var b batch
	b.first = 1
	b.delta(ruleset.Diff(nil, want))
	for i, s := range b.log {
		for k, e := range s.elements {
			body := binary.NativeEndian.AppendUint32(nil, uint32(0xffffffff-uint32(unix.EEXIST)+1))
			body = append(body, make([]byte, nlHeader)...)
			var a ruleset.Attrs
			a.Bytes(unix.NLMSGERR_ATTR_OFFS, binary.NativeEndian.AppendUint32(nil, uint32(s.offsets[k])))
			err := b.messageError(netlinkMessage{seq: b.first + uint32(i), body: append(body, a...)}, unix.EEXIST)
			text := s.set.Element(e.Of)
			if !strings.Contains(err.Error(), e.Owner) || !strings.Contains(err.Error(), text) || !errors.Is(err, unix.EEXIST) {
				t.Errorf("refusal %q names neither %q nor %q", err, e.Owner, text)
			}
		}
	}
}

func TestKeysNextToEachOther(t *testing.T) {
	for _, c := range [][2]string{{"\x00\x00", "\x00\x01"}, {"\x00\xff", "\x01\x00"}, {"\xfe\xff", "\xff\x00"}} {
		if got, ok := nextKey(c[0]); !ok || got != c[1] {
			t.Errorf("after %x comes %x, want %x", c[0], got, c[1])
		}
		if got := predecessor(c[1]); got != c[0] {
			t.Errorf("before %x comes %x, want %x", c[1], got, c[0])
		}
	}
	if _, ok := nextKey("\xff\xff"); ok {
		t.Error("the highest key has a successor")
	}
}

// FuzzDecode passes data to the decoders that no kernel sends.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{12, 0, 1, 0, 's', 'l', 'u', 'i', 'c', 'e', 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) {
		decodeChain(2, b)
		decodeSet(2, b)
		decodeObject(2, b)
		decodeFlowtable(2, b)
		decodeRule(2, b)
		decodeElements(ruleset.ID{}, b, func(rawElement) {})
		for {
			_, rest, ok := nextMessage(b)
			if !ok {
				return
			}
			b = rest
		}
	})
}
