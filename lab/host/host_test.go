// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

var anySource netip.AddrPort

func TestExchanges(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	web, err := host.ServeWeb(l.Node("s1"), "s1", "10.0.2.2:80", "[fd00:2::2]:80")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Stop()
	names, err := host.ServeDNS(l.Node("s1"), "s1", "[::]:53")
	if err != nil {
		t.Fatal(err)
	}
	defer names.Stop()
	datagrams, err := host.ServeDatagrams(l.Node("s1"), "s1", "10.0.2.2:514")
	if err != nil {
		t.Fatal(err)
	}
	defer datagrams.Stop()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, tc := range []struct {
		name           string
		ask            host.Ask
		source, target string
	}{
		{"web IPv4", host.AskWeb, "10.64.1.2:2345", "10.0.2.2:80"},
		{"web IPv6", host.AskWeb, "[fd00:64::7]:2345", "[fd00:2::2]:80"},
		{"dns IPv4", host.AskDNS, "10.64.1.2:2345", "10.0.2.2:53"},
		{"dns IPv6", host.AskDNS, "[fd00:64::7]:2345", "[fd00:2::2]:53"},
		{"datagram", host.AskDatagram, "10.64.1.2:2345", "10.0.2.2:514"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := tc.ask(ctx, l.Node("client"), netip.MustParseAddrPort(tc.source), netip.MustParseAddrPort(tc.target))
			if err != nil {
				t.Fatal(err)
			}
			if a.Name != "s1" || a.Client != tc.source {
				t.Errorf("got %q, want s1 and the client %s", a, tc.source)
			}
		})
	}
}

func TestLoadCountsAnswersAndFailures(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	web, err := host.ServeWeb(l.Node("s1"), "s1", "10.0.2.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Stop()
	load := host.Load{
		From: l.Node("client"), Target: netip.MustParseAddrPort("10.0.2.2:80"), Ask: host.AskWeb,
		Sources: netip.MustParsePrefix("10.64.7.0/24"), Count: 300, Timeout: time.Minute,
	}
	tally := load.Run(t.Context())
	if tally.Good() != 300 || tally.Servers()["s1"] != 300 || len(tally.Failures) != 0 {
		t.Fatalf("answers %v, failures %v: want 300 from s1", tally.Servers(), tally.Causes())
	}
	clients := tally.Clients()
	if len(clients) != 254 || clients["10.64.7.1"] != 2 || clients["10.64.7.254"] != 1 {
		t.Errorf("%d client addresses, .1 %d times, .254 %d times: want 254, 2, 1",
			len(clients), clients["10.64.7.1"], clients["10.64.7.254"])
	}
	if tally.Wanderers() != 0 || tally.Spread() != "s1 100 %" {
		t.Errorf("%d clients met several servers, spread %q: there is only s1", tally.Wanderers(), tally.Spread())
	}
	if web.Requests() != 300 {
		t.Errorf("the server counted %d requests", web.Requests())
	}

	web.SetStatus(503)
	load.Count = 5
	if c := load.Run(t.Context()).Causes(); c["status 503 Service Unavailable"] != 5 {
		t.Errorf("causes %v, want 5 × 503", c)
	}
	if err := web.Stop(); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	tally = load.Run(t.Context())
	if c := tally.Causes(); c["connection refused"] != 5 {
		t.Errorf("causes %v, want 5 × connection refused", c)
	}
	if got := len(tally.FailuresOutside(stopped, time.Now())); got != 0 {
		t.Errorf("%d failures outside the time they happened in", got)
	}
	if got := len(tally.FailuresOutside(stopped.Add(-time.Hour), stopped)); got != 5 {
		t.Errorf("%d failures outside another time, want 5", got)
	}
	if err := web.Start(); err != nil {
		t.Fatal(err)
	}
	web.SetStatus(200)
	if got := load.Run(t.Context()).Good(); got != 5 {
		t.Errorf("%d answers after the server came back, want 5", got)
	}
}

func TestStopEndsOpenConnections(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	lines, err := host.ServeLines(l.Node("s1"), "s1", "10.0.2.2:7")
	if err != nil {
		t.Fatal(err)
	}
	line, err := host.DialLine(t.Context(), l.Node("client"), anySource, netip.MustParseAddrPort("10.0.2.2:7"))
	if err != nil {
		t.Fatal(err)
	}
	defer line.Close()
	for range 3 {
		if a, err := line.Ask(time.Minute); err != nil || a.Name != "s1" {
			t.Fatalf("got %v, %v", a, err)
		}
	}
	if lines.Lines() != 3 {
		t.Errorf("the server counted %d lines, want 3", lines.Lines())
	}
	if err := lines.Stop(); err != nil {
		t.Fatal(err)
	}
	if a, err := line.Ask(time.Minute); err == nil {
		t.Errorf("a stopped server answered %v", a)
	}
}

func TestFTPModes(t *testing.T) {
	l := labtest.New(t, lab.Balancer())
	for family, target := range map[string]string{"IPv4": "10.0.2.2:21", "IPv6": "[fd00:2::2]:21"} {
		server, err := host.ServeFTP(l.Node("s1"), "files", target)
		if err != nil {
			t.Fatal(err)
		}
		defer server.Stop()
		for _, mode := range []host.FTPMode{host.Passive, host.ExtendedPassive, host.Active, host.ExtendedActive} {
			t.Run(family+" "+string(mode), func(t *testing.T) {
				r, err := host.FetchFTP(t.Context(), l.Node("client"), anySource, netip.MustParseAddrPort(target), mode)
				if family == "IPv6" && (mode == host.Passive || mode == host.Active) {
					if err == nil || !strings.Contains(err.Error(), "no room for an IPv6 address") {
						t.Errorf("got %v, want a refusal", err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if r.Name != "files" {
					t.Errorf("got %v", r)
				}
			})
		}
	}
}
