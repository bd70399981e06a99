// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Bounds for reading nftables maps and sets. Each is a separate request. For every 32 KiB of an answer the kernel
// walks from the first element again. Checking a host takes seconds in total.
const (
	mostMaps     = 1024
	mostElements = 32768 // limit for one map or set
	mostInAll    = 8 * mostElements
)

// setReader reads the elements of nftables maps and sets in the calling thread's namespace, each once.
type setReader struct {
	read map[string][]nftables.SetElement // nil if not read.
	sum  int                              // Total number of elements.
}

// elements returns the elements of a map; false if the map could not be read or is too large.
func (m *setReader) elements(table *nftables.Table, name string) ([]nftables.SetElement, bool) {
	key := chainKey(table, name)
	if list, known := m.read[key]; known || len(m.read) >= mostMaps || m.sum >= mostInAll {
		return list, list != nil
	}
	var list []nftables.SetElement
	err := errInterrupted
	for again := 0; again < readAgain && errors.Is(err, errInterrupted); again++ {
		list, err = readElements(table, name, mostElements)
		m.sum += len(list)
	}
	if err != nil {
		list = nil
	}
	if m.read == nil {
		m.read = map[string][]nftables.SetElement{}
	}
	m.read[key] = list
	return list, list != nil
}

// readElements reads the elements of a set, with keys, values and interval ends. It fails if there are more than
// most.
func readElements(table *nftables.Table, name string, most int) ([]nftables.SetElement, error) {
	list := []nftables.SetElement{}
	err := dump(unix.NFT_MSG_GETSETELEM, table.Family, []mdnetlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(table.Name), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(name), 0)},
	}, func(_ nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
		for a.Next() {
			if a.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			a.Nested(func(elements *mdnetlink.AttributeDecoder) error {
				for elements.Next() {
					var e nftables.SetElement
					elements.Nested(func(parts *mdnetlink.AttributeDecoder) error { return decodeElement(&e, parts) })
					list = append(list, e)
				}
				return nil
			})
		}
		if len(list) > most {
			return fmt.Errorf("set %s: more than %d elements", name, most)
		}
		return nil
	})
	return list, err
}

func decodeElement(e *nftables.SetElement, parts *mdnetlink.AttributeDecoder) error {
	data := func(into *[]byte) { // a value, or a verdict as received
		parts.Nested(func(d *mdnetlink.AttributeDecoder) error {
			for d.Next() {
				*into = d.Bytes()
			}
			return nil
		})
	}
	for parts.Next() {
		switch parts.Type() {
		case unix.NFTA_SET_ELEM_KEY:
			data(&e.Key)
		case nftables.NFTA_SET_ELEM_KEY_END:
			data(&e.KeyEnd)
		case unix.NFTA_SET_ELEM_DATA:
			data(&e.Val)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.IntervalEnd = parts.Uint32()&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
	}
	return nil
}
