// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/flow"
)

// Conversions between the values of flow and the bytes of bpf/datapath/types.h and settings.h. A wireAddr contains bytes in
// network order; an IPv4 address is in its first word.

func AddrOf(a netip.Addr) Addr {
	var w Addr
	b := BytesOf(a)
	for i := range w.W {
		w.W[i] = binary.NativeEndian.Uint32(b[i*4:])
	}
	return w
}

func BytesOf(a netip.Addr) (b [16]byte) {
	copy(b[:], a.AsSlice())
	return b
}

func AddrFrom(w Addr, v6 bool) netip.Addr {
	var b [16]byte
	for i, word := range w.W {
		binary.NativeEndian.PutUint32(b[i*4:], word)
	}
	if v6 {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[:4]))
}

func Addr4From(word uint32) netip.Addr {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], word)
	return netip.AddrFrom4(b)
}

// PortOf converts a port between host and wire order in both directions.
func PortOf(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func FamilyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return Family4
	}
	return Family6
}

func TupleOf(saddr, daddr netip.Addr, sport, dport uint16, proto uint8) flow.Tuple {
	return flow.Tuple{
		Protocol: flow.Protocol(proto),
		Source:   netip.AddrPortFrom(saddr, PortOf(sport)),
		Dest:     netip.AddrPortFrom(daddr, PortOf(dport)),
	}
}

// keepSpec is the time that the object is cached. A start needs it several times and reading takes some 80 ms; later
// it would only use memory.
const keepSpec = 5 * time.Second

var kept atomic.Pointer[ebpf.CollectionSpec]

// Spec returns the programs and maps of the object; the caller may modify them.
func Spec() (*ebpf.CollectionSpec, error) {
	s := kept.Load()
	if s == nil {
		var err error
		if s, err = LoadSpec(); err != nil {
			return nil, err
		}
		kept.Store(s)
		time.AfterFunc(keepSpec, func() { kept.CompareAndSwap(s, nil) })
	}
	return s.Copy(), nil
}

// enumNames reads the names of an enumeration from the object's type
// information: "REASON_NEW_FLOW" is "new-flow".
func enumNames(enum, prefix string) []string {
	spec, err := Spec()
	if err != nil {
		return nil
	}
	var e *btf.Enum
	if spec.Types.TypeByName(enum, &e) != nil {
		return nil
	}
	var names []string
	for _, v := range e.Values {
		for uint64(len(names)) <= v.Value {
			names = append(names, "")
		}
		names[v.Value] = strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(v.Name, prefix)), "_", "-")
	}
	return names
}

var (
	ReasonNames = sync.OnceValue(func() []string { return enumNames("reason", "REASON_") })
	ActionNames = sync.OnceValue(func() []string { return enumNames("action", "ACTION_") })
)

func NameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}

// FamilyNames are the names of datapath.ReasonCounter.
var FamilyNames = [...]string{"other", "ipv4", "ipv6"}
