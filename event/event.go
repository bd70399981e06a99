// SPDX-License-Identifier: Apache-2.0

// Package event keeps the last things that happened in the gateway: who changed what, which backends
// went down, which tables fill. It is one bounded list, from which any number of readers take at their
// own pace; who is too slow is told how many events it missed.
package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// Kind says what an event is about.
type Kind string

// Kinds.
const (
	Apply   Kind = "apply"   // a change of the configuration or of a backend's state, or rules that were put back
	Backend Kind = "backend" // the state of a backend
	Table   Kind = "table"   // a connection table fills
	Ports   Kind = "ports"   // the ports of the address pools run out
	Drops   Kind = "drops"   // packets are dropped for one cause
	Warning Kind = "warning" // something on this host keeps the rules from working
	Flow    Kind = "flow"    // a connection that a client asked to be told of; only in streams
	Begin   Kind = "begin"   // where a stream begins; only in streams
	Missed  Kind = "missed"  // events that this reader did not get; only in streams
)

// Kinds are those that the log has.
var Kinds = []Kind{Apply, Backend, Table, Ports, Drops, Warning}

// Event is one thing that happened.
type Event struct {
	ID     uint64    `json:"id" doc:"grows with every event, over restarts too; send it as Last-Event-ID to get what came after it"`
	At     time.Time `json:"at"`
	Kind   Kind      `json:"kind" enum:"apply,backend,table,ports,drops,warning,flow,begin,missed"`
	Text   string    `json:"text" doc:"what happened, for people"`
	Ended  bool      `json:"ended,omitempty" doc:"what an earlier event of the same kind and object told is over"`
	Object string    `json:"object,omitempty" doc:"what it is about: SERVICE/BACKEND, DATAPATH/TABLE, DATAPATH/REASON"`

	Who      string  `json:"who,omitempty" doc:"of apply: who asked for the change"`
	What     string  `json:"what,omitempty" doc:"of apply: what was asked for"`
	Revision uint64  `json:"revision,omitempty" doc:"of apply: the revision that is in force"`
	Error    string  `json:"error,omitempty" doc:"of apply: why it was refused"`
	State    string  `json:"state,omitempty" doc:"of backend: up, drain or down"`
	Why      string  `json:"why,omitempty" doc:"of backend: the reason of its state"`
	Used     int     `json:"used,omitempty" doc:"of table and ports: entries in use"`
	Size     int     `json:"size,omitempty" doc:"of table and ports: entries that there are"`
	Rate     float64 `json:"rate,omitempty" doc:"of drops: packets a second"`
	Missed   uint64  `json:"missed,omitempty" doc:"of missed: how many events, of all kinds"`
}

// Message is the event as a message of a stream of server-sent events (HTML, section 9.2.6).
func (e Event) Message() []byte {
	var text bytes.Buffer
	line := json.NewEncoder(&text)
	line.SetEscapeHTML(false) // people read it too
	if err := line.Encode(e); err != nil {
		return nil // a time out of range; the log has the present one
	}
	return fmt.Appendf(nil, "id: %d\ndata: %s\n", e.ID, text.Bytes())
}

// Sent is an event with its message, which is made once for all readers.
type Sent struct {
	Event
	Bytes []byte
}

// Held is how many events are kept, and maxText bounds what each of them says, in bytes.
const (
	Held    = 8192
	maxText = 1024
)

// Log is the list. The nil Log takes events and keeps none.
type Log struct {
	now  func() time.Time
	held int

	mu    sync.Mutex    // protects the rest
	base  uint64        // ID of the first event of this process
	next  uint64        // ID of the next one
	ring  []Sent        // the last events; the one with an ID is at (ID-base) % held
	added chan struct{} // closed with the next event
}

// New returns an empty list of the last held events. IDs begin at the present time, so that those of a
// later process are greater.
func New(held int) *Log {
	base := uint64(time.Now().UnixMicro())
	return &Log{now: time.Now, held: held, base: base, next: base, added: make(chan struct{})}
}

// Add gives an event its ID and time, and wakes the readers. It never waits for them.
func (l *Log) Add(e Event) {
	if l == nil {
		return
	}
	for _, text := range []*string{&e.Text, &e.Error, &e.Why, &e.What, &e.Who} {
		*text = cut(*text)
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

func cut(s string) string {
	if len(s) <= maxText {
		return s
	}
	return s[:maxText-3] + "..."
}

// Last is the ID of the newest event; before the first one it is that which stands before it.
func (l *Log) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - 1
}

// After returns at most limit events that follow an ID, the oldest first; how many came between it and
// them that are not held any more; and a channel that is closed with the next event. An ID of another
// process counts as one before the first.
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

// Knows tells whether an ID is of this process.
func (l *Log) Knows(id uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return id >= l.base-1 && id < l.next
}
