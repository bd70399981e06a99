// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/lab/host"
)

// The addresses of the office, see lab.Office and examples/router.yaml.
var (
	officePublic  = netip.MustParseAddr("211.155.226.121")
	outsideServer = netip.MustParseAddrPort("203.0.113.10:80")
	friends       = netip.MustParsePrefix("203.0.113.0/24")
	banned        = netip.MustParsePrefix("198.51.100.0/24")
)

// playRouter shows the office router: outgoing, incoming and hairpin connections, FTP, the deny list, the log.
func playRouter(ctx context.Context, s *stage) error {
	all, err := s.serveOffice()
	defer func() { all.stop() }()
	if err != nil {
		return err
	}
	kernelLog := s.openKernelLog(ctx)
	defer kernelLog.Close()
	gw, err := s.start(ctx, "gateway", "router.yaml", nil)
	if err != nil || gw == nil {
		return err
	}
	start := time.Now()
	s.passRouter(ctx)
	s.fetchFiles(ctx)
	s.tryBanned(ctx)
	s.readKernelLog(kernelLog, time.Since(start))
	if err := ctx.Err(); err != nil {
		return err
	}
	return gw.Stop()
}

// serveOffice starts the servers of the office and the one outside.
func (s *stage) serveOffice() (all servers, err error) {
	for _, b := range []struct{ node, name, addr string }{{"web", "web", "10.1.10.2:80"}, {"outside", "internet", outsideServer.String()}} {
		server, err := host.ServeWeb(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return all, err
		}
		all = append(all, server)
	}
	ftp, err := host.ServeFTP(s.lab.Node("ftp"), "ftp", "10.1.10.3:21")
	if err != nil {
		return all, err
	}
	return append(all, ftp), nil
}

// passRouter sends requests out, in, and from inside to the public address.
func (s *stage) passRouter(ctx context.Context) {
	public := netip.AddrPortFrom(officePublic, 80)
	t := s.run(ctx, host.Load{From: s.lab.Node("pc"), Target: outsideServer, Ask: host.AskWeb, Count: 1000})
	s.recordPromise(len(t.Failures) == 0 && t.Clients()[officePublic.String()] == t.Sent(), "the office is seen as its public address",
		"%d of %d requests came from %s%s", t.Clients()[officePublic.String()], t.Sent(), officePublic, causes(t.Failures))

	t = s.run(ctx, host.Load{From: s.lab.Node("outside"), Target: public, Ask: host.AskWeb, Sources: friends, Count: 1000})
	s.recordPromise(len(t.Failures) == 0 && len(t.Clients()) == 254, "the published web server is reached from outside",
		"%d of %d answered%s, %d clients seen", t.Good(), t.Sent(), causes(t.Failures), len(t.Clients()))

	t = s.run(ctx, host.Load{From: s.lab.Node("pc"), Target: public, Ask: host.AskWeb, Count: 300})
	s.recordPromise(len(t.Failures) == 0 && t.Servers()["web"] == t.Sent(), "and from inside by the same address (hairpin)",
		"%d of %d answered%s", t.Good(), t.Sent(), causes(t.Failures))
}

// fetchFiles downloads from the published FTP server through the helper.
func (s *stage) fetchFiles(ctx context.Context) {
	source := netip.MustParseAddrPort("203.0.113.10:0")
	for _, mode := range []host.FTPMode{host.Passive, host.ExtendedPassive, host.Active, host.ExtendedActive} {
		r, err := host.FetchFTP(ctx, s.lab.Node("outside"), source, netip.AddrPortFrom(officePublic, 21), mode)
		promise := fmt.Sprintf("FTP %s passes the helper", mode)
		switch {
		case err != nil:
			s.report.Unanswered++
			s.recordPromise(false, promise, "%v", err)
		default:
			s.report.Exchanges++
			s.recordPromise(true, promise, "data connection to %s", r.Announced)
		}
	}
}

// tryBanned sends requests from addresses on the deny list. No answer is the expected result, so these do not count
// as failures.
func (s *stage) tryBanned(ctx context.Context) {
	t := host.Load{
		From: s.lab.Node("outside"), Target: netip.AddrPortFrom(officePublic, 80), Ask: host.AskWeb,
		Sources: banned, Count: 50, Parallel: 50, Timeout: 500 * time.Millisecond,
	}.Run(ctx)
	s.recordPromise(t.Good() == 0 && t.Sent() == 50, "the deny list drops all banned clients", "%d of %d got an answer", t.Good(), t.Sent())
}
