// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/netdev"
)

// refusals returns the properties of the host that exclude every flow, and those that exclude the flows of IPv6. The
// packets that a rule applies to are not known in general, so a rule that acts on single packets excludes all flows.
func refusals(ctx context.Context) (out, ipv6 []string, err error) {
	if out, err = packetRules(ctx, false); err != nil {
		return nil, nil, err
	}
	if ipv6, err = packetRules(ctx, true); err != nil {
		return nil, nil, err
	}
	ipv6 = slices.DeleteFunc(ipv6, func(r string) bool { return slices.Contains(out, r) })
	policies, err := netdev.IPsecPolicies()
	if err != nil {
		return nil, nil, err
	}
	for _, p := range policies {
		out = append(out, "IPsec policy "+p.String())
	}
	const header = 3 // lines of /proc/net/ip_vs without a service
	if b, err := os.ReadFile("/proc/thread-self/net/ip_vs"); err == nil && strings.Count(string(b), "\n") > header {
		out = append(out, "IPVS has services, and counts their packets itself")
	}
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward_use_pmtu"); err == nil && strings.TrimSpace(string(b)) != "0" {
		out = append(out, "sysctl net.ipv4.ip_forward_use_pmtu is set: the path MTU of routes is not learned")
	}
	return out, ipv6, nil
}

func packetRules(ctx context.Context, ipv6 bool) (out []string, err error) {
	rules, err := firewall.PacketRules(ctx, ipv6)
	for _, r := range rules {
		out = append(out, "rule "+r.String()+" depends on single packets")
	}
	return out, err
}

// setRefused passes the reasons to the programs. The caller holds the lock, except while opening.
func (a *Accelerator) setRefused(refused, ipv6 []string) error {
	a.refused, a.refusedIPv6 = refused, ipv6
	return a.objects.WithoutIpv6.Set(uint32(min(len(ipv6), 1)))
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
	refused, ipv6, err := refusals(ctx)
	if a.judged = err == nil; err != nil {
		refused = []string{fmt.Sprintf("the rules could not be read: %v", err)}
	}
	if !slices.Equal(refused, a.refused) {
		for _, r := range refused {
			a.o.Log("nothing is accelerated: %s", r)
		}
		if len(refused) == 0 {
			a.o.Log("flows are accelerated again")
		}
	}
	if !slices.Equal(ipv6, a.refusedIPv6) {
		for _, r := range ipv6 {
			a.o.Log("no flow of IPv6 is accelerated: %s", r)
		}
	}
	if err := a.setRefused(refused, ipv6); err != nil || len(refused) > 0 {
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
	if len(a.refused) > 0 {
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
