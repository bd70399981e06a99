// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"math"
	"net/netip"
	"time"
)

// Limits of requests: a source may send burst at once and perSecond each second. That is enough for a client
// with the maximum of mappings to renew them all in time. IPv6 sources count by /64. At most maxSources
// sources are served at a time; others get no answer until one of these has sent nothing for a while.
const (
	burst      = 64
	perSecond  = 16
	maxSources = 4096
)

// A reply to an unresolved source stays in the socket's send buffer for up to three seconds, until
// the kernel knows the hardware address. An interface accepts at most unresolvedPerSecond requests
// from such sources, so that their replies fill a small part of the buffer. A real client is
// resolved earlier, because it had to resolve the gateway's address.
const unresolvedPerSecond = 32

// subscriber is the prefix that counts as one client. An IPv6 host can use any address of its /64.
func subscriber(client netip.Addr) netip.Addr {
	if client.Is6() {
		p, _ := client.Prefix(64)
		return p.Addr()
	}
	return client
}

// rateLimit is a limit of n requests at once and n each second. The zero value is ready.
type rateLimit struct{ conforms time.Duration }

func (p *rateLimit) allow(n int, now time.Duration) bool {
	each := time.Second / time.Duration(n)
	at := max(p.conforms, now) + each
	if at > now+time.Second {
		return false
	}
	p.conforms = at
	return true
}

// limiter limits the rate of requests per source. The zero value is ready.
type limiter struct {
	conforms map[netip.Addr]time.Duration // Time when the source may send a whole burst again.
	full     time.Duration                // Until then no entry can be removed from a full table.
}

// allow counts a request of a source and reports whether it is within the limit.
func (l *limiter) allow(source netip.Addr, now time.Duration) bool {
	const each = time.Second / perSecond
	source = subscriber(source)
	if l.conforms == nil {
		l.conforms = map[netip.Addr]time.Duration{}
	}
	at, known := l.conforms[source]
	if !known && len(l.conforms) >= maxSources {
		if now < l.full {
			return false // avoids scanning all sources for each packet of a flood
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
