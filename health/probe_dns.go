// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"strings"

	"github.com/miekg/dns"

	"github.com/sluice-lb/sluice/flow"
)

// dnsProber sends a query to a name server, over TCP for a TCP service. Every answer with the code NOERROR is good,
// even an empty one.
type dnsProber struct{ dial Dial }

// Probe implements Prober.
func (p dnsProber) Probe(ctx context.Context, t *Target) error {
	question := new(dns.Msg)
	question.SetQuestion(dns.Fqdn(t.Check.Query), dns.StringToType[strings.ToUpper(t.Check.QueryType)])
	network := "udp"
	if t.Protocol == flow.TCP {
		network = "tcp"
	}
	conn, err := p.dial(ctx, network, t.AddrPort().String(), t.Mark)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer applyDeadline(ctx, conn)()
	c := &dns.Conn{Conn: conn}
	if err := c.WriteMsg(question); err != nil {
		return err
	}
	for {
		answer, err := c.ReadMsg()
		switch {
		case err != nil:
			return err
		case answer.Id != question.Id || !answer.Response:
			continue // an answer to another query, or a late one
		case answer.Rcode != dns.RcodeSuccess:
			return fmt.Errorf("answered %s", dns.RcodeToString[answer.Rcode])
		}
		return nil
	}
}
