// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/netdev"
)

// attachment is a program on an interface.
type attachment struct {
	ids     *ebpf.Map // where a qdisc of ours is noted
	noTCX   bool
	ifindex int
	name    string
	hook    config.Attach // xdp, xdp-generic or tc
	link    link.Link     // nil for a clsact filter
	pin     string
}

func (a *attachment) close() error {
	if a.link == nil {
		return nil
	}
	return a.link.Close()
}

func (a *attachment) program() string {
	if a.hook == config.AttachTC {
		return "sluice_tc"
	}
	return "sluice_xdp"
}

// hooksFor lists the hooks to try on an interface, best first.
func (h *host) hooksFor(want config.Attach, i netdev.Interface) []config.Attach {
	switch {
	case want != config.AttachAuto && want != "":
		return []config.Attach{want}
	case i.Virtual() || len(h.deaf()) > 0:
		return []config.Attach{config.AttachTC}
	}
	return []config.Attach{config.AttachXDP, config.AttachTC}
}

// attach puts programs on the wanted interfaces and takes them off others.
func (d *Datapath) attach(c *config.Config, h *host, programs *ebpf.Collection) error {
	wanted, _ := h.attachTo(c)
	if d.opt.NoAttach {
		return nil
	}
	if err := d.adoptLinks(h); err != nil {
		return err
	}
	var err error
	keep := map[int]bool{}
	for _, i := range wanted {
		keep[i.Index] = true
		if err := d.attachOne(h.hooksFor(c.Attach, i), i, programs); err != nil {
			return fmt.Errorf("interface %s: %w", i.Name, err)
		}
	}
	for index, a := range d.attached {
		if !keep[index] {
			err = errors.Join(err, a.detach())
			delete(d.attached, index)
		}
	}
	return err
}

// attachOne attaches, or gives the new program to a link that is there.
func (d *Datapath) attachOne(hooks []config.Attach, i netdev.Interface, programs *ebpf.Collection) error {
	if a := d.attached[i.Index]; a != nil {
		if a.name = i.Name; slices.Contains(hooks, a.hook) {
			// Severed: the interface went, or was elsewhere, and one of its number is here.
			if err := a.update(programs); !errors.Is(err, unix.ENOLINK) {
				return err
			}
		}
		if err := a.detach(); err != nil {
			return err
		}
		delete(d.attached, i.Index)
	}
	var errs []error
	for _, hook := range hooks {
		a := &attachment{ids: d.t.maps["ids"], noTCX: d.opt.NoTCX, ifindex: i.Index, name: i.Name, hook: hook, pin: filepath.Join(d.dir, fmt.Sprintf("link-%d-%s", i.Index, hook))}
		if err := a.make(programs); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", hook, err))
			continue
		}
		d.attached[i.Index] = a
		return nil
	}
	return errors.Join(errs...)
}

func (a *attachment) make(programs *ebpf.Collection) (err error) {
	p := programs.Programs[a.program()]
	switch a.hook {
	case config.AttachTC:
		// Before all others: what Sluice passes goes on to them (TCX_NEXT), while
		// the verdict of one of them may be the last.
		if a.noTCX {
			return a.filter(p)
		}
		a.link, err = link.AttachTCX(link.TCXOptions{Interface: a.ifindex, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
			return a.filter(p) // Linux before 6.6
		}
	case config.AttachXDPGeneric:
		a.link, err = link.AttachXDP(link.XDPOptions{Interface: a.ifindex, Program: p, Flags: link.XDPGenericMode})
	default:
		a.link, err = link.AttachXDP(link.XDPOptions{Interface: a.ifindex, Program: p, Flags: link.XDPDriverMode})
	}
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s: take it off with 'ip link set dev %s xdp off', or choose attach: tc, which runs behind it", foreignXDP(a.ifindex), a.name)
	}
	if err != nil {
		return err
	}
	if err := a.link.Pin(a.pin); err != nil {
		return errors.Join(fmt.Errorf("pin: %w", err), a.link.Close())
	}
	return nil
}

// foreignXDP names the program that stands in the way.
func foreignXDP(ifindex int) string {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil || l.Attrs().Xdp == nil {
		return "another XDP program is attached"
	}
	id := l.Attrs().Xdp.ProgId
	name := ""
	if p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id)); err == nil {
		if info, err := p.Info(); err == nil {
			name = info.Name + ", "
		}
		p.Close()
	}
	return fmt.Sprintf("another XDP program (%sid %d) is attached", name, id)
}

func (a *attachment) update(programs *ebpf.Collection) error {
	if a.link == nil {
		return a.filter(programs.Programs[a.program()])
	}
	return a.link.Update(programs.Programs[a.program()])
}

// clsact filters are told apart from others' by priority and handle.
const (
	filterPriority = 49152 - 1
	filterHandle   = 1
)

func (a *attachment) bpfFilter() *netlink.BpfFilter {
	return &netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{LinkIndex: a.ifindex, Parent: netlink.HANDLE_MIN_INGRESS,
		Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: filterPriority}, Name: "sluice", DirectAction: true}
}

func clsact(ifindex int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

// filter attaches by a clsact filter, which replaces one that is there at once.
func (a *attachment) filter(p *ebpf.Program) error {
	switch err := netlink.QdiscAdd(clsact(a.ifindex)); {
	case err == nil:
		if err := note(a.ids, clsactNote(a.ifindex)); err != nil {
			return err
		}
	case !errors.Is(err, unix.EEXIST):
		return fmt.Errorf("clsact: %w", err)
	}
	f := a.bpfFilter()
	f.Fd = p.FD()
	if err := netlink.FilterReplace(f); err != nil {
		return fmt.Errorf("clsact filter: %w", err)
	}
	return nil
}

func (a *attachment) detach() error {
	if a.link == nil {
		if err := ignoreGone(netlink.FilterDel(a.bpfFilter())); err != nil || a.ids == nil {
			return err
		}
		k := idKeyOf(idMeta, clsactNote(a.ifindex))
		var v uint32
		if a.ids.Lookup(&k, &v) != nil { // it was there before
			return nil
		}
		return errors.Join(dropClsact(a.ifindex), unnote(a.ids, clsactNote(a.ifindex)))
	}
	err := os.Remove(a.pin)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, a.link.Close())
}

// adoptLinks finds what an earlier process left attached.
func (d *Datapath) adoptLinks(h *host) error {
	if d.dir == "" {
		return d.adoptFilters(h)
	}
	found, err := filepath.Glob(filepath.Join(d.dir, "link-*"))
	if err != nil {
		return err
	}
	for _, path := range found {
		index, hook, ok := strings.Cut(strings.TrimPrefix(filepath.Base(path), "link-"), "-")
		n, err := strconv.Atoi(index)
		if !ok || err != nil {
			continue
		}
		name := ""
		for _, i := range h.interfaces {
			if i.Index == n {
				name = i.Name
			}
		}
		if name == "" { // the interface is gone, and the link with it
			os.Remove(path)
			continue
		}
		if d.attached[n] != nil {
			continue
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return fmt.Errorf("link %s: %w", path, err)
		}
		d.attached[n] = &attachment{ifindex: n, name: name, hook: config.Attach(hook), link: l, pin: path}
	}
	return d.adoptFilters(h)
}

// adoptFilters enters the clsact filters of an earlier process, which no pin tells of. One
// beside a link is what an attachment by another hook has left.
func (d *Datapath) adoptFilters(h *host) error {
	for _, f := range h.filters() {
		i := slices.IndexFunc(h.interfaces, func(i netdev.Interface) bool { return i.Index == f.Attrs().LinkIndex })
		a := &attachment{noTCX: d.opt.NoTCX, ifindex: h.interfaces[i].Index, name: h.interfaces[i].Name, hook: config.AttachTC}
		if d.t != nil {
			a.ids = d.t.maps["ids"]
		}
		now := d.attached[a.ifindex]
		if now == nil {
			d.attached[a.ifindex] = a
		} else if now.link != nil {
			if err := a.detach(); err != nil {
				return fmt.Errorf("interface %s: %w", a.name, err)
			}
		}
	}
	return nil
}

// detachAll takes every program off, those of an earlier process too.
func (d *Datapath) detachAll() (err error) {
	h, err := readHost()
	if err != nil {
		return err
	}
	if err := d.adoptLinks(h); err != nil {
		return err
	}
	for index, a := range d.attached {
		err = errors.Join(err, a.detach())
		delete(d.attached, index)
	}
	return err
}

// filters are the clsact filters of Sluice, which live without pins.
func (h *host) filters() (ours []netlink.Filter) {
	for _, i := range h.interfaces {
		filters, _ := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: i.Index}}, netlink.HANDLE_MIN_INGRESS)
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && b.Priority == filterPriority && b.Name == "sluice" {
				ours = append(ours, f)
			}
		}
	}
	return ours
}

// Left reports whether the kernel holds pins or filters of Sluice for this
// network namespace.
func (d *Datapath) Left() (left bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.inside(func() error {
		dir, err := d.pinDir(false)
		if err != nil {
			return err
		}
		if _, err := os.Stat(dir); dir != "" && err == nil {
			left = true
			return nil
		}
		h, err := readHost()
		if err != nil {
			return err
		}
		left = len(h.filters()) > 0
		return nil
	})
	return left, err
}
