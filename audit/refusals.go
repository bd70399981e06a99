// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"log/slog"
	"path/filepath"
	"regexp"
	"sync"
	"time"
)

// RefusedName is the name of the file of refused requests in the directory; the older one is RefusedName.1.
const RefusedName = "refused.jsonl"

// Limits of the record of refused requests. Within a period each client has refusedOfClient
// entries. All other requests, and requests of other clients, are only counted.
const (
	refusedSize     = 1 << 20 // maximum size of a file in bytes
	refusedFiles    = 2
	refusedText     = 256 // maximum length of a text in bytes
	refusedPeriod   = time.Minute
	refusedOfClient = 32
	refusedClients  = 32
)

// refusals writes the first of like refused requests and counts the others. Their number is written at the
// end of the period, with the next request, so that a flood of requests costs few lines.
type refusals struct {
	journal *Log
	now     func() time.Time

	mu      sync.Mutex // Protects the rest.
	begin   time.Time  // of the period
	like    map[string]*Entry
	order   []*Entry       // The values of like, oldest first.
	clients map[string]int // Entries of like, by client.
}

func newRefusals(dir string, log *slog.Logger) *refusals {
	return &refusals{
		journal: &Log{path: filepath.Join(dir, RefusedName), log: log, size: refusedSize, files: refusedFiles},
		now:     time.Now, like: map[string]*Entry{}, clients: map[string]int{},
	}
}

// changing matches the parts of a client's name that differ from one of its connections or processes to
// the next.
var changing = regexp.MustCompile(`:[0-9]+$|^process [0-9]+`)

// add records a refused request. It returns false if the request is only counted.
func (r *refusals) add(e Entry) bool {
	for _, text := range []*string{&e.Who, &e.What, &e.Error} {
		if len(*text) > refusedText {
			*text = (*text)[:refusedText-3] + "..."
		}
	}
	client := changing.ReplaceAllString(e.Who, "")
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.now(); now.Sub(r.begin) >= refusedPeriod {
		r.end()
		r.begin = now
	}
	key := client + "\x00" + e.What + "\x00" + e.Error
	if r.like[key] == nil && r.clients[client] < refusedOfClient && (r.clients[client] > 0 || len(r.clients) < refusedClients) {
		r.clients[client]++
		r.addRefusal(key, e)
		r.journal.add(e)
		return true
	}
	if r.like[key] == nil {
		e.What, e.Error = "other requests", ""
		if r.clients[client] == 0 {
			client, e.Who = "", "other clients"
		}
		if key = client + "\x00"; r.like[key] == nil {
			r.addRefusal(key, e)
		}
	}
	r.like[key].Count++
	r.like[key].At = e.At
	return false
}

func (r *refusals) addRefusal(key string, e Entry) {
	r.like[key] = &e
	r.order = append(r.order, &e)
}

// summaries returns the entries that summarise the counted requests.
func (r *refusals) summaries() (list []Entry) {
	for _, e := range r.order {
		if e.Count > 0 {
			list = append(list, *e)
		}
	}
	return list
}

// end writes the numbers of a period.
func (r *refusals) end() {
	for _, e := range r.summaries() {
		r.journal.add(e)
	}
	clear(r.like)
	clear(r.clients)
	r.order = nil
}

func (r *refusals) lastEntries(limit int) ([]Entry, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list, err := r.journal.lastEntries(limit)
	return append(list, r.summaries()...), err
}

func (r *refusals) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end()
	return r.journal.Close()
}
