// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/flow"
)

// socketChecks look at programs on the host itself: proxies, load balancers.
func socketChecks() []Check {
	return []Check{
		{ID: "LS01", Name: "accept-queue", About: "connections that a program did not accept in time", Weight: 96, Run: checkAcceptQueue,
			Symptom: "connects take 1 or 3 s although connection tracking drops nothing; no drop event shows it",
			Remedy:  Remedy{Do: "raise the program's listen backlog and net.core.somaxconn; give the program more workers", Cost: "memory for each waiting connection", Risk: "clients of a program that is too slow wait instead of being refused"}},
		{ID: "LS02", Name: "syn-cookies", About: "SYN queues that overflowed", Weight: 43, Run: checkSYNQueue,
			Symptom: "TCP options are lost, or SYNs",
			Remedy:  Remedy{Do: "look for a SYN flood; else raise the program's listen backlog and net.core.somaxconn", Cost: "memory for each half-open connection", Risk: "syncookies are for floods, not for want of capacity"}},
		{ID: "LS03", Name: "open-files", About: "open files against fs.file-max, and of each process against its limit", Host: true, Weight: 39, Run: checkFiles,
			Symptom: "programs report \"too many open files\"",
			Remedy:  Remedy{Do: "raise fs.file-max, and LimitNOFILE of the service", Cost: "memory for each open file", Risk: "a leak of file descriptors is noticed later"}},
		{ID: "LS04", Name: "tcp-memory", About: "memory of sockets against tcp_mem", Weight: 34, Run: checkTCPMemory,
			Symptom: "windows shrink, connections are aborted",
			Remedy:  Remedy{Do: "raise net.ipv4.tcp_mem, or find the program that does not read", Cost: "memory", Risk: "sockets may take memory that programs need"}},
		{ID: "LS05", Name: "udp-receive-buffer", About: "datagrams dropped because a socket's receive buffer was full", Weight: 41, Run: checkUDPBuffer,
			Symptom: "DNS and QUIC lose packets",
			Remedy:  Remedy{Do: "raise net.core.rmem_max and the program's receive buffer", Cost: "memory for each socket", Risk: "datagrams wait longer in a longer queue"}},
	}
}

func checkAcceptQueue(_ context.Context, c *Case) Finding {
	// ListenDrops also counts half-open connections that ICMP errors or a full SYN queue ended.
	n := c.delta("TcpExt.ListenOverflows")
	if n == 0 {
		return ok("programs accept in time")
	}
	// netdata: 1 and 5 a second.
	somaxconn, _ := c.sysctl("net.core.somaxconn")
	return found(grade(c.perSecond(n), 1, 5), "a program's accept queue was full: %d connections were refused in %.1f s (somaxconn %d)", n, c.Window.Seconds(), somaxconn).
		with("ΔListenOverflows", c.inWindow(c.delta("TcpExt.ListenOverflows")), fromSNMP).losing(c.perSecond(n))
}

func checkSYNQueue(_ context.Context, c *Case) Finding {
	n := c.delta("TcpExt.TCPReqQFullDoCookies") + c.delta("TcpExt.TCPReqQFullDrop")
	f := found(grade(c.perSecond(n), 1, 1e9), "%d SYNs met a full queue", n).with("ΔTCPReqQFull", c.inWindow(n), fromSNMP)
	if cookies, there := c.sysctl("net.ipv4.tcp_syncookies"); there && cookies == 0 && f.Verdict >= Warn { // else nothing asks for tcp_max_syn_backlog
		f.Remedy = &Remedy{Do: "answer by SYN cookies, or raise net.ipv4.tcp_max_syn_backlog with the program's listen backlog", Commands: []string{"sysctl -w net.ipv4.tcp_syncookies=1"},
			Cost: "memory for each half-open connection", Risk: "a connection that began with a cookie may lack TCP options"}
	}
	return f
}

func checkFiles(_ context.Context, c *Case) Finding {
	f := strings.Fields(c.After.Sysctl["fs.file-nr"])
	if len(f) != 3 {
		return unknown("fs.file-nr is not readable")
	}
	open, err1 := strconv.ParseFloat(f[0], 64)
	limit, err2 := strconv.ParseFloat(f[2], 64)
	if err1 != nil || err2 != nil || limit == 0 {
		return unknown("fs.file-nr is %q", strings.Join(f, " "))
	}
	host := found(grade(open/limit, 0.70, 0.90), "%.0f open files", open).with("open / fs.file-max", f[0]+" / "+f[2], fromSysctl)
	if p := c.After.Files; p.Limit > 0 {
		host = host.with("nearest to its limit: "+p.Name, fmt.Sprintf("%d / %d", p.Open, p.Limit), fmt.Sprintf("/proc/%d", p.PID))
		if float64(p.Open) > 0.95*float64(p.Limit) && host.Verdict < Warn {
			host.Verdict = Warn
			host.Summary = fmt.Sprintf("%s (process %d) has %d of its %d files open", p.Name, p.PID, p.Open, p.Limit)
			raised := fmt.Sprint(4 * p.Limit)
			if p.Hard >= 4*p.Limit {
				raised += ":" // the soft limit alone: the other one would be lowered
			}
			commands := []string{fmt.Sprintf("prlimit --pid %d --nofile=%s", p.PID, raised)}
			if most, there := observe.Number(c.After.Sysctl, "fs.nr_open"); there && 4*p.Limit > uint64(most) { // proc_sys_fs(5): no limit may be above it
				commands = append([]string{fmt.Sprintf("sysctl -w fs.nr_open=%d", 4*p.Limit)}, commands...)
			}
			host.Remedy = &Remedy{Do: "raise the limit of the process, and LimitNOFILE of its service", Commands: commands,
				Cost: "memory for each open file", Risk: "a leak of file descriptors is noticed later"}
		}
	}
	return host
}

func checkTCPMemory(_ context.Context, c *Case) Finding {
	limits := strings.Fields(c.After.Sysctl["net.ipv4.tcp_mem"])
	pages, there := c.NS.After.Sockstat["TCP.mem"]
	if len(limits) != 3 || !there {
		return unknown("net.ipv4.tcp_mem or /proc/net/sockstat is not readable")
	}
	pressure, err1 := strconv.ParseFloat(limits[1], 64)
	high, err2 := strconv.ParseFloat(limits[2], 64)
	if err1 != nil || err2 != nil {
		return unknown("net.ipv4.tcp_mem is %q", strings.Join(limits, " "))
	}
	f := found(grade(float64(pages), pressure, 0.9*high), "TCP uses %d pages", pages).
		with("pages / pressure / high", fmt.Sprintf("%d / %s / %s", pages, limits[1], limits[2]), "/proc/net/sockstat")
	orphans := c.NS.After.Sockstat["TCP.orphan"]
	if limit, there := observe.Number(c.After.Sysctl, "net.ipv4.tcp_max_orphans"); there && limit > 0 {
		if v := grade(float64(orphans)/float64(limit), 0.25, 0.50); v > f.Verdict {
			f.Verdict = v
			f.Summary += fmt.Sprintf(", %d orphans of %d", orphans, limit)
		}
	}
	return f
}

func checkUDPBuffer(_ context.Context, c *Case) Finding {
	n := c.delta("Udp.RcvbufErrors") + c.delta("Udp6RcvbufErrors")
	if len(c.NS.Lossy) == 0 {
		if n == 0 {
			return ok("no receive buffer was full")
		}
		return found(grade(c.perSecond(n), 10, 1000), "%d datagrams found a full receive buffer", n).with("ΔRcvbufErrors", c.inWindow(n), fromSNMP).losing(c.perSecond(n))
	}
	s := c.NS.Lossy[0]
	what := fmt.Sprintf("%s port %d", strings.ToUpper(s.Protocol.String()), s.Local.Port())
	if s.Raw {
		what = "a raw socket for " + s.Protocol.String()
	}
	f := found(max(Info, grade(c.perSecond(s.Drops), 1, 1000)), "the receive queue of %s is full, %s: %d datagrams were dropped", what, s.Program, s.Drops).
		with("drops of the socket", c.inWindow(s.Drops), "/proc/net/udp and raw").with("bytes in its queue", fmt.Sprint(s.Waiting), "/proc/net/udp and raw").losing(c.perSecond(s.Drops))
	if n > 0 {
		f = f.with("ΔRcvbufErrors", c.inWindow(n), fromSNMP)
	}
	for _, other := range c.NS.Lossy[1:min(len(c.NS.Lossy), 4)] {
		f = f.with("another socket", fmt.Sprintf("%s %s, %s", other.Protocol, other.Local, other.Program), "/proc/net/udp and raw")
	}
	f = f.concerning(Concerns{Protocols: []flow.Protocol{s.Protocol}})
	if s.Local.Port() > 0 {
		f = f.concerning(Concerns{Protocols: []flow.Protocol{s.Protocol}, Ports: []uint16{s.Local.Port()}})
	}
	f.Remedy = &Remedy{Do: "look at the program: it has hung or is too slow; a larger buffer only helps against bursts", Cost: "none: it only looks",
		Commands: []string{fmt.Sprintf("ss -lunpm 'sport = :%d'", s.Local.Port())}}
	if s.Raw {
		f.Remedy.Commands = []string{"ss -wnpm"}
	}
	return f
}
