// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// An answer that is on its way when its connection ends opens a connection of its own, from the other side.
// What is sent next to that side belongs to it and never meets the new rules: it leaves untranslated, or goes
// on to a backend that was replaced. So connections that late answers open are ended too, for as long as
// answers may come.

// lateAnswersAfter are the times after an apply at which connections are looked for that answers have opened.
// The last is a guess at the longest way: RFC 6298 §2.4 has 1 s as the least time to wait for an answer, and
// satellite links take 600 ms.
var lateAnswersAfter = []time.Duration{100 * time.Millisecond, time.Second, 4 * time.Second}

// While both sides send, an answer may be on its way again when such a connection ends. So where one was
// ended, another look follows after lookAgain, lookAgainMost times at most.
const (
	lookAgain     = 100 * time.Millisecond
	lookAgainMost = 20
)

// endpoints are those of the first packet of a connection.
type endpoints struct {
	protocol flow.Protocol
	zone     uint16
	tuple    conntrack.Tuple
}

// answersOf returns what an answer within a connection opens when the connection is gone.
func answersOf(e *conntrack.Entry) endpoints { return endpoints{e.Protocol, e.Zone, e.Reply} }

// endLate ends the connections that answers within ended ones open, in the background.
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
		for _, after := range lateAnswersAfter {
			err := d.endOpened(c, answers, time.Until(start.Add(after)))
			if d.background.Err() != nil {
				return
			}
			if err != nil {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.endError = fmt.Errorf("connections that late answers have opened: %w", err)
				return
			}
		}
	}()
	return nil
}

// endOpened ends the connections that answers have opened, after a while, until there are none.
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
