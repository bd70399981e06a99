// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/config"
)

// Bounds of the DNS.
const (
	leastTTL   = time.Second
	mostTTL    = 5 * time.Minute
	unknownTTL = 5 * time.Second // of an answer without a TTL
	dnsTimeout = 2 * time.Second
	resolvConf = "/etc/resolv.conf"
	mostWeight = 256
	mostClass  = 9
)

// resolver finds backends by a name.
type resolver struct {
	name    string
	servers []string // ADDRESS:PORT; empty means the servers in resolv.conf
	v4, v6  bool
}

func newDNS(s sourceSpec) *resolver {
	r := &resolver{name: dns.Fqdn(s.from.DNS), v4: s.v4, v6: s.v6}
	for _, server := range s.from.Servers {
		if at, ok := config.ServerAddress(server); ok {
			r.servers = append(r.servers, at.String())
		}
	}
	return r
}

// awaitChange implements source. The DNS sends no notifications.
func (r *resolver) awaitChange(ctx context.Context) { <-ctx.Done() }

func (r *resolver) find(ctx context.Context) (found []config.Backend, again time.Duration, err error) {
	if strings.HasPrefix(r.name, "_") {
		return r.services(ctx)
	}
	list, ttl, err := r.addresses(ctx, r.name)
	for _, a := range list {
		found = append(found, config.Backend{Address: a})
	}
	return found, ttl, err
}

// addresses returns the addresses of a name in the families of the service.
func (r *resolver) addresses(ctx context.Context, name string) (list []netip.Addr, ttl time.Duration, err error) {
	ttl = mostTTL
	for _, q := range []struct {
		kind uint16
		use  bool
	}{{dns.TypeA, r.v4}, {dns.TypeAAAA, r.v6}} {
		if !q.use {
			continue
		}
		answer, err := r.queryServers(ctx, name, q.kind)
		if err != nil {
			return nil, 0, err
		}
		ttl = min(ttl, timeToLive(answer))
		list = append(list, addressesOf(answer.Answer)...)
	}
	return list, ttl, nil
}

func addressesOf(records []dns.RR) (list []netip.Addr) {
	for _, rr := range records {
		var a netip.Addr
		switch rr := rr.(type) {
		case *dns.A:
			a, _ = netip.AddrFromSlice(rr.A)
		case *dns.AAAA:
			a, _ = netip.AddrFromSlice(rr.AAAA)
		}
		if a = a.Unmap(); a.IsValid() && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare) // servers rotate the order
	return list
}

// services returns the targets of the name's SRV records (RFC 2782).
func (r *resolver) services(ctx context.Context) (found []config.Backend, ttl time.Duration, err error) {
	answer, err := r.queryServers(ctx, r.name, dns.TypeSRV)
	if err != nil {
		return nil, 0, err
	}
	ttl = timeToLive(answer)
	var records []*dns.SRV
	heaviest := uint16(1)
	var priorities []uint16
	for _, rr := range answer.Answer {
		if srv, ok := rr.(*dns.SRV); ok && srv.Target != "." { // "." means that the service does not exist
			records = append(records, srv)
			heaviest = max(heaviest, srv.Weight)
			priorities = append(priorities, srv.Priority)
		}
	}
	slices.SortFunc(records, func(a, b *dns.SRV) int { return cmp.Or(cmp.Compare(a.Target, b.Target), cmp.Compare(a.Port, b.Port)) })
	slices.Sort(priorities)
	priorities = slices.Compact(priorities)
	known := map[string][]netip.Addr{}
	for _, srv := range records {
		list, ok := known[srv.Target]
		if !ok {
			of, own, err := r.addresses(ctx, srv.Target)
			if err != nil {
				return nil, 0, err
			}
			list, ttl, known[srv.Target] = of, min(ttl, own), of
		}
		b := config.Backend{Port: srv.Port, Weight: int(srv.Weight), Priority: min(1+slices.Index(priorities, srv.Priority), mostClass)}
		if heaviest > mostWeight {
			b.Weight = b.Weight * mostWeight / int(heaviest)
		}
		for i, a := range list {
			b.Address = a
			if b.Name = backendName(srv.Target); i > 0 {
				b.Name = fmt.Sprintf("%s-%d", b.Name, i+1)
			}
			found = append(found, b)
		}
	}
	return found, ttl, nil
}

// backendName converts a DNS name to a backend name.
func backendName(target string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:", r) {
			return r
		}
		return '-'
	}, strings.TrimSuffix(target, "."))
	return name[:min(len(name), 50)]
}

// timeToLive returns the validity of an answer, also of one without records (RFC 2308 §5).
func timeToLive(m *dns.Msg) time.Duration {
	ttl := mostTTL
	for _, rr := range m.Answer {
		ttl = min(ttl, time.Duration(rr.Header().Ttl)*time.Second)
	}
	if len(m.Answer) == 0 {
		ttl = unknownTTL
		for _, rr := range m.Ns {
			if soa, ok := rr.(*dns.SOA); ok {
				ttl = min(mostTTL, time.Duration(min(soa.Minttl, soa.Hdr.Ttl))*time.Second)
			}
		}
	}
	return max(ttl, leastTTL)
}

// queryServers queries one server after the other. It returns the first usable answer: with records, or the statement that
// none exist.
func (r *resolver) queryServers(ctx context.Context, name string, kind uint16) (*dns.Msg, error) {
	servers := r.servers
	if len(servers) == 0 {
		c, err := dns.ClientConfigFromFile(resolvConf)
		if err != nil {
			return nil, err
		}
		for _, s := range c.Servers {
			at, ok := config.ServerAddress(s)
			if ok {
				servers = append(servers, at.String())
			}
		}
	}
	failed := fmt.Errorf("%s names no DNS server", resolvConf)
	for _, server := range servers {
		answer, err := query(ctx, server, name, kind)
		if err == nil {
			return answer, nil
		}
		failed = fmt.Errorf("DNS server %s: %s %s: %w", server, dns.TypeToString[kind], strings.TrimSuffix(name, "."), err)
	}
	return nil, failed
}

func query(ctx context.Context, server, name string, kind uint16) (*dns.Msg, error) {
	m := new(dns.Msg).SetQuestion(name, kind)
	m.SetEdns0(1232, false)
	client := &dns.Client{Timeout: dnsTimeout}
	answer, _, err := client.ExchangeContext(ctx, m, server)
	if err == nil && answer.Truncated {
		client.Net = "tcp"
		answer, _, err = client.ExchangeContext(ctx, m, server)
	}
	switch {
	case err != nil:
		return nil, err
	case answer.Truncated:
		return nil, errors.New("the answer is cut off")
	case answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError:
		return nil, fmt.Errorf("it answers %s", dns.RcodeToString[answer.Rcode])
	}
	return answer, nil
}
