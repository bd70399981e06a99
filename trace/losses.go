// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// losses counts frames that XDP programs of the whole host redirect and that are lost, or aborted.
// They have no socket buffer, so no drop event reports them.
type losses struct {
	objects lossesObjects
	links   []link.Link
}

// openLosses loads the programs; they count between resume and pause.
func openLosses() (*losses, error) {
	l := &losses{}
	if err := loadLossesObjects(&l.objects, nil); err != nil {
		return nil, err
	}
	return l, nil
}

// resume counts from zero.
func (l *losses) resume() error {
	if l == nil {
		return nil
	}
	var keys []lossesLossKey
	var key lossesLossKey
	var counts []uint64
	entries := l.objects.Losses.Iterate()
	for entries.Next(&key, &counts) {
		keys = append(keys, key)
	}
	errs := []error{entries.Err()}
	for _, k := range keys {
		errs = append(errs, l.objects.Losses.Delete(k))
	}
	for _, p := range []*ebpf.Program{l.objects.RedirectErr, l.objects.DevmapXmit, l.objects.Exception} {
		attached, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		l.links = append(l.links, attached)
	}
	return errors.Join(errs...)
}

func (l *losses) pause() error {
	if l == nil {
		return nil
	}
	var errs []error
	for _, attached := range l.links {
		errs = append(errs, attached.Close())
	}
	l.links = nil
	return errors.Join(errs...)
}

func (l *losses) close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.pause(), l.objects.Close())
}

// tracepoints has the tracepoint and the cause of each kind of loss.
var tracepoints = map[lossesLossKind]struct {
	name  string
	cause *Cause
}{
	lossesLossKindLOSS_REDIRECT: {"xdp_redirect_err", &CauseXDPRedirect},
	lossesLossKindLOSS_SEND:     {"xdp_devmap_xmit", &CauseXDPRedirect},
	lossesLossKindLOSS_ABORTED:  {"xdp_exception", &CauseXDPAborted},
}

// groups returns the losses of a namespace, by cause. Places are the tracepoint, the source and
// target interface, the error and the program.
func (l *losses) groups(ns netdev.Namespace, interfaces func() map[uint32]string) (map[string]*DropGroup, error) {
	if l == nil {
		return nil, nil
	}
	name := func(index uint32) string {
		if n := interfaces()[index]; n != "" {
			return n
		}
		return fmt.Sprintf("interface %d", index)
	}
	all := map[string]*DropGroup{}
	var key lossesLossKey
	var perCPU []uint64
	entries := l.objects.Losses.Iterate()
	for entries.Next(&key, &perCPU) {
		if uint64(key.Netns) != ns.Inode {
			continue
		}
		at := tracepoints[lossesLossKind(key.Kind)]
		place := DropPlace{Function: at.name, Reason: "refused", Interface: name(key.From)}
		if key.Error != 0 {
			place.Reason = unix.Errno(-key.Error).Error()
		}
		if key.To != 0 {
			place.Interface += " to " + name(key.To)
		}
		if p := unix.ByteSliceToString(int8s(key.Program)); p != "" {
			place.Interface += ", program " + p
		}
		for _, n := range perCPU {
			place.Packets += n
		}
		g := all[at.cause.ID]
		if g == nil {
			g = &DropGroup{Namespace: ns.Name, Netns: ns.Inode, Cause: *at.cause}
			all[at.cause.ID] = g
		}
		g.Packets += place.Packets
		g.Places = append(g.Places, place)
	}
	return all, entries.Err()
}

func int8s(s [16]int8) []byte {
	b := make([]byte, len(s))
	for i, c := range s {
		b[i] = byte(c)
	}
	return b
}
