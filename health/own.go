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

// A probe may fail because this host lacks something: a local port, a file descriptor, memory, or an
// entry in the connection table. Such a failure says nothing about the server and would take every
// backend down at once. So it is not counted.

// wants describes the errors of the kernel that mean that this host lacks something.
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

// lacking returns what this host lacks according to err, and "" when err is about the server.
func lacking(err error) string {
	for _, w := range wants {
		if errors.Is(err, w.errno) {
			return fmt.Sprintf("%s: %v", w.lack, err)
		}
	}
	return ""
}

// silence is the error of a probe that got no answer before its timeout.
type silence struct{ timeout config.Duration }

// Error implements error.
func (s silence) Error() string { return fmt.Sprintf("no answer within %s", s.timeout) }

// losses counts the packets that connection tracking dropped in this network namespace because its
// table was full. The sender of a SYN that was dropped so gets no error.
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

// quiet is how long no probe may have lacked anything before the next one that does is reported.
const quiet = time.Minute

// lacked records that a probe lacked something at the time end, and returns whether to report it.
// m.mu is held.
func (m *Monitor) lacked(end time.Time) bool {
	news := m.lastLack.IsZero() || end.Sub(m.lastLack) >= quiet
	m.lastLack = end
	return news
}
