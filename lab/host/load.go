// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// Load is a series of exchanges with one target.
type Load struct {
	From   *lab.Node
	Target netip.AddrPort
	Ask    Ask
	// Sources is the prefix of the clients' addresses, used in sequence; the node must own them. For the zero Prefix
	// the kernel chooses the address.
	Sources netip.Prefix
	// Count is the number of exchanges; 0 means until ctx ends.
	Count int
	// Parallel is the number of concurrent exchanges; 0 means 16.
	Parallel int
	// Rate limits the exchanges per second in total; 0 means no limit.
	Rate int
	// Timeout is the time limit of an exchange; 0 means 2 s.
	Timeout time.Duration
}

// Failure is an exchange without a valid answer.
type Failure struct {
	Start time.Time
	End   time.Time
	Cause string
}

// Tally is the result of a load.
type Tally struct {
	Answers  map[Seen]int
	Failures []Failure
	Start    time.Time
	Elapsed  time.Duration
}

// Seen identifies the server and the client of a good answer.
type Seen struct {
	Server string
	// Source is the client's address, or zero if the kernel chose it.
	Source netip.Addr
	// Client is the address, without port, that the server received.
	Client string
}

// Good returns the number of answered exchanges.
func (t Tally) Good() int {
	sum := 0
	for _, n := range t.Answers {
		sum += n
	}
	return sum
}

// Servers counts good answers by the name of the server.
func (t Tally) Servers() map[string]int {
	m := make(map[string]int)
	for s, n := range t.Answers {
		m[s.Server] += n
	}
	return m
}

// Clients counts good answers by the client address that the server received.
func (t Tally) Clients() map[string]int {
	m := make(map[string]int)
	for s, n := range t.Answers {
		m[s.Client] += n
	}
	return m
}

// Wanderers returns the number of source addresses with answers from more than one server.
func (t Tally) Wanderers() int {
	servers := make(map[netip.Addr]map[string]bool)
	for s := range t.Answers {
		if servers[s.Source] == nil {
			servers[s.Source] = make(map[string]bool)
		}
		servers[s.Source][s.Server] = true
	}
	n := 0
	for _, of := range servers {
		if len(of) > 1 {
			n++
		}
	}
	return n
}

// Sent returns the number of attempted exchanges.
func (t Tally) Sent() int { return t.Good() + len(t.Failures) }

// FailuresOutside returns the failures of exchanges that did not overlap the period from start to end.
func (t Tally) FailuresOutside(start, end time.Time) []Failure {
	var out []Failure
	for _, f := range t.Failures {
		if f.End.Before(start) || f.Start.After(end) {
			out = append(out, f)
		}
	}
	return out
}

// Causes returns the number of failures by cause.
func (t Tally) Causes() map[string]int {
	m := make(map[string]int)
	for _, f := range t.Failures {
		m[f.Cause]++
	}
	return m
}

// Spread formats the answers by server, in order of the name: "a 25 %, b 75 %".
func (t Tally) Spread() string {
	good, servers := t.Good(), t.Servers()
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(servers)) {
		parts = append(parts, fmt.Sprintf("%s %.0f %%", name, 100*float64(servers[name])/float64(good)))
	}
	return strings.Join(parts, ", ")
}

// Run performs the exchanges and counts the results. It returns when all are complete or ctx ends; exchanges
// interrupted by ctx are not counted.
func (l Load) Run(ctx context.Context) Tally { return l.RunUntil(ctx, nil) }

// RunUntil is like Run, but also ends when stop is closed. Exchanges in progress are then completed and counted.
func (l Load) RunUntil(ctx context.Context, stop <-chan struct{}) Tally {
	r := &runner{load: l, stop: stop, tally: Tally{
		Answers: make(map[Seen]int),
		Start:   time.Now(),
	}}
	var wg sync.WaitGroup
	for range cmp.Or(l.Parallel, 16) {
		wg.Go(func() { r.runWorker(ctx) })
	}
	wg.Wait()
	r.tally.Elapsed = time.Since(r.tally.Start)
	return r.tally
}

type runner struct {
	load Load
	stop <-chan struct{}
	next atomic.Int64

	mu    sync.Mutex // protects tally
	tally Tally
}

func (r *runner) runWorker(ctx context.Context) {
	for {
		i := r.next.Add(1) - 1
		if r.load.Count > 0 && i >= int64(r.load.Count) {
			return
		}
		if r.load.Rate > 0 {
			due := r.tally.Start.Add(time.Duration(i) * time.Second / time.Duration(r.load.Rate))
			select {
			case <-ctx.Done():
			case <-r.stop:
			case <-time.After(time.Until(due)):
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-r.stop:
			return
		default:
		}
		r.sendOne(ctx, i)
	}
}

func (r *runner) sendOne(ctx context.Context, i int64) {
	try, cancel := context.WithTimeout(ctx, cmp.Or(r.load.Timeout, 2*time.Second))
	defer cancel()
	start, source := time.Now(), r.load.source(i)
	a, err := r.load.Ask(try, r.load.From, netip.AddrPortFrom(source, 0), r.load.Target)
	end := time.Now()
	if err != nil && ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.tally.Failures = append(r.tally.Failures, Failure{start, end, cause(err)})
		return
	}
	client, _, err := net.SplitHostPort(a.Client)
	if err != nil {
		client = a.Client
	}
	r.tally.Answers[Seen{a.Name, source, client}]++
}

// source returns the address of the i-th exchange. The host part counts from 1 and restarts at the end of the prefix.
func (l Load) source(i int64) netip.Addr {
	if !l.Sources.IsValid() {
		return netip.Addr{}
	}
	b := l.Sources.Masked().Addr().AsSlice()
	// 16 host bits are enough for a lab; a longer prefix has fewer.
	bits := min(l.Sources.Addr().BitLen()-l.Sources.Bits(), 16)
	n := uint16(i%(1<<bits-2)) + 1 // excludes the network and broadcast addresses
	if bits < 2 {
		n = 0
	}
	b[len(b)-1] |= byte(n)
	b[len(b)-2] |= byte(n >> 8)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// cause describes an error in words that are equal for all exchanges.
func cause(err error) string {
	var errno syscall.Errno
	var netErr net.Error
	switch {
	case errors.As(err, &netErr) && netErr.Timeout(), errors.Is(err, os.ErrDeadlineExceeded):
		return "timeout"
	case errors.As(err, &errno):
		return errno.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed without an answer"
	}
	return err.Error()
}
