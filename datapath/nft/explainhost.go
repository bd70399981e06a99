// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/replay"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/packet"
)

// ExplainHost replays the first packet of a connection with all rules of the caller's network
// namespace, from all programs. It needs no daemon.
func ExplainHost(ctx context.Context, q datapath.Question) (*datapath.Explanation, error) {
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	defer unix.Close(home)
	rules, err := replay.ReadRules(ctx)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	p, err := q.Packet(packet.SYN)
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	x := explainer{q: q, snapshot: &datapath.Snapshot{}, sysctl: kernel.Sysctl}
	x.answer, err = replay.Run(ctx, replay.Question{Home: home, Ruleset: &ruleset.Ruleset{}, Host: rules, In: q.Interface, Source: q.Tuple.Source.Addr(), Packet: p})
	if err != nil {
		return nil, fmt.Errorf("explain: %w", err)
	}
	e := x.explanation()
	e.Datapath = "host"
	names := "none"
	if list := rules.Names(); len(list) > 0 {
		names = strings.Join(list, ", ")
	}
	e.Notes = append(e.Notes, "rules known: all of this host ("+names+")", "existing conntrack entries are not part of the replay")
	return e, nil
}
