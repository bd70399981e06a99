// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
)

// Hook is the netfilter hook that dropped a packet.
type Hook uint8

// The hooks, in the numbering of the probe.
const (
	HookNone        = Hook(dropsDropHookDROP_HOOK_NONE)
	HookPrerouting  = Hook(dropsDropHookDROP_HOOK_PREROUTING)
	HookInput       = Hook(dropsDropHookDROP_HOOK_INPUT)
	HookForward     = Hook(dropsDropHookDROP_HOOK_FORWARD)
	HookOutput      = Hook(dropsDropHookDROP_HOOK_OUTPUT)
	HookPostrouting = Hook(dropsDropHookDROP_HOOK_POSTROUTING)
	HookHairpin     = Hook(dropsDropHookDROP_HOOK_HAIRPIN)
)

var hookNames = [...]string{"", "prerouting", "input", "forward", "output", "postrouting", "forward or postrouting"}

// String returns the hook's name in nftables' words.
func (h Hook) String() string { return nameOf(hookNames[:], int(h)) }

// MarshalText writes the name.
func (h Hook) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// Tracked is the state of a dropped packet in connection tracking.
type Tracked uint8

// States of a packet in connection tracking.
const (
	TrackedNone      = Tracked(dropsDropCtDROP_CT_NONE)
	TrackedNot       = Tracked(dropsDropCtDROP_CT_UNTRACKED)
	TrackedNew       = Tracked(dropsDropCtDROP_CT_NEW)
	TrackedConfirmed = Tracked(dropsDropCtDROP_CT_CONFIRMED)
)

var trackedNames = [...]string{"no flow", "untracked", "new flow", "known flow"}

// String returns a short description of the tracking state.
func (t Tracked) String() string { return nameOf(trackedNames[:], int(t)) }

// MarshalText writes the words.
func (t Tracked) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprint(i)
}

// DropOptions selects the drops to count and sample. The zero value counts every drop of the host and samples none.
type DropOptions struct {
	Netns  uint64 // inode of the only namespace to watch; 0: all
	Filter Filter
	// SamplesPerSecond is the maximum number of sampled packets per second and kind of drop; 0 for none.
	SamplesPerSecond int
	Stacks           bool // samples include the kernel stack
}

// Drops is a running count of the dropped packets of the host.
type Drops struct {
	objects dropsObjects
	links   []link.Link
	ring    *ringbuf.Reader
	losses  *losses // nil without kernel support
	symbols *Symbols
	reasons *Reasons
	limits  []string
	nftSeen bool // drops of nft rules have a separate location in this kernel

	interruptedBefore uint64 // interruptions before the probe was last resumed
	events            eventCount
	eventsBefore      uint64 // drop events of the kernel when the probe was last resumed
	seenBefore        uint64 // drops that a program had processed by then
}

// DropCount is the count of one kind of drop: reason, location, hook and namespace.
type DropCount struct {
	Netns    uint32  `json:"netns"`
	IfIndex  uint32  `json:"ifindex,omitempty"`
	EthType  uint16  `json:"eth_type"`
	Location Symbol  `json:"-"`
	Reason   string  `json:"reason"`
	Hook     Hook    `json:"hook,omitempty"`
	Tracked  Tracked `json:"tracked"`
	Packets  uint64  `json:"packets"`
	Bytes    uint64  `json:"bytes"`

	key dropsDropKey
}

// OpenDrops starts counting. It needs CAP_BPF, CAP_PERFMON and, for symbol names, CAP_SYSLOG. Root
// has these capabilities.
func OpenDrops(o DropOptions) (*Drops, error) {
	d := &Drops{}
	var err error
	if d.symbols, err = recentSymbols(); err != nil {
		d.limits = append(d.limits, fmt.Sprintf("functions are shown as addresses and causes are not known: %v", err))
	}
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return d.openRaw(o, err)
	}
	if d.reasons, err = LoadReasons(kernel); err != nil {
		d.limits = append(d.limits, fmt.Sprintf("reasons are shown as numbers: %v", err))
	}
	spec, err := dropsSpec()
	if err != nil {
		return nil, fmt.Errorf("drops: %w", err)
	}
	if err := d.configure(spec, o, kernel); err != nil {
		return nil, fmt.Errorf("drops: %w", err)
	}
	delete(spec.Programs, dropsProgDropsRaw)
	var objects struct {
		dropsMaps
		First *ebpf.Program `ebpf:"drops_first"`
		Again *ebpf.Program `ebpf:"drops_again"`
	}
	opts := ebpf.CollectionOptions{}
	opts.Programs.ExtraRelocationTargets = conntrackModule(kernel)
	if err := spec.LoadAndAssign(&objects, &opts); err != nil {
		return nil, loadError(err)
	}
	d.objects.dropsMaps = objects.dropsMaps
	d.objects.DropsFirst, d.objects.DropsAgain = objects.First, objects.Again
	if d.ring, err = ringbuf.NewReader(d.objects.Samples); err != nil {
		d.Close()
		return nil, fmt.Errorf("drops: samples: %w", err)
	}
	if d.losses, err = openLosses(); err != nil {
		d.limits = append(d.limits, fmt.Sprintf("frames that are lost when XDP programs redirect them: %v", err))
	}
	if err := d.Resume(); err != nil {
		d.Close()
		return nil, err
	}
	d.nftSeen = nftDropsApart()
	return d, nil
}

// sampleRing is the size of the ring of samples in bytes: room for 1,700, which the reader takes at once. The reader's
// memory holds a ring twice, because the kernel maps its pages twice.
const sampleRing = 1 << 20

// dropsSpec returns the drop probe with a ring buffer of the given size.
func dropsSpec() (*ebpf.CollectionSpec, error) {
	spec, err := loadDrops()
	if err != nil {
		return nil, err
	}
	spec.Maps[dropsMapSamples].MaxEntries = sampleRing
	return spec, nil
}

// loadError adds remedies for common causes.
func loadError(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("drops: %w: run as root, or with CAP_BPF and CAP_PERFMON", os.ErrPermission)
	}
	return fmt.Errorf("drops: load probe: %w", err)
}

// openRaw opens a probe on kernels without BTF. It counts by location and reason number, and reads no packet.
func (d *Drops) openRaw(o DropOptions, cause error) (*Drops, error) {
	if o.Netns != 0 || !o.Filter.Empty() {
		return nil, fmt.Errorf("drops: filters need the kernel's BTF: %w", cause)
	}
	spec, err := dropsSpec()
	if err != nil {
		return nil, fmt.Errorf("drops: %w", err)
	}
	delete(spec.Programs, dropsProgDropsFirst)
	delete(spec.Programs, dropsProgDropsAgain)
	var objects struct {
		dropsMaps
		Program *ebpf.Program `ebpf:"drops_raw"`
	}
	if err := spec.LoadAndAssign(&objects, nil); err != nil {
		return nil, loadError(err)
	}
	d.objects.dropsMaps = objects.dropsMaps
	d.objects.DropsRaw = objects.Program
	if err := d.Resume(); err != nil {
		d.Close()
		return nil, err
	}
	d.limits = append(d.limits, fmt.Sprintf(
		"only places and reason numbers are shown, no namespaces, packets or stacks: %v", cause))
	return d, nil
}

// configure sets the probe's constants for this kernel and these options.
func (d *Drops) configure(spec *ebpf.CollectionSpec, o DropOptions, kernel *btf.Spec) error {
	drop, _ := d.reasons.Number("NETFILTER_DROP")
	constants := map[string]any{
		dropsVarHaveRxSk:      tracepointArgs(kernel, "kfree_skb") >= 4,
		dropsVarNetfilterDrop: drop,
		dropsVarSampleStacks:  o.Stacks,
		dropsVarOnlyNetns:     uint32(o.Netns),
		dropsVarFilterPacket:  !o.Filter.Empty(),
		dropsVarFilterProto:   uint8(o.Filter.Protocol),
		dropsVarFilterPort:    o.Filter.Port,
	}
	if o.SamplesPerSecond > 0 {
		interval := uint64(time.Second) * uint64(runtime.NumCPU()) / uint64(o.SamplesPerSecond)
		constants[dropsVarSampleIntervalNs] = interval
		constants[dropsVarSampleBurstNs] = min(uint64(time.Second), 10*interval)
	}
	if p := o.Filter.Prefix; p.IsValid() {
		family, address, mask := filterWords(p)
		constants[dropsVarFilterFamily] = family
		constants[dropsVarFilterAddr] = address
		constants[dropsVarFilterMask] = mask
	}
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("constant %s: %w", name, err)
		}
	}
	return nil
}

// filterWords writes a prefix as the probe compares it: 32-bit words in network
// order.
func filterWords(p netip.Prefix) (family uint8, address, mask [4]uint32) {
	family = 10
	if p.Addr().Is4() {
		family = 2
	}
	bytes := p.Masked().Addr().AsSlice()
	for i := range len(bytes) / 4 {
		address[i] = binary.NativeEndian.Uint32(bytes[4*i:])
		var m [4]byte
		for b := range 32 {
			if 32*i+b < p.Bits() {
				m[b/8] |= 0x80 >> (b % 8)
			}
		}
		mask[i] = binary.NativeEndian.Uint32(m[:])
	}
	return family, address, mask
}

// tracepointArgs counts a tracepoint's arguments on this kernel.
func tracepointArgs(kernel *btf.Spec, name string) int {
	var t *btf.Typedef
	if kernel.TypeByName("btf_trace_"+name, &t) != nil {
		return 0
	}
	if ptr, ok := t.Type.(*btf.Pointer); ok {
		if proto, ok := ptr.Target.(*btf.FuncProto); ok {
			return len(proto.Params) - 1 // the first is the tracer's own data
		}
	}
	return 0
}

// conntrackModule adds the types of nf_conntrack where it is a module.
func conntrackModule(kernel *btf.Spec) []*btf.Spec {
	var conn *btf.Struct
	if kernel.TypeByName("nf_conn", &conn) == nil {
		return nil
	}
	if module, err := btf.LoadKernelModuleSpec("nf_conntrack"); err == nil {
		return []*btf.Spec{module}
	}
	return nil
}

// nftDropsApart reports whether this kernel frees the packets of nft rules in nft_do_chain (6.7)
// instead of in the hook's loop.
func nftDropsApart() bool {
	major, minor := KernelVersion()
	return major > 6 || major == 6 && minor >= 7
}

// Counts returns the drops so far.
func (d *Drops) Counts() ([]DropCount, error) {
	var list []DropCount
	var key dropsDropKey
	var perCPU []dropsDropCount
	entries := d.objects.dropsMaps.Drops.Iterate()
	for entries.Next(&key, &perCPU) {
		c := d.describe(key)
		for _, v := range perCPU {
			c.Packets += v.Packets
			c.Bytes += v.Bytes
		}
		list = append(list, c)
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("drops: read counts: %w", err)
	}
	return list, nil
}

func (d *Drops) describe(key dropsDropKey) DropCount {
	return DropCount{
		Netns: key.Netns, IfIndex: key.Ifindex, EthType: networkOrder(key.EthType),
		Location: d.symbols.Find(key.Location), Reason: d.reasons.Name(key.Reason),
		Hook: Hook(key.Hook), Tracked: Tracked(key.Ct), key: key,
	}
}

// Missed counts the drops that a probe could not count or describe since it was started or last resumed.
type Missed struct {
	Kinds       uint64 // Drops beyond the limit of kinds.
	Interrupted uint64 // Drops of the whole host that interrupted both programs.
	Hidden      uint64 // Drops of the whole host without a run of the probe, excluding interruptions.
	Samples     uint64 // Lost because they were not read in time.
}

// Missed returns the drops that were not counted or described.
func (d *Drops) Missed() Missed {
	interrupted := d.interruptions() // Read before missed(), because the second program corrects this number there.
	events := d.events.Packets()     // Read before missed(), so that a drop in between does not count as hidden.
	n := d.missedDrops()
	interrupted -= d.interruptedBefore
	interrupted -= min(interrupted, n[2])
	events -= min(events, d.eventsBefore)
	unseen := events - min(events, n[3]-d.seenBefore)
	return Missed{Kinds: n[0], Samples: n[1], Interrupted: interrupted, Hidden: unseen - min(unseen, interrupted)}
}

// missedDrops returns the sums over all CPUs of the map drops_missed.
func (d *Drops) missedDrops() (n [4]uint64) {
	for i := range n {
		var perCPU []uint64
		if d.objects.DropsMissed.Lookup(uint32(i), &perCPU) == nil {
			for _, v := range perCPU {
				n[i] += v
			}
		}
	}
	return n
}

// interruptions returns how often the kernel skipped the first program because it was already running on the CPU.
func (d *Drops) interruptions() uint64 {
	if d.objects.DropsFirst == nil {
		return 0
	}
	stats, err := d.objects.DropsFirst.Stats()
	if err != nil {
		return 0
	}
	return stats.RecursionMisses
}

// Limits describes, in sentences, the drops that are invisible on this host.
func (d *Drops) Limits() []string { return d.limits }

// RunTime returns the number of runs of the probe and their total time. Both are zero unless sysctl kernel.bpf_stats_enabled
// or EnableStats is on.
func (d *Drops) RunTime() (runs uint64, total time.Duration) {
	for _, p := range d.programs() {
		stats, err := p.Stats()
		if err != nil {
			return 0, 0
		}
		runs = max(runs, stats.RunCount)
		total += stats.Runtime
	}
	return runs, total
}

// programs returns the loaded programs.
func (d *Drops) programs() []*ebpf.Program {
	all := []*ebpf.Program{d.objects.DropsFirst, d.objects.DropsAgain, d.objects.DropsRaw}
	return slices.DeleteFunc(all, func(p *ebpf.Program) bool { return p == nil })
}

// Pause stops counting until Resume. The counts remain readable. A paused probe costs the host
// nothing, and Resume is much cheaper than a new probe.
func (d *Drops) Pause() error {
	var errs []error
	for _, l := range d.links {
		errs = append(errs, l.Close())
	}
	errs = append(errs, d.events.Close(), d.losses.pause())
	d.links, d.events = nil, nil
	return errors.Join(errs...)
}

// Resume counts from zero after Pause.
func (d *Drops) Resume() error {
	if err := d.forget(); err != nil {
		return fmt.Errorf("drops: begin at zero: %w", err)
	}
	d.interruptedBefore = d.interruptions()
	for _, p := range d.programs() { // in this order: they run as attached
		var l link.Link
		var err error
		if p == d.objects.DropsRaw {
			l, err = link.AttachRawTracepoint(link.RawTracepointOptions{Name: "kfree_skb", Program: p})
		} else {
			l, err = link.AttachTracing(link.TracingOptions{Program: p})
		}
		if err != nil {
			return fmt.Errorf("drops: attach to tracepoint kfree_skb: %w", err)
		}
		d.links = append(d.links, l)
	}
	if d.objects.DropsRaw != nil {
		return nil
	}
	if err := d.losses.resume(); err != nil {
		return fmt.Errorf("drops: attach to the tracepoints of XDP: %w", err)
	}
	var err error
	if d.events, err = openEventCount(); err != nil {
		limit := fmt.Sprintf("whether this kernel hides drops from its probes is not known: %v", err)
		if !slices.Contains(d.limits, limit) {
			d.limits = append(d.limits, limit)
		}
	}
	d.seenBefore = d.missedDrops()[3] // read before the events, so that a drop in between does not count as hidden
	d.eventsBefore = d.events.Packets()
	return nil
}

// forget empties the maps of a paused probe.
func (d *Drops) forget() error {
	var keys []dropsDropKey
	var key dropsDropKey
	var counts []dropsDropCount
	entries := d.objects.dropsMaps.Drops.Iterate()
	for entries.Next(&key, &counts) {
		keys = append(keys, key)
	}
	errs := []error{entries.Err()}
	for _, k := range keys {
		errs = append(errs, d.objects.dropsMaps.Drops.Delete(k))
	}
	for i := range d.objects.DropsMissed.MaxEntries() {
		errs = append(errs, d.objects.DropsMissed.Put(i, make([]uint64, ebpf.MustPossibleCPU())))
	}
	return errors.Join(append(errs, d.objects.DropsSeen.Put(uint32(0), make([]dropsSeen, ebpf.MustPossibleCPU())))...)
}

// Close stops counting.
func (d *Drops) Close() error {
	errs := []error{d.Pause(), d.losses.close()}
	if d.ring != nil {
		errs = append(errs, d.ring.Close())
	}
	for _, p := range d.programs() {
		errs = append(errs, p.Close())
	}
	errs = append(errs, d.objects.dropsMaps.Close())
	return errors.Join(errs...)
}
