// SPDX-License-Identifier: Apache-2.0

// Package event stores recent events of the gateway: configuration changes, backend state changes, tables that fill.
// The log is one bounded list with any number of readers at their own pace. A slow reader receives the number of
// missed events.
package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// Kind is the subject of an event.
type Kind string

// Kinds of events.
const (
	Apply   Kind = "apply"   // A change of the configuration or of a backend's state, or restored rules.
	Backend Kind = "backend" // The state of a backend.
	Table   Kind = "table"   // A connection table is nearly full.
	Ports   Kind = "ports"   // The ports of an address pool are nearly exhausted.
	Drops   Kind = "drops"   // Packets are dropped for one reason.
	Warning Kind = "warning" // A problem on this host disables rules.
	// Announcement is the announcement or the withdrawal of an address.
	Announcement Kind = "announcement"
	// Uplink is a change of the state of an uplink.
	Uplink Kind = "uplink"
	Flow   Kind = "flow"   // A connection selected by the client; only in streams.
	Begin  Kind = "begin"  // The start of a stream; only in streams.
	Missed Kind = "missed" // Events that this reader has missed; only in streams.
)

// Kinds are the kinds stored in the log.
var Kinds = []Kind{Apply, Backend, Announcement, Uplink, Table, Ports, Drops, Warning}

// Event is one entry of the log.
type Event struct {
	ID     uint64    `json:"id" doc:"grows with every event, over restarts too; send it as Last-Event-ID to get the events after it"`
	At     time.Time `json:"at"`
	Kind   Kind      `json:"kind" enum:"apply,backend,announcement,uplink,table,ports,drops,warning,flow,begin,missed"`
	Text   string    `json:"text" doc:"what happened, for people"`
	Ended  bool      `json:"ended,omitempty" doc:"the condition of an earlier event of the same kind and object is over"`
	Object string    `json:"object,omitempty" doc:"the object of the event: SERVICE/BACKEND, ADDRESS, UPLINK, DATAPATH/TABLE, DATAPATH/REASON"`

	Who      string  `json:"who,omitempty" doc:"of apply: the user or program that requested the change"`
	What     string  `json:"what,omitempty" doc:"of apply: the requested change"`
	Revision uint64  `json:"revision,omitempty" doc:"of apply: the revision that is in force"`
	Error    string  `json:"error,omitempty" doc:"of apply: why it was refused"`
	State    string  `json:"state,omitempty" doc:"of backend: up, drain or down; of announcement: announced or withdrawn; of uplink: carrying, standby or down"`
	Why      string  `json:"why,omitempty" doc:"of backend, announcement and uplink: the reason of the state"`
	Used     int     `json:"used,omitempty" doc:"of table and ports: entries in use"`
	Size     int     `json:"size,omitempty" doc:"of table and ports: entries that there are"`
	Rate     float64 `json:"rate,omitempty" doc:"of drops: packets a second"`
	Missed   uint64  `json:"missed,omitempty" doc:"of missed: how many events, of all kinds"`
}

// Message returns the event as a message of a server-sent event stream (HTML, section 9.2.6).
func (e Event) Message() []byte {
	var text bytes.Buffer
	line := json.NewEncoder(&text)
	line.SetEscapeHTML(false) // the text is also for people
	if err := line.Encode(e); err != nil {
		return nil // a time out of range; the log uses the current time
	}
	return fmt.Appendf(nil, "id: %d\ndata: %s\n", e.ID, text.Bytes())
}

// Sent is an event with its message, encoded once for all readers.
type Sent struct {
	Event
	Bytes []byte
}

// Held is the number of stored events; maxText bounds the text of each event in bytes.
const (
	Held    = 8192
	maxText = 1024
)

// Log is the bounded list of events. A nil Log accepts events and drops them.
type Log struct {
	now  func() time.Time
	held int

	mu    sync.Mutex    // Protects the rest.
	base  uint64        // ID of the first event of this process.
	next  uint64        // ID of the next one.
	ring  []Sent        // The last events; an event is at (ID-base) % held.
	added chan struct{} // Closed with the next event.
}

// New returns an empty list for the last held events. IDs begin at the current time, so a later process uses greater
// IDs.
func New(held int) *Log {
	base := uint64(time.Now().UnixMicro())
	return &Log{now: time.Now, held: held, base: base, next: base, added: make(chan struct{})}
}

// Add assigns an ID and a time to an event, and wakes the readers. It never waits for readers.
func (l *Log) Add(e Event) {
	if l == nil {
		return
	}
	for _, text := range []*string{&e.Text, &e.Error, &e.Why, &e.What, &e.Who} {
		*text = truncateText(*text)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e.ID, e.At = l.next, l.now()
	sent := Sent{e, e.Message()}
	if len(l.ring) < l.held {
		l.ring = append(l.ring, sent)
	} else {
		l.ring[(e.ID-l.base)%uint64(l.held)] = sent
	}
	l.next++
	close(l.added)
	l.added = make(chan struct{})
}

func truncateText(s string) string {
	if len(s) <= maxText {
		return s
	}
	return s[:maxText-3] + "..."
}

// Last returns the ID of the newest event. Before the first event it returns the preceding ID.
func (l *Log) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - 1
}

// After returns at most limit events with greater IDs, oldest first. missed is the number of events after id that are
// no longer stored. added is closed with the next event. An ID of another process counts as the ID before the first
// event.
func (l *Log) After(id uint64, limit int) (events []Sent, missed uint64, added <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if id < l.base-1 || id >= l.next {
		id = l.base - 1
	}
	oldest := l.next - uint64(len(l.ring))
	if id+1 < oldest {
		missed, id = oldest-id-1, oldest-1
	}
	for id++; id < l.next && len(events) < limit; id++ {
		events = append(events, l.ring[(id-l.base)%uint64(l.held)])
	}
	return events, missed, l.added
}

// Knows reports whether this process assigned the ID.
func (l *Log) Knows(id uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return id >= l.base-1 && id < l.next
}
