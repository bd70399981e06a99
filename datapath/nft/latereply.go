// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// A reply in flight when its connection is ended opens a new connection in the reply direction. The
// next packets in the original direction belong to it and bypass the new rules: they leave
// untranslated, or to a replaced backend. Therefore the connections opened by late replies are
// ended too, as long as replies may arrive.

// lateReplyDelays are the times after an apply at which connections opened by late replies are
// ended. The last one is an estimate of the longest round trip: RFC 6298 §2.4 has 1 s as the
// minimum retransmission timeout, and satellite links take 600 ms.
var lateReplyDelays = []time.Duration{100 * time.Millisecond, time.Second, 4 * time.Second}

// If both sides send, another reply may be in flight when such a connection is ended. After each
// ended connection the table is therefore checked again after lookAgain, at most lookAgainMost
// times.
const (
	lookAgain     = 100 * time.Millisecond
	lookAgainMost = 20
)

// endpoints identify the first packet of a connection.
type endpoints struct {
	protocol flow.Protocol
	zone     uint16
	tuple    conntrack.Tuple
}

// replyEndpoints returns the endpoints of the connection that a late reply opens after the entry is
// removed.
func replyEndpoints(e *conntrack.Entry) endpoints { return endpoints{e.Protocol, e.Zone, e.Reply} }

// endLate ends the connections opened by late replies, in the background.
func (d *Datapath) endLate(answers map[endpoints]bool) error {
	if len(answers) == 0 {
		return nil
	}
	c, err := d.tracking.Sibling()
	if err != nil {
		return err
	}
	start := time.Now()
	go func() {
		defer c.Close()
		for _, after := range lateReplyDelays {
			err := d.endOpened(c, answers, time.Until(start.Add(after)))
			if d.background.Err() != nil {
				return
			}
			if err != nil {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.endError = fmt.Errorf("ending connections opened by late replies: %w", err)
				return
			}
		}
	}()
	return nil
}

// endOpened waits and then ends the connections opened by late replies, until there are none.
func (d *Datapath) endOpened(c *conntrack.Conn, answers map[endpoints]bool, after time.Duration) error {
	for range lookAgainMost {
		select {
		case <-d.background.Done():
			return nil
		case <-time.After(after):
		}
		n, err := c.DeleteIf(d.background, nil, func(e *conntrack.Entry) bool {
			return answers[endpoints{e.Protocol, e.Zone, e.Original}]
		})
		if err != nil || n == 0 {
			return err
		}
		after = lookAgain
	}
	return nil
}
