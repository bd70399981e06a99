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

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// What the datapath changes of the host beside its programs, clsact qdiscs and
// neighbours that the kernel is to keep resolved, is noted in the pinned map of ids: so
// that it can be taken back, by another process too, and nothing else is.

const noted = "host " // begins the names of notes

func clsactNote(ifindex int) string { return fmt.Sprintf("%sclsact %d", noted, ifindex) }

func neighbourNote(n netdev.Hop) string {
	return fmt.Sprintf("%sneighbour %d %s", noted, n.Ifindex, n.Addr)
}

func note(idMap *ebpf.Map, name string) error {
	k := ids.KeyOf(ids.Meta, name)
	if err := idMap.Put(&k, uint32(1)); err != nil {
		return fmt.Errorf("ids: %w", err)
	}
	return nil
}

func unnote(idMap *ebpf.Map, name string) error {
	k := ids.KeyOf(ids.Meta, name)
	if err := idMap.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("ids: %w", err)
	}
	return nil
}

// notes reads all.
func notes(idMap *ebpf.Map) (qdiscs []int, neighbours []netdev.Hop, err error) {
	var k ids.Key
	var v uint32
	it := idMap.Iterate()
	for it.Next(&k, &v) {
		name, ok := strings.CutPrefix(strings.TrimRight(string(k.Name[:]), "\x00"), noted)
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

// takeBack undoes what is noted in the pins of a directory.
func takeBack(dir string) error {
	idMap, err := ebpf.LoadPinnedMap(filepath.Join(dir, "ids"), nil)
	if err != nil {
		return nil // nothing was ever applied
	}
	defer idMap.Close()
	qdiscs, neighbours, err := notes(idMap)
	for _, ifindex := range qdiscs {
		err = errors.Join(err, dropClsact(ifindex))
	}
	return errors.Join(err, forget(neighbours))
}

// dropClsact takes a qdisc of ours away, unless somebody else has a filter there by now.
func dropClsact(ifindex int) error {
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := netlink.FilterList(l, parent); err != nil || len(filters) > 0 {
			return ignoreGone(err)
		}
	}
	return ignoreGone(netlink.QdiscDel(clsact(ifindex)))
}

// ignoreGone leaves out that an interface, or what was on it, is not there any more.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// forget lets neighbours age again, those that are still kept.
func forget(list []netdev.Hop) error {
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

// neighbours are those that the kernel keeps resolved for the datapath.
type neighbours struct {
	mu       sync.Mutex
	backends map[netdev.Hop]bool
	hops     map[netip.Addr]netdev.Hop // to backends, as the last whole apply and those since have found them; of who applies alone
	asked    map[netdev.Hop]time.Time  // when programs last did
	ours     map[netdev.Hop]bool       // of both: that others had not set already; nil before they are read
}

const (
	maxAsked = 4096 // neighbours; beyond them all begin anew
	// askAgain bounds how often the kernel is told of one that every packet asks for. It has
	// to be told more than once: a link that goes down, or "ip neigh flush", takes it away.
	askAgain = 100 * time.Millisecond
)

// read learns at first what an earlier process has noted.
func (n *neighbours) read(idMap *ebpf.Map) error {
	if n.ours != nil {
		return nil
	}
	_, list, err := notes(idMap)
	if err != nil {
		return err
	}
	n.ours, n.asked = map[netdev.Hop]bool{}, map[netdev.Hop]time.Time{}
	for _, hop := range list {
		n.ours[hop] = true
	}
	return nil
}

// resolve makes the kernel keep neighbours resolved. It leaves permanent entries alone, also one that has taken the
// place of ours: the kernel would make it age.
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
			if err := note(idMap, neighbourNote(hop)); err != nil {
				return err
			}
			n.ours[hop] = true
		}
		err = errors.Join(err, netdev.Resolve(hop))
	}
	return err
}

// drop lets those age that nobody needs any more.
func (n *neighbours) drop(idMap *ebpf.Map) error {
	var list []netdev.Hop
	for hop := range n.ours {
		if !n.backends[hop] && n.asked[hop].IsZero() {
			list = append(list, hop)
		}
	}
	err := forget(list)
	for _, hop := range list {
		err = errors.Join(err, unnote(idMap, neighbourNote(hop)))
		delete(n.ours, hop)
	}
	return err
}

// restart has the next ones that are wanted looked up, and the kernel told of them, whatever is known.
func (n *neighbours) restart() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hops, n.backends = map[netip.Addr]netdev.Hop{}, map[netdev.Hop]bool{}
}

// want sets the neighbours on the way to backends: all there are, where it forgets those that
// no backend has any more, also those of an earlier process, whose programs ask again; or some more.
// The kernel is told of those alone that were not there.
func (n *neighbours) want(idMap *ebpf.Map, backends map[netdev.Hop]bool, all bool) error {
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
	return errors.Join(n.resolve(idMap, fresh), n.drop(idMap))
}

// ask keeps a neighbour resolved that a program wants to know.
func (n *neighbours) ask(idMap *ebpf.Map, hop netdev.Hop) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err, now := n.read(idMap), time.Now()
	last := n.asked[hop]
	if err != nil || now.Sub(last) < askAgain {
		return err
	}
	if last.IsZero() && len(n.asked) >= maxAsked {
		clear(n.asked)
		err = n.drop(idMap)
	}
	n.asked[hop] = now
	return errors.Join(err, n.resolve(idMap, map[netdev.Hop]bool{hop: true}))
}
