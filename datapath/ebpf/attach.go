// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
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
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/netdev"
)

// attachment is a program on an interface.
type attachment struct {
	attachPoint
	ids         *ebpf.Map // records qdiscs created by Sluice
	noTCX       bool
	name        string
	bare        bool      // netdev.Interface.Bare.
	link        link.Link // nil for a clsact filter.
	pin         string
	fallbackErr error // error of a preferred hook; nil if none was tried
}

func (a *attachment) close() error {
	if a.link == nil {
		return nil
	}
	return a.link.Close()
}

func (a *attachment) program() string {
	switch {
	case a.bare:
		return "sluice_bare"
	case a.hook == config.AttachTC:
		return "sluice_tc"
	}
	return "sluice_xdp"
}

// attachPoint identifies an attachment by interface index, because names change, and by hook (xdp,
// xdp-generic or tc).
type attachPoint struct {
	ifindex int
	hook    config.Attach
}

// attach attaches programs to the selected interfaces and detaches them from all others. If a new
// interface accepts no program, the configuration in force stays active.
func (d *Datapath) attach(c *config.Config, paired bool, h *compile.Host, programs *ebpf.Collection) error {
	if d.opt.NoAttach {
		return nil
	}
	if err := d.adoptLinks(h); err != nil {
		return err
	}
	inForce := d.snapshot != nil && c == d.snapshot.Config
	h.Programmed = map[int]bool{}
	for at := range d.attached {
		h.Programmed[at.ifindex] = true
	}
	wanted, _ := h.AttachTo(c)
	keep, without := map[attachPoint]bool{}, map[int]error{}
	var first error
	for _, i := range wanted {
		hooks, err := d.attachTo(i, h.HooksFor(c.Attach, i), paired, programs)
		if err != nil && !onHost(i.Index) {
			continue // the interface was removed after the host was read; an event follows
		}
		if err != nil {
			spared := false
			if errors.Is(err, unix.EOPNOTSUPP) && len(c.Interfaces) == 0 {
				spared = needsNoProgram(c, h, i)
				err = fmt.Errorf("%w: list the interfaces that need a program under 'interfaces', or choose attach: auto", err)
			}
			if !inForce && !spared {
				return fmt.Errorf("interface %s: %w", i.Name, err)
			}
			without[i.Index] = err
			first = cmp.Or(first, fmt.Errorf("interface %s: %w", i.Name, err))
		}
		for _, hook := range hooks {
			keep[attachPoint{i.Index, hook}] = true
		}
	}
	if len(keep) == 0 && !inForce && first != nil {
		return first
	}
	var err error
	for at, a := range d.attached {
		if !keep[at] {
			err = errors.Join(err, a.detach())
			delete(d.attached, at)
		}
	}
	d.unattached = without
	return err
}

func onHost(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	var none netlink.LinkNotFoundError
	return !errors.As(err, &none)
}

// attachTo attaches programs to one interface and returns the hooks. With paired, TC runs behind
// native XDP. TC is attached first and detached last, so that every packet passes a program.
func (d *Datapath) attachTo(i netdev.Interface, hooks []config.Attach, paired bool, programs *ebpf.Collection) (on []config.Attach, err error) {
	if paired && hooks[0] == config.AttachXDP {
		if err := d.attachOne(config.AttachTC, i, programs); err != nil {
			return nil, err
		}
		on = append(on, config.AttachTC)
	}
	hook, err := d.attachFirst(hooks, i, programs)
	if err != nil {
		return on, err
	}
	return append(on, hook), nil
}

// attachFirst attaches at the first working hook and returns it.
func (d *Datapath) attachFirst(hooks []config.Attach, i netdev.Interface, programs *ebpf.Collection) (config.Attach, error) {
	var errs []error
	for _, hook := range hooks {
		err := d.attachOne(hook, i, programs)
		if err == nil {
			d.attached[attachPoint{i.Index, hook}].fallbackErr = errors.Join(errs...)
			return hook, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

// attachOne attaches a program, or replaces the program of an existing link.
func (d *Datapath) attachOne(hook config.Attach, i netdev.Interface, programs *ebpf.Collection) error {
	at := attachPoint{i.Index, hook}
	if name := (&attachment{attachPoint: at, bare: i.Bare()}).program(); programs.Programs[name] == nil {
		return fmt.Errorf("%s: this program was not loaded, because the host did not need it at that time", hook)
	}
	if a := d.attached[at]; a != nil {
		a.name, a.bare = i.Name, i.Bare()
		// ENOLINK: the interface was removed or moved to another namespace, and a new one has its
		// index.
		if err := a.update(programs); !errors.Is(err, unix.ENOLINK) {
			return err
		}
		if err := a.detach(); err != nil {
			return err
		}
		delete(d.attached, at)
	}
	a := &attachment{ids: d.t.Maps["ids"], noTCX: d.opt.NoTCX, attachPoint: at, name: i.Name, bare: i.Bare(), pin: filepath.Join(d.dir, fmt.Sprintf("link-%d-%s", i.Index, hook))}
	if err := a.attachPrograms(programs); err != nil {
		return fmt.Errorf("%s: %w", hook, err)
	}
	d.attached[at] = a
	return nil
}

func (a *attachment) attachPrograms(programs *ebpf.Collection) (err error) {
	p := programs.Programs[a.program()]
	switch a.hook {
	case config.AttachTC:
		// The program runs before all others. Packets that Sluice passes continue to them
		// (TCX_NEXT), while another program's verdict may be final.
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
		return fmt.Errorf("%s: remove it with 'ip link set dev %s xdp off', or choose attach: tc, which runs behind it", foreignXDP(a.ifindex), a.name)
	}
	if err != nil {
		return a.explainRefusal(err)
	}
	if err := a.link.Pin(a.pin); err != nil {
		return errors.Join(fmt.Errorf("pin: %w", err), a.link.Close())
	}
	return nil
}

// maxVethMTU returns the largest MTU of a veth's peer if this end has an XDP program
// (veth_xdp_set). A packet must fit one page, behind XDP_PACKET_HEADROOM and before struct
// skb_shared_info.
func maxVethMTU() int { return os.Getpagesize() - 256 - 320 - 14 }

// explainRefusal adds the probable cause and a remedy to a driver's error.
func (a *attachment) explainRefusal(err error) error {
	l, gone := netlink.LinkByIndex(a.ifindex)
	if gone != nil || a.hook == config.AttachTC {
		return err
	}
	const instead = "choose attach: tc"
	mtu, most, large := l.Attrs().MTU, "about 3500 bytes with most drivers", l.Attrs().MTU > 1500
	if l.Type() == "veth" {
		most = fmt.Sprintf("%d bytes at its other end with veth", maxVethMTU())
	}
	switch {
	case errors.Is(err, unix.ERANGE), large && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, ebpf.ErrNotSupported)):
		return fmt.Errorf("the driver accepts no XDP program at an MTU of %d, because a packet must fit in one page (%s): %w; lower the MTU, or %s", mtu, most, err, instead)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("the driver lacks memory or spare queues for XDP: %w; give %s fewer queues with 'ethtool -L %s combined N', or %s", err, a.name, a.name, instead)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("the driver does not support XDP: %w; %s", err, instead)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("the driver accepts no XDP program with the settings of the interface (LRO, queues, header split): %w; the kernel log may have details; %s", err, instead)
	}
	return err
}

// foreignXDP describes the XDP program of another owner on an interface.
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

// Priority and handle identify Sluice's clsact filters.
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

// filter attaches the program by a clsact filter. It replaces an existing filter atomically.
func (a *attachment) filter(p *ebpf.Program) error {
	switch err := netlink.QdiscAdd(clsact(a.ifindex)); {
	case err == nil:
		if err := recordID(a.ids, clsactNote(a.ifindex)); err != nil {
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

// isAttached reports whether the program is still on its interface.
func (a *attachment) isAttached() (bool, error) {
	if a.link == nil {
		return len(filtersOf(a.ifindex)) > 0, nil
	}
	info, err := a.link.Info()
	if err != nil {
		return false, err
	}
	if x := info.XDP(); x != nil {
		return int(x.Ifindex) == a.ifindex, nil
	}
	x := info.TCX()
	return x != nil && int(x.Ifindex) == a.ifindex, nil
}

// Touched reports whether another program has detached one of Sluice's programs, by its link or
// with the qdisc of its filter.
func (d *Datapath) Touched() (touched bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.inNamespace(func() error {
		for _, a := range d.attached {
			stands, err := a.isAttached()
			if err != nil {
				return fmt.Errorf("interface %s: %s: %w", a.name, a.hook, err)
			}
			if stands {
				continue
			}
			if onHost(a.ifindex) { // otherwise it was removed with the interface
				d.opt.Log.Warn("another program has taken Sluice's off the interface: it is put back", "interface", a.name, "hook", a.hook)
				touched = true
			}
		}
		return nil
	})
	return touched, err
}

func (a *attachment) detach() error {
	if a.link == nil {
		if err := ignoreGone(netlink.FilterDel(a.bpfFilter())); err != nil || a.ids == nil {
			return err
		}
		k := ids.KeyOf(ids.Meta, clsactNote(a.ifindex))
		var v uint32
		if a.ids.Lookup(&k, &v) != nil { // Sluice did not create the qdisc
			return nil
		}
		return errors.Join(dropClsact(a.ifindex), removeID(a.ids, clsactNote(a.ifindex)))
	}
	err := os.Remove(a.pin)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, a.link.Close())
}

// adoptLinks adopts the attachments of an earlier process.
func (d *Datapath) adoptLinks(h *compile.Host) error {
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
		for _, i := range h.Interfaces {
			if i.Index == n {
				name = i.Name
			}
		}
		if name == "" { // the interface was removed together with the link
			os.Remove(path)
			continue
		}
		at := attachPoint{n, config.Attach(hook)}
		if d.attached[at] != nil {
			continue
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return fmt.Errorf("link %s: %w", path, err)
		}
		d.attached[at] = &attachment{attachPoint: at, name: name, link: l, pin: path}
	}
	return d.adoptFilters(h)
}

// adoptFilters adopts clsact filters of an earlier process, which have no pins. If the interface
// also has a TCX link, the filter is a remainder and is removed.
func (d *Datapath) adoptFilters(h *compile.Host) error {
	for _, f := range filtersOn(h.Interfaces) {
		i := slices.IndexFunc(h.Interfaces, func(i netdev.Interface) bool { return i.Index == f.Attrs().LinkIndex })
		a := &attachment{attachPoint: attachPoint{h.Interfaces[i].Index, config.AttachTC}, noTCX: d.opt.NoTCX, name: h.Interfaces[i].Name}
		if d.t != nil {
			a.ids = d.t.Maps["ids"]
		}
		now := d.attached[a.attachPoint]
		if now == nil {
			d.attached[a.attachPoint] = a
		} else if now.link != nil {
			if err := a.detach(); err != nil {
				return fmt.Errorf("interface %s: %w", a.name, err)
			}
		}
	}
	return nil
}

// detachAll detaches every program, including programs of an earlier process.
func (d *Datapath) detachAll() (err error) {
	h, err := readHost()
	if err != nil {
		return err
	}
	if err := d.adoptLinks(h); err != nil {
		return err
	}
	for at, a := range d.attached {
		err = errors.Join(err, a.detach())
		delete(d.attached, at)
	}
	return err
}

// filtersOn returns Sluice's clsact filters. They persist without pins.
func filtersOn(list []netdev.Interface) (ours []netlink.Filter) {
	for _, i := range list {
		ours = append(ours, filtersOf(i.Index)...)
	}
	return ours
}

func filtersOf(ifindex int) (ours []netlink.Filter) {
	filters, _ := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, netlink.HANDLE_MIN_INGRESS)
	for _, f := range filters {
		if ownFilter(f) {
			ours = append(ours, f)
		}
	}
	return ours
}

// Left reports whether the kernel holds pins or filters of Sluice for this
// network namespace.
func (d *Datapath) Left() (left bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.inNamespace(func() error {
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
		left = len(filtersOn(h.Interfaces)) > 0
		return nil
	})
	return left, err
}
