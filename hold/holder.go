// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/kernel"
)

const (
	gratuitousTimes = 3               // RFC 4861 §10, MAX_NEIGHBOR_ADVERTISEMENT; RFC 5227 has two.
	gratuitousEach  = 1 * time.Second // RFC 4861 §10, RETRANS_TIMER.
	// askAgain is the time until the next attempt to take an address from another station. A random part of up to the
	// same time is added. Two gateways then do not keep probing simultaneously (RFC 5227 §2.1.1).
	askAgain = 5 * time.Second
)

// Options of a holder.
type Options struct {
	// StateDir is the directory for the record of held addresses.
	StateDir string
	Log      *slog.Logger // nil: slog.Default()
}

// Holder holds addresses. Its methods must be called in the network namespace of the host. They are safe for
// concurrent use.
type Holder struct {
	opt    Options
	kicked chan struct{}

	work   sync.Mutex            // Locked during changes of the kernel's addresses; protects the following fields.
	record map[key]string        // Addresses that are on interfaces or about to be added, with the interface names.
	up     map[int]bool          // Interfaces with a carrier at the last read.
	probed map[key]bool          // Probed since the interface has a carrier.
	was    map[netip.Addr]string // wanted addresses that belonged to the host, with their interfaces
	logged map[netip.Addr]bool   // Lost addresses that were logged.
	ended  bool

	mu      sync.Mutex // Protects the following fields.
	set     bool       // Set was called.
	wants   []Want
	list    []addressDecision
	shown   []Status // cached result of Statuses for list; nil before the first call
	foreign map[key]foreignAddress
	news    []pendingFrame

	lostRecord string // damage of the record at the start; "" for none
}

// Warnings returns the damage that the record of held addresses had at the start.
func (h *Holder) Warnings() []string {
	if h.lostRecord == "" {
		return nil
	}
	return []string{h.lostRecord}
}

// foreignAddress is an address of another station.
type foreignAddress struct {
	mac   string
	again time.Time // time of the next probe
}

// pendingFrame is a gratuitous frame with its remaining repetitions.
type pendingFrame struct {
	key
	left int
	due  time.Time
}

// New returns a Holder without addresses. The first Set adopts or removes the addresses that an earlier process left
// on interfaces.
func New(opt Options) (*Holder, error) {
	opt.Log = cmp.Or(opt.Log, slog.Default())
	record, lost, err := readRecord(opt.StateDir)
	if lost != "" {
		opt.Log.Warn(lost)
	}
	return &Holder{opt: opt, lostRecord: lost, kicked: make(chan struct{}, 1), record: record, up: map[int]bool{}, probed: map[key]bool{}, was: map[netip.Addr]string{}, logged: map[netip.Addr]bool{}, foreign: map[key]foreignAddress{}}, err
}

// Plan returns the changes that Set would make, without making them.
func (h *Holder) Plan(wants []Want) (*datapath.Change, []Status, error) {
	h.work.Lock()
	defer h.work.Unlock()
	host, err := readHost(h.keys())
	if err != nil {
		return nil, nil, err
	}
	host.was = h.was
	list := decideWants(wants, host.view)
	return h.change(list), statuses(list), nil
}

// Set sets the wanted addresses and returns the coming changes. The changes happen in the background, because
// duplicate address detection takes time. If the addresses are unchanged, the host is not read again; Kick requests
// that.
func (h *Holder) Set(wants []Want) (*datapath.Change, error) {
	h.mu.Lock()
	same := h.set && slices.Equal(wants, h.wants)
	h.mu.Unlock()
	if same {
		return &datapath.Change{Datapath: "addresses"}, nil
	}
	change, err := h.applyWants(wants)
	h.Kick()
	return change, err
}

func (h *Holder) applyWants(wants []Want) (*datapath.Change, error) {
	h.work.Lock()
	defer h.work.Unlock()
	host, err := readHost(h.keys())
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(h.was, func(a netip.Addr, _ string) bool {
		return !slices.ContainsFunc(wants, func(w Want) bool { return !a.Less(w.First) && !w.Last.Less(a) })
	})
	list := h.decideAll(wants, host.view)
	change := h.change(list)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.set, h.wants = true, wants
	h.publishStatuses(list)
	return change, nil
}

// decideAll decides about every wanted address and stores the addresses that belong to the host. If their owner removes
// one later, Sluice does not take it. h.work must be locked.
func (h *Holder) decideAll(wants []Want, v view) []addressDecision {
	v.was = h.was
	list := decideWants(wants, v)
	for _, p := range list {
		switch {
		case p.State == Own:
			h.was[p.First] = p.Interface
			delete(h.logged, p.First)
		case p.State == Lost && !h.logged[p.First]:
			h.logged[p.First] = true
			h.opt.Log.Warn("address is lost", "address", p.First, "interface", p.Interface, "owners", strings.Join(p.Owners, ", "), "why", p.Why)
		}
	}
	return list
}

// Kick makes the holder read the host again. It never blocks.
func (h *Holder) Kick() {
	select {
	case h.kicked <- struct{}{}:
	default:
	}
}

// Statuses returns the states of the wanted addresses in their order. The caller must not modify the result.
func (h *Holder) Statuses() []Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shown == nil {
		h.shown = statuses(h.list)
	}
	return h.shown
}

func statuses(list []addressDecision) []Status {
	out := make([]Status, len(list))
	for i, p := range list {
		out[i] = p.Status
		out[i].Owners = slices.Clone(p.Owners)
	}
	return joinStatuses(out)
}

// Release ends the holder. It removes all held addresses unless keep is set.
func (h *Holder) Release(keep bool) error {
	h.work.Lock()
	defer h.work.Unlock()
	h.ended = true
	if keep {
		return nil
	}
	return removeRecorded(h.opt.StateDir, h.record, func(key) bool { return true })
}

func (h *Holder) keys() map[key]bool {
	keys := map[key]bool{}
	for k := range h.record {
		keys[k] = true
	}
	return keys
}

// change compares the wanted addresses with the held ones.
func (h *Holder) change(list []addressDecision) *datapath.Change {
	c := &datapath.Change{Datapath: "addresses"}
	want := map[key]bool{}
	for _, p := range list {
		k := key{p.ifindex, p.First}
		if p.State != Probing {
			continue
		}
		want[k] = true
		if _, held := h.record[k]; !held {
			c.Objects.Added++
			c.Lines = append(c.Lines, fmt.Sprintf("hold address %s on %s", p.First, p.Interface))
		}
	}
	for k, name := range h.record {
		if !want[k] && h.mustRemove(k, list) {
			c.Objects.Removed++
			c.Lines = append(c.Lines, fmt.Sprintf("give back address %s of %s", k.at, name))
		}
	}
	slices.Sort(c.Lines)
	const most = 200
	if n := len(c.Lines) - most; n > 0 {
		c.Lines, c.Truncated = c.Lines[:most], n
	}
	return c
}

// publishStatuses makes the list the result of Statuses. h.work and h.mu must be locked.
func (h *Holder) publishStatuses(list []addressDecision) {
	for i := range list {
		p := &list[i]
		k := key{p.ifindex, p.First}
		if p.State != Probing {
			continue
		}
		if _, held := h.record[k]; held {
			p.State = Held
		} else if f, taken := h.foreign[k]; taken {
			p.State, p.Station = Foreign, f.mac
			p.Why = fmt.Sprintf("station %s answers for it; asked again every %s or so", f.mac, 2*askAgain)
		}
	}
	h.list, h.shown = list, nil
}

// Run holds the addresses until the context ends and leaves them on the interfaces. Release removes them.
func (h *Holder) Run(ctx context.Context) {
	said := ""
	for {
		again, err := h.reconcileHost(time.Now())
		text := ""
		if err != nil {
			text, again = err.Error(), askAgain
			if text != said {
				h.opt.Log.Error("addresses are not held; trying again", "after", again, "error", err)
			}
		}
		said = text
		var timer <-chan time.Time
		if again > 0 {
			timer = time.After(again)
		}
		select {
		case <-ctx.Done():
			return
		case <-h.kicked:
		case <-timer:
		}
	}
}

// reconcileHost makes the wanted changes on the host. It returns the time until the next step, or 0 if none is due.
func (h *Holder) reconcileHost(now time.Time) (time.Duration, error) {
	h.work.Lock()
	defer h.work.Unlock()
	if h.ended {
		return 0, nil
	}
	host, err := readHost(h.keys())
	if err != nil {
		return 0, err
	}
	h.readCarriers(host)
	h.mu.Lock()
	list := h.decideAll(h.wants, host.view)
	due := map[int][]netip.Addr{} // addresses to probe, by interface
	want := map[key]string{}
	for _, p := range list {
		k := key{p.ifindex, p.First}
		if p.State != Probing {
			continue
		}
		want[k] = p.Interface
		if f, taken := h.foreign[k]; !(h.probed[k] && h.isPresent(k, host)) && (!taken || !now.Before(f.again)) {
			due[p.ifindex] = append(due[p.ifindex], p.First)
		}
	}
	for k := range h.foreign {
		if want[k] == "" {
			delete(h.foreign, k)
		}
	}
	h.mu.Unlock()

	errs := []error{removeRecorded(h.opt.StateDir, h.record, func(k key) bool { return want[k] == "" && h.mustRemove(k, list) })}
	for ifindex, addresses := range due {
		errs = append(errs, h.probeAndAdd(host, host.stations[ifindex], addresses))
	}
	h.sendGratuitous(host)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.publishStatuses(list)
	return h.next(), errors.Join(errs...)
}

// readCarriers reads the carrier state of the interfaces. Without a carrier, another station may have taken an address.
func (h *Holder) readCarriers(host *host) {
	for _, n := range host.networks {
		if before, known := h.up[n.ifindex]; known && !before && n.carrier {
			for k := range h.probed {
				if k.ifindex == n.ifindex {
					delete(h.probed, k)
				}
			}
		}
		h.up[n.ifindex] = n.carrier
	}
}

// isPresent reports whether an address is recorded as held and present on its interface.
func (h *Holder) isPresent(k key, host *host) bool {
	_, ours := h.record[k]
	return ours && slices.ContainsFunc(host.addresses, func(a address) bool { return a.index == k.ifindex && a.at == k.at && !a.failed })
}

// mustRemove reports whether an address that is no longer wanted must be removed. It stays if its interface has only lost
// its carrier.
func (h *Holder) mustRemove(k key, list []addressDecision) bool {
	return !slices.ContainsFunc(list, func(p addressDecision) bool {
		return p.First == k.at && p.State == Absent && p.Interface == h.record[k] && p.Why == noCarrier
	})
}

// probeAndAdd probes for addresses on an interface and holds those without another station.
func (h *Holder) probeAndAdd(host *host, s probeInterface, addresses []netip.Addr) error {
	taken, err := probe(s, addresses, host.macs)
	if err != nil {
		return err
	}
	h.mu.Lock()
	var free, gone []key
	for _, a := range addresses {
		k := key{s.ifindex, a}
		if mac := taken[a]; mac != "" {
			if _, before := h.foreign[k]; !before {
				h.opt.Log.Warn("address is not held: another station answers for it", "address", a, "interface", s.name, "station", mac)
			}
			h.foreign[k] = foreignAddress{mac, time.Now().Add(askAgain + rand.N(askAgain))}
			gone = append(gone, k)
		} else {
			delete(h.foreign, k)
			free = append(free, k)
		}
	}
	h.mu.Unlock()
	errs := []error{removeRecorded(h.opt.StateDir, h.record, func(k key) bool { return slices.Contains(gone, k) })}
	return errors.Join(append(errs, h.addAddresses(host, s, free))...)
}

// addAddresses adds unused addresses to an interface.
func (h *Holder) addAddresses(host *host, s probeInterface, free []key) error {
	fresh := slices.DeleteFunc(slices.Clone(free), func(k key) bool { return h.isPresent(k, host) })
	for _, k := range fresh {
		h.record[k] = s.name
	}
	if len(fresh) > 0 {
		if err := writeRecord(h.opt.StateDir, h.record); err != nil {
			return err
		}
	}
	var errs []error
	for _, k := range fresh {
		if err := add(k); err != nil {
			if delete(h.record, k); !errors.Is(err, unix.EEXIST) { // another program was faster; the next read finds its address
				errs = append(errs, fmt.Errorf("address %s on interface %s: %w", k.at, s.name, err))
			}
			continue
		}
		h.opt.Log.Info("address is held", "address", k.at, "interface", s.name)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range free {
		if _, held := h.record[k]; held {
			h.probed[k] = true
			h.news = append(h.news, pendingFrame{k, gratuitousTimes, time.Now()})
		}
	}
	return errors.Join(append(errs, writeRecord(h.opt.StateDir, h.record))...)
}

// sendGratuitous sends the gratuitous frames that are due.
func (h *Holder) sendGratuitous(host *host) {
	h.mu.Lock()
	defer h.mu.Unlock()
	wires := map[int]*packetSocket{}
	now := time.Now()
	h.news = slices.DeleteFunc(h.news, func(n pendingFrame) bool {
		_, there := host.stations[n.ifindex]
		_, held := h.record[n.key]
		return !there || !held
	})
	for i := range h.news {
		n := &h.news[i]
		if n.due.After(now) {
			continue
		}
		s := host.stations[n.ifindex]
		if wires[n.ifindex] == nil {
			w, err := openWire(s, 0)
			if err != nil {
				h.opt.Log.Warn("neighbours of held addresses are not updated", "error", err)
				continue
			}
			defer w.close()
			wires[n.ifindex] = w
		}
		router := n.at.Is6() && kernel.Sysctl("net.ipv6.conf."+strings.ReplaceAll(s.name, ".", "/")+".forwarding") == "1"
		// Each frame is sent several times. A station that missed all repetitions eventually sends a request.
		_ = wires[n.ifindex].send(gratuitousFrame(s.mac, n.at, router))
		n.left, n.due = n.left-1, now.Add(gratuitousEach)
	}
	h.news = slices.DeleteFunc(h.news, func(n pendingFrame) bool { return n.left == 0 })
}

// next returns the time until the next gratuitous frame or probe.
func (h *Holder) next() time.Duration {
	var first time.Time
	sooner := func(t time.Time) {
		if first.IsZero() || t.Before(first) {
			first = t
		}
	}
	for _, n := range h.news {
		sooner(n.due)
	}
	for _, f := range h.foreign {
		sooner(f.again)
	}
	if first.IsZero() {
		return 0
	}
	return max(time.Until(first), time.Millisecond)
}
