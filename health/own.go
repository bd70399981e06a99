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
	"github.com/sluice-lb/sluice/netdev"
)

// A probe may fail because this host lacks a local port, a file descriptor, memory, or an entry in the connection
// table. Such a failure gives no information about the server and would take every backend down at once, so it does
// not count.

// resourceErrors maps kernel errors to resources that this host lacks.
var resourceErrors = []struct {
	errno syscall.Errno
	lack  string
}{
	// connect(2) of TCP; in IPv6 also if no source address has a sufficient scope.
	{syscall.EADDRNOTAVAIL, "no local port free"},
	{syscall.EAGAIN, "no local port, or no process, free"}, // connect(2) of UDP, fork(2)
	{syscall.EMFILE, "no file free for this process (RLIMIT_NOFILE)"},
	{syscall.ENFILE, "no file free on this host (fs.file-max)"},
	{syscall.ENOMEM, "no memory free"},
	{syscall.ENOBUFS, "no memory free for packets"},
	// Netfilter dropped a packet of this host. TCP reports no error for a dropped SYN; see losses.
	{syscall.EPERM, "packets dropped on this host, by a full connection table or a rule"},
}

// missingResource returns the resource that this host lacks according to err, or "" if err concerns the server.
func missingResource(err error) string {
	for _, w := range resourceErrors {
		if errors.Is(err, w.errno) {
			return fmt.Sprintf("%s: %v", w.lack, err)
		}
	}
	return ""
}

// noAnswerError is the error of a probe without an answer before its timeout.
type noAnswerError struct{ timeout config.Duration }

// Error implements error.
func (s noAnswerError) Error() string { return fmt.Sprintf("no answer within %s", s.timeout) }

// conntrackDrops counts the packets that connection tracking dropped in this network namespace because its table was full.
// The sender of such a SYN gets no error.
type conntrackDrops struct {
	mu   sync.Mutex // Protects the following fields.
	at   time.Time  // of the reading
	seen uint32
}

// lossesAge is the maximum age of a reading. It bounds the cost of thousands of probes that begin or time out at
// once.
const lossesAge = 200 * time.Millisecond

// count returns a reading; a constant if the kernel does not provide the counter.
func (l *conntrackDrops) count(read func() (uint32, error)) uint32 {
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

// tableDrops reads the counter of losses in the namespace of this thread.
func tableDrops() (uint32, error) {
	list, err := conntrack.ReadPerCPU(context.Background(), netdev.CurrentNamespace())
	return conntrack.Total(list).Drop, err
}

// shortagePause is the time without a lack after which the next lack is reported.
const shortagePause = time.Minute

// recordShortage records that a probe lacked a resource at the time end, and returns whether to report it. m.mu must be
// locked.
func (m *Monitor) recordShortage(end time.Time) bool {
	news := m.lastLack.IsZero() || end.Sub(m.lastLack) >= shortagePause
	m.lastLack = end
	return news
}
