// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"math"
	"net/netip"
	"time"
)

// Requests that a source may send at once, and after that in a second: a client with
// every mapping that it may have renews them all well within a lifetime. IPv6 sources
// count by /64. Sources beyond the last number are not answered until one of
// them has been silent.
const (
	burst      = 64
	perSecond  = 16
	maxSources = 4096
)

// subscriber is what a client counts as: an IPv6 host has as many addresses as it
// likes, all of its /64.
func subscriber(client netip.Addr) netip.Addr {
	if client.Is6() {
		p, _ := client.Prefix(64)
		return p.Addr()
	}
	return client
}

// limiter holds back the sources that ask too often. The zero value is ready.
type limiter struct {
	conforms map[netip.Addr]time.Duration // when the source's whole burst is there again
	full     time.Duration                // until then none of maxSources has been silent for long enough
}

// allow counts a request of a source and reports whether it is within its limit.
func (l *limiter) allow(source netip.Addr, now time.Duration) bool {
	const each = time.Second / perSecond
	source = subscriber(source)
	if l.conforms == nil {
		l.conforms = map[netip.Addr]time.Duration{}
	}
	at, known := l.conforms[source]
	if !known && len(l.conforms) >= maxSources {
		if now < l.full {
			return false // without looking at all of them for each packet of a flood
		}
		l.full = math.MaxInt64
		for a, t := range l.conforms {
			if t <= now {
				delete(l.conforms, a)
			} else {
				l.full = min(l.full, t)
			}
		}
		if len(l.conforms) >= maxSources {
			return false
		}
	}
	at = max(at, now) + each
	if at > now+burst*each {
		return false
	}
	l.conforms[source] = at
	return true
}
