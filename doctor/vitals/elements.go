// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"syscall"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Bounds of what is read of nftables maps and sets: each is a request of its own, the
// kernel walks again from the first element for each 32 KiB of an answer, and a checkup of
// a host takes seconds in all.
const (
	mostMaps     = 1024
	mostElements = 32768 // of one
	mostInAll    = 8 * mostElements
)

// nfgenBytes is the size of struct nfgenmsg, with which every message of nf_tables begins.
const nfgenBytes = 4

// mapReader reads the elements of nftables maps and sets in the calling thread's
// namespace, each once.
type mapReader struct {
	read map[string][]nftables.SetElement // nil: not read
	sum  int                              // of elements
}

// elements returns those of a map; false where it was not read, or is too large.
func (m *mapReader) elements(table *nftables.Table, name string) ([]nftables.SetElement, bool) {
	key := chainKey(table, name)
	list, known := m.read[key]
	if known || len(m.read) >= mostMaps || m.sum >= mostInAll {
		return list, list != nil
	}
	list, err := readElements(table, name, mostElements)
	m.sum += len(list)
	if err != nil {
		list = nil
	}
	if m.read == nil {
		m.read = map[string][]nftables.SetElement{}
	}
	m.read[key] = list
	return list, list != nil
}

// readElements asks for the elements of a set, with keys, values and whether an interval
// ends there. The library reads all of an answer before it looks at the first; this one
// gives up where there are more than the bound.
func readElements(table *nftables.Table, name string, most int) ([]nftables.SetElement, error) {
	attributes, err := mdnetlink.MarshalAttributes([]mdnetlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(table.Name), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(name), 0)},
	})
	if err != nil {
		return nil, err
	}
	request, err := (&mdnetlink.Message{Header: mdnetlink.Header{
		Length: uint32(unix.SizeofNlMsghdr + nfgenBytes + len(attributes)), Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSETELEM,
		Flags: mdnetlink.Request | mdnetlink.Dump, Sequence: 1,
	}, Data: slices.Concat([]byte{byte(table.Family), 0, 0, 0}, attributes)}).MarshalBinary()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, os.NewSyscallError("sendto", err)
	}
	list, buffer := []nftables.SetElement{}, make([]byte, 64<<10) // an answer has 32 KiB at most
	for {
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if err != nil {
			return nil, os.NewSyscallError("recvfrom", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				return list, nil
			case unix.NLMSG_ERROR:
				if len(m.Data) < 4 {
					return nil, unix.EPROTO
				}
				return nil, unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
			}
			if list, err = appendElements(list, m.Data); err != nil {
				return nil, err
			}
		}
		if len(list) > most {
			return nil, fmt.Errorf("set %s: more than %d elements", name, most)
		}
	}
}

// appendElements adds those of one message.
func appendElements(list []nftables.SetElement, message []byte) ([]nftables.SetElement, error) {
	d, err := mdnetlink.NewAttributeDecoder(message[min(len(message), nfgenBytes):])
	if err != nil {
		return nil, err
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		if d.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		d.Nested(func(elements *mdnetlink.AttributeDecoder) error {
			for elements.Next() {
				var e nftables.SetElement
				elements.Nested(func(parts *mdnetlink.AttributeDecoder) error { return decodeElement(&e, parts) })
				list = append(list, e)
			}
			return nil
		})
	}
	return list, d.Err()
}

func decodeElement(e *nftables.SetElement, parts *mdnetlink.AttributeDecoder) error {
	data := func(into *[]byte) { // a value, or a verdict as it came
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
