// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/datapath"
)

// teller is a datapath that gives one answer about every packet.
type teller struct {
	fake
	answer datapath.Explanation
	err    error
	asked  []string // interfaces of the questions
}

func (d *teller) Explain(_ context.Context, q datapath.Question) (*datapath.Explanation, error) {
	d.asked = append(d.asked, q.Interface)
	if d.err != nil {
		return nil, fmt.Errorf("explain: %w", d.err)
	}
	e := d.answer
	e.Datapath = d.name
	return &e, nil
}

// TestExplainOrder: the datapaths explain in the order of the list. The second one explains only packets that
// the first one does not handle. A datapath without objects is skipped.
func TestExplainOrder(t *testing.T) {
	broken := errors.New("broken")
	pass := datapath.Explanation{Action: "pass", Interface: "wan0", Steps: []string{"passes"}}
	owned := datapath.Explanation{Action: "pass", Owner: "web"}
	forward := datapath.Explanation{Action: "forward", Steps: []string{"forwards"}}
	for _, c := range []struct {
		name       string
		ebpf, nft  datapath.Explanation
		ebpfErr    error
		nftErr     error
		path, want string // want: the deciding datapath's action, or a part of the error
	}{
		{"ebpf decides", forward, pass, nil, nil, "ebpf", "forward"},
		{"ebpf leaves it to nftables", pass, forward, nil, nil, "ebpf nftables", "forward"},
		{"ebpf leaves its own to the kernel", owned, forward, nil, nil, "ebpf", "pass"},
		{"ebpf is idle", pass, forward, datapath.ErrIdle, nil, "nftables", "forward"},
		{"nftables is idle", pass, forward, nil, datapath.ErrIdle, "ebpf", "pass"},
		{"both are", pass, forward, datapath.ErrIdle, datapath.ErrIdle, "", "no datapath carries anything"},
		{"nftables fails", pass, forward, nil, broken, "", "nftables: explain: broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ebpf, nft := &teller{answer: c.ebpf, err: c.ebpfErr}, &teller{answer: c.nft, err: c.nftErr}
			ebpf.name, nft.name = "ebpf", "nftables"
			e := New(Options{Datapaths: []datapath.Datapath{ebpf, nft}})
			answer, err := e.Explain(t.Context(), datapath.Question{})
			if c.path == "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if path := strings.Join(answer.Path, " "); path != c.path || answer.Action != c.want {
				t.Errorf("path %q, action %s; want %q, %s", path, answer.Action, c.path, c.want)
			}
			if c.path == "ebpf nftables" && (strings.Join(answer.Steps, ", ") != "passes, forwards" || nft.asked[0] != "wan0") {
				t.Errorf("steps %q, nftables was asked about %q", answer.Steps, nft.asked)
			}
		})
	}
}
