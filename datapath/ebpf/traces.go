// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/netdev"
)

// The pinned map of ids records the datapath's changes to the host besides its programs: clsact
// qdiscs and neighbours that the kernel keeps resolved. Any later process can then undo exactly
// these changes.

const notePrefix = "host " // prefix of the names of notes

func clsactNote(ifindex int) string { return fmt.Sprintf("%sclsact %d", notePrefix, ifindex) }

func neighbourNote(n netdev.Hop) string {
	return fmt.Sprintf("%sneighbour %d %s", notePrefix, n.Ifindex, n.Addr)
}

func recordID(idMap *ebpf.Map, name string) error {
	k := ids.KeyOf(ids.Meta, name)
	if err := idMap.Put(&k, uint32(1)); err != nil {
		return fmt.Errorf("ids: %w", err)
	}
	return nil
}

func removeID(idMap *ebpf.Map, name string) error {
	k := ids.KeyOf(ids.Meta, name)
	if err := idMap.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("ids: %w", err)
	}
	return nil
}

// notes returns all recorded changes.
func notes(idMap *ebpf.Map) (qdiscs []int, neighbours []netdev.Hop, err error) {
	var k ids.Key
	var v uint32
	it := idMap.Iterate()
	for it.Next(&k, &v) {
		name, ok := strings.CutPrefix(strings.TrimRight(string(k.Name[:]), "\x00"), notePrefix)
		if k.Kind != ids.Meta || !ok {
			continue
		}
		var ifindex int
		var text string
		if n, _ := fmt.Sscanf(name, "clsact %d", &ifindex); n == 1 {
			qdiscs = append(qdiscs, ifindex)
		} else if n, _ := fmt.Sscanf(name, "neighbour %d %s", &ifindex, &text); n == 2 {
			if a, err := netip.ParseAddr(text); err == nil {
				neighbours = append(neighbours, netdev.Hop{Ifindex: ifindex, Addr: a})
			}
		}
	}
	return qdiscs, neighbours, it.Err()
}

// undoNotes undoes the changes recorded in the pins of a directory.
func undoNotes(dir string) error {
	idMap, err := ebpf.LoadPinnedMap(filepath.Join(dir, "ids"), nil)
	if err != nil {
		return nil // no Apply has run
	}
	defer idMap.Close()
	qdiscs, neighbours, err := notes(idMap)
	for _, ifindex := range qdiscs {
		err = errors.Join(err, dropClsact(ifindex))
	}
	return errors.Join(err, releaseNeighbours(neighbours))
}

// dropClsact removes a qdisc created by Sluice, unless it contains a filter of another owner.
func dropClsact(ifindex int) error {
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := netlink.FilterList(l, parent); err != nil || len(filters) > 0 {
			return ignoreGone(err)
		}
	}
	return ignoreGone(netlink.QdiscDel(clsact(ifindex)))
}

// ignoreGone returns nil for errors about removed interfaces, qdiscs and neighbours.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// releaseNeighbours lets the kernel age neighbours again, if it still keeps them resolved.
func releaseNeighbours(list []netdev.Hop) error {
	if len(list) == 0 {
		return nil
	}
	kept, err := netdev.Kept()
	for _, n := range list {
		if kept[n] {
			err = errors.Join(err, ignoreGone(netdev.Forget(n)))
		}
	}
	return err
}

// neighbours is the set of neighbours that the kernel keeps resolved for the datapath.
type neighbours struct {
	mu        sync.Mutex
	backends  map[netdev.Hop]bool
	hops      map[netip.Addr]netdev.Hop // Next hops of backends, found since the last full apply; used by Apply only.
	requested map[netdev.Hop]time.Time  // Time of the programs' last request.
	ours      map[netdev.Hop]bool       // Neighbours set by Sluice for either purpose; nil before read.
}

const (
	maxRequested = 4096 // limit of requested neighbours; if exceeded, all are dropped
	// requestInterval limits the calls into the kernel for a neighbour that every packet requests.
	// A single call does not suffice, because link-down and "ip neigh flush" remove the entry.
	requestInterval = 100 * time.Millisecond
)

// read loads the notes of an earlier process at the first call.
func (n *neighbours) read(idMap *ebpf.Map) error {
	if n.ours != nil {
		return nil
	}
	_, list, err := notes(idMap)
	if err != nil {
		return err
	}
	n.ours, n.requested = map[netdev.Hop]bool{}, map[netdev.Hop]time.Time{}
	for _, hop := range list {
		n.ours[hop] = true
	}
	return nil
}

// resolve makes the kernel keep neighbours resolved. It leaves permanent entries alone, because the
// kernel would make them age. This includes permanent entries that have replaced an entry of
// Sluice.
func (n *neighbours) resolve(idMap *ebpf.Map, list map[netdev.Hop]bool) error {
	if len(list) == 0 {
		return nil
	}
	kept, err := netdev.Kept()
	if err != nil {
		return err
	}
	for hop := range list {
		managed, there := kept[hop]
		if there && (!managed || !n.ours[hop]) {
			continue
		}
		if !n.ours[hop] {
			if err := recordID(idMap, neighbourNote(hop)); err != nil {
				return err
			}
			n.ours[hop] = true
		}
		err = errors.Join(err, netdev.Resolve(hop))
	}
	return err
}

// releaseUnused lets unused neighbours age.
func (n *neighbours) releaseUnused(idMap *ebpf.Map) error {
	var list []netdev.Hop
	for hop := range n.ours {
		if !n.backends[hop] && n.requested[hop].IsZero() {
			list = append(list, hop)
		}
	}
	err := releaseNeighbours(list)
	for _, hop := range list {
		err = errors.Join(err, removeID(idMap, neighbourNote(hop)))
		delete(n.ours, hop)
	}
	return err
}

// reset discards the known next hops, so that all are looked up and set again.
func (n *neighbours) reset() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hops, n.backends = map[netip.Addr]netdev.Hop{}, map[netdev.Hop]bool{}
}

// setBackends sets the next hops of backends. With all, the list is complete, and neighbours
// without a backend are released. This includes neighbours of an earlier process; programs request
// them again if needed. Without all, the list is added. Only new neighbours are passed to the
// kernel.
func (n *neighbours) setBackends(idMap *ebpf.Map, backends map[netdev.Hop]bool, all bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.read(idMap); err != nil {
		return err
	}
	fresh := map[netdev.Hop]bool{}
	for hop := range backends {
		if !n.backends[hop] {
			fresh[hop] = true
		}
	}
	if !all {
		maps.Copy(n.backends, fresh)
		return n.resolve(idMap, fresh)
	}
	n.backends = backends
	return errors.Join(n.resolve(idMap, fresh), n.releaseUnused(idMap))
}

// request makes the kernel keep a neighbour resolved that a program needs.
func (n *neighbours) request(idMap *ebpf.Map, hop netdev.Hop) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err, now := n.read(idMap), time.Now()
	last := n.requested[hop]
	if err != nil || now.Sub(last) < requestInterval {
		return err
	}
	if last.IsZero() && len(n.requested) >= maxRequested {
		clear(n.requested)
		err = n.releaseUnused(idMap)
	}
	n.requested[hop] = now
	return errors.Join(err, n.resolve(idMap, map[netdev.Hop]bool{hop: true}))
}
