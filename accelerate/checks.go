// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// judgement is what the rules and other properties of the host exclude.
type judgement struct {
	all, ipv6 []string    // reasons that exclude every flow, and every flow of IPv6
	some      []exclusion // rules that exclude some flows
}

// exclusion is a rule that excludes the flows that may traverse it.
type exclusion struct {
	rule       string
	conditions programsExclusion
	named      bool // The conditions have the name of an interface, which may not exist yet.
}

// examine judges the host.
func examine(ctx context.Context) (*judgement, error) {
	ipv4, err := firewall.PacketRules(ctx, false)
	if err != nil {
		return nil, err
	}
	ipv6, err := firewall.PacketRules(ctx, true)
	if err != nil {
		return nil, err
	}
	j := divide(ipv4, ipv6, func(name string) uint32 {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return 0 // its appearance is an event
		}
		return uint32(i.Index)
	})
	policies, err := netdev.IPsecPolicies()
	if err != nil {
		return nil, err
	}
	for _, p := range policies {
		j.all = append(j.all, "IPsec policy "+p.String())
	}
	const header = 3 // lines of /proc/net/ip_vs without a service
	if b, err := os.ReadFile("/proc/thread-self/net/ip_vs"); err == nil && strings.Count(string(b), "\n") > header {
		j.all = append(j.all, "IPVS has services, and counts their packets itself")
	}
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward_use_pmtu"); err == nil && strings.TrimSpace(string(b)) != "0" {
		j.all = append(j.all, "sysctl net.ipv4.ip_forward_use_pmtu is set: the path MTU of routes is not learned")
	}
	return j, nil
}

// divide separates the rules whose packets have known conditions from those that may apply to every flow.
func divide(ipv4, ipv6 []firewall.PacketRule, index func(name string) uint32) *judgement {
	j := &judgement{}
	j.divide(unix.AF_INET, ipv4, &j.all, index)
	j.divide(unix.AF_INET6, ipv6, &j.ipv6, index)
	if len(j.some) > int(programsLimitEXCLUSIONS) {
		for _, x := range j.some {
			j.all = append(j.all, x.rule)
		}
		j.some = nil
	}
	j.ipv6 = slices.DeleteFunc(j.ipv6, func(r string) bool { return slices.Contains(j.all, r) })
	j.all = unique(j.all)
	return j
}

func (j *judgement) divide(family uint16, rules []firewall.PacketRule, all *[]string, index func(name string) uint32) {
	for _, r := range rules {
		text := "rule " + r.String() + " depends on single packets"
		// A rule without conditions that sees packets of TCP and of UDP may apply to every flow.
		other := r
		other.Where.Protocol = flow.TCP + flow.UDP - r.Where.Protocol
		if !r.Where.Narrow() && (r.Where.Protocol == 0 || slices.Contains(rules, other)) {
			*all = append(*all, text)
			continue
		}
		j.some = append(j.some, exclusion{text, conditionsOf(family, r.Where, index), r.Where.In != "" || r.Where.Out != ""})
	}
	*all = unique(*all)
}

// unique removes repetitions.
func unique(list []string) (out []string) {
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// conditionsOf returns a condition in the form of the programs. An unknown interface is no condition.
func conditionsOf(family uint16, w firewall.Where, index func(name string) uint32) programsExclusion {
	x := programsExclusion{Family: family, L4Proto: uint16(w.Protocol), In: w.InIndex, Out: w.OutIndex,
		Sport: [2]uint16{w.SourcePorts.Low, w.SourcePorts.High}, Dport: [2]uint16{w.DestPorts.Low, w.DestPorts.High}}
	x.Saddr, x.Smask = maskedWords(w.Source)
	x.Daddr, x.Dmask = maskedWords(w.Dest)
	if w.In != "" {
		x.In = index(w.In)
	}
	if w.Out != "" {
		x.Out = index(w.Out)
	}
	return x
}

// maskedWords returns the address and the mask of a prefix in network byte order; zeros for an invalid one.
func maskedWords(p netip.Prefix) (address, mask [4]uint32) {
	if !p.IsValid() {
		return address, mask
	}
	a := p.Addr().AsSlice()
	m := net.CIDRMask(p.Bits(), 8*len(a))
	for i := range len(a) / 4 {
		address[i], mask[i] = binary.NativeEndian.Uint32(a[4*i:]), binary.NativeEndian.Uint32(m[4*i:])
	}
	return address, mask
}

// rules returns the rules that exclude some flows.
func (j *judgement) rules() (out []string) {
	for _, x := range j.some {
		out = append(out, x.rule)
	}
	return unique(out)
}

// byInterface reports whether an exclusion depends on the name of an interface.
func (j *judgement) byInterface() bool {
	return slices.ContainsFunc(j.some, func(x exclusion) bool { return x.named })
}

// setJudgement passes the exclusions to the programs, which learn nothing meanwhile. The caller holds the lock, except
// while opening.
func (a *Accelerator) setJudgement(j *judgement) error {
	a.judgement = j
	for i := range j.some {
		a.lastRule++
		j.some[i].conditions.Id = a.lastRule
		if err := a.objects.Exclusions.Put(uint32(i), &j.some[i].conditions); err != nil {
			return fmt.Errorf("exclusions: %w", err)
		}
	}
	return errors.Join(a.objects.ExclusionsUsed.Set(uint32(len(j.some))), a.objects.WithoutIpv6.Set(uint32(min(len(j.ipv6), 1))))
}

// readSettings passes the lifetime of established TCP connections to the programs.
func (a *Accelerator) readSettings() error {
	const file = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("connection tracking: %w (the host tracks no connections)", err)
	}
	seconds, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return a.objects.TcpLifetime.Set(uint32(min(seconds*1000, 1<<31)))
}

// checkRules looks for a transaction of nftables.
func (a *Accelerator) checkRules(ctx context.Context) error {
	generation, err := firewall.Generation()
	if err != nil {
		return errors.Join(fmt.Errorf("nftables: %w", err), a.pause())
	}
	a.mu.Lock()
	surveyed, judged := a.surveyed, a.judged
	a.mu.Unlock()
	if generation != a.generation || !judged {
		a.generation = generation
		return a.judge(ctx, "nftables")
	}
	if !surveyed {
		return a.follow()
	}
	return nil
}

// checkSlow looks for changes that cause no event.
func (a *Accelerator) checkSlow(ctx context.Context) error {
	if err := a.readSettings(); err != nil {
		return err
	}
	legacy, err := firewall.LegacyTables()
	if err != nil {
		return errors.Join(err, a.pause())
	}
	if !maps.Equal(legacy, a.legacy) {
		a.legacy = legacy
		return a.judge(ctx, "iptables-legacy")
	}
	return a.follow()
}

// judge examines the rules after a change. Nothing is accelerated meanwhile.
func (a *Accelerator) judge(ctx context.Context, cause string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changes[cause]++
	if err := a.pause(); err != nil {
		return err
	}
	j, err := examine(ctx)
	if a.judged = err == nil; err != nil {
		j = &judgement{all: []string{fmt.Sprintf("the rules could not be read: %v", err)}}
	}
	before := a.judgement
	for _, c := range []struct {
		now, before []string
		text        string
	}{
		{j.all, before.all, "nothing is accelerated: "},
		{j.ipv6, before.ipv6, "no flow of IPv6 is accelerated: "},
		{j.rules(), before.rules(), "its flows are not accelerated: "},
	} {
		if slices.Equal(c.now, c.before) {
			continue
		}
		for _, r := range c.now {
			a.o.Log("%s%s", c.text, r)
		}
	}
	if len(j.all) == 0 && len(before.all) > 0 {
		a.o.Log("flows are accelerated again")
	}
	if err := a.setJudgement(j); err != nil || len(j.all) > 0 {
		return err
	}
	return a.resume()
}

// follow surveys the interfaces again. Only a difference invalidates the flows.
func (a *Accelerator) follow() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.interfaces
	if err := a.survey(); err != nil {
		return err
	}
	if slices.EqualFunc(before, a.interfaces, Interface.equal) {
		return nil
	}
	a.changes["interfaces"]++
	for _, i := range a.interfaces {
		if !slices.ContainsFunc(before, i.equal) {
			a.o.Log("interface %s", i)
		}
	}
	if len(a.judgement.all) > 0 {
		return nil
	}
	return a.resume()
}

// linkChanged follows an event of the kernel.
func (a *Accelerator) linkChanged(e netdev.Event) {
	switch e.Kind {
	case netdev.Policy:
		a.mu.Lock()
		a.judged = false
		a.mu.Unlock()
	case netdev.Link, netdev.Lost:
		a.mu.Lock()
		a.surveyed = false
		if a.judgement.byInterface() {
			a.judged = false // an interface may have got the name in a rule
		}
		a.mu.Unlock()
	}
	a.invalidate(e.Kind.String())
}

// station is a hardware address on a bridge.
type station struct {
	bridge int
	vlan   int
	mac    [6]byte
}

// watchStations follows the forwarding entries of bridges. A station that moves to another port invalidates all flows.
func (a *Accelerator) watchStations(ctx context.Context) error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_NEIGH)
	if err != nil {
		return fmt.Errorf("bridge entries: %w", err)
	}
	stop := context.AfterFunc(ctx, socket.Close)
	defer func() {
		if stop() {
			socket.Close()
		}
	}()
	for {
		messages, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			a.invalidate("bridge")
			continue
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return fmt.Errorf("bridge entries: %w", err)
		}
		for _, m := range messages {
			n, err := netlink.NeighDeserialize(m.Data)
			if err == nil && n.Family == unix.AF_BRIDGE && m.Header.Type == unix.RTM_NEWNEIGH && a.stationMoved(n) {
				a.invalidate("bridge")
			}
		}
	}
}

// mostStations bounds the memory of known stations. A station beyond the bound counts as moved.
const mostStations = 65536

// stationMoved records the port of a station and reports whether it was on another one.
func (a *Accelerator) stationMoved(n *netlink.Neigh) bool {
	if len(n.HardwareAddr) != 6 {
		return false
	}
	key := station{n.MasterIndex, n.Vlan, [6]byte(n.HardwareAddr)}
	before, known := a.stations[key]
	if !known && len(a.stations) >= mostStations {
		clear(a.stations)
		return true
	}
	a.stations[key] = n.LinkIndex
	return !known || before != n.LinkIndex
}

// macOf returns a hardware address of Ethernet; zeros if there is none.
func macOf(mac net.HardwareAddr) (out [6]uint8) {
	copy(out[:], mac)
	return out
}
