// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
)

// A probe may fail for want of something on this host: a local port, a file, memory, a place
// in the connection table. That tells nothing of the server, and must not take every backend
// down at once, so such a probe is not counted.

// wants are the errors by which the kernel says what this host lacks, in words.
var wants = []struct {
	errno syscall.Errno
	lack  string
}{
	// connect(2) of TCP; of IPv6 also where no address reaches that far.
	{syscall.EADDRNOTAVAIL, "no local port free"},
	{syscall.EAGAIN, "no local port, or no process, free"}, // connect(2) of UDP, fork(2)
	{syscall.EMFILE, "no file free for this process (RLIMIT_NOFILE)"},
	{syscall.ENFILE, "no file free on this host (fs.file-max)"},
	{syscall.ENOMEM, "no memory free"},
	{syscall.ENOBUFS, "no memory free for packets"},
	// What netfilter drops of the host's own; of SYNs TCP tells nobody, see losses.
	{syscall.EPERM, "packets dropped on this host, by a full connection table or a rule"},
}

// lacking returns what of this host err tells, in words, and "" when it tells of the server.
func lacking(err error) string {
	for _, w := range wants {
		if errors.Is(err, w.errno) {
			return fmt.Sprintf("%s: %v", w.lack, err)
		}
	}
	return ""
}

// silence is a probe that had no answer before its timeout.
type silence struct{ timeout config.Duration }

// Error implements error.
func (s silence) Error() string { return fmt.Sprintf("no answer within %s", s.timeout) }

// losses counts the packets that connection tracking has dropped in this network namespace
// for want of a place in its table. The kernel tells nobody of a SYN that went so.
type losses struct {
	mu   sync.Mutex // protects what is below
	at   time.Time  // of the reading
	seen uint32
}

// lossesAge is the longest time for which a reading is good: it bounds what thousands of
// probes cost that begin, or are not answered, at once.
const lossesAge = 200 * time.Millisecond

// count returns a reading; where the kernel does not tell it is always the same.
func (l *losses) count(read func() (uint32, error)) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); l.at.IsZero() || now.Sub(l.at) >= lossesAge {
		l.at = now
		if n, err := read(); err == nil {
			l.seen = n
		}
	}
	return l.seen
}

// tableDrops reads what losses counts, of the namespace of this thread.
func tableDrops() (uint32, error) {
	list, err := conntrack.ReadPerCPU(context.Background(), conntrack.CurrentNamespace())
	return conntrack.Total(list).Drop, err
}

// quiet is how long no probe has lacked anything before the next that does is told of again.
const quiet = time.Minute

// lacked notes at end that a probe lacked something, and reports whether that is news.
// m.mu is held.
func (m *Monitor) lacked(end time.Time) bool {
	news := m.lastLack.IsZero() || end.Sub(m.lastLack) >= quiet
	m.lastLack = end
	return news
}
