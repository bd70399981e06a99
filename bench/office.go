// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/lab"
	sluiced "github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/program"
)

// Addresses of the office, see [lab.Office].
var (
	officePublic  = netip.MustParseAddr("211.155.226.121")
	officeWeb     = netip.MustParseAddr("10.1.10.2")
	officeFTP     = netip.MustParseAddr("10.1.10.3")
	officeOutside = netip.MustParseAddr("203.0.113.10")
)

// officeNetwork is the network of the suite router. The client is the node pc, which is all DHCP clients too; the server is
// the node outside.
type officeNetwork struct {
	network
	t        *Trial
	web, ftp *lab.Node
	programs []int // Process ids on the router.
	sluice   int   // Process id of the daemon, 0 without.
}

func newOffice(t *Trial) (*officeNetwork, error) {
	topology := lab.Office()
	for i := range topology.Nodes {
		if topology.Nodes[i].Name == "pc" {
			topology.Nodes[i].Owns = program.LeasedPrefixes
		}
	}
	l, err := lab.Up(t, topology)
	if err != nil {
		return nil, err
	}
	t.Cleanup(l.Down)
	return &officeNetwork{network: network{l, l.Node("pc"), l.Node("gateway"), l.Node("outside")}, t: t, web: l.Node("web"), ftp: l.Node("ftp")}, nil
}

// measure sets up the router, sends the load and reports.
func (o *officeNetwork) measure(r router) error {
	out, web, ftp := officeOutside, officePublic, officePublic
	switch r.by {
	case "fullnat", "":
		// Without NAT the hosts outside know the way to the office.
		if err := command(o.t, o.server, "", "ip", "route", "add", "10.1.10.0/24", "via", officePublic.String()); err != nil {
			return err
		}
		web, ftp = officeWeb, officeFTP
		if r.by == "fullnat" {
			out = vip4
		}
	}
	if err := o.translate(r); err != nil {
		return err
	}
	if r.services {
		if err := o.startPrograms(); err != nil {
			return err
		}
	}
	if err := o.startServers(); err != nil {
		return err
	}
	if o.t.Point.Value > 0 {
		for _, iface := range []string{"wan0", "lan0"} {
			err := command(o.t, o.gateway, "", "tc", "qdisc", "add", "dev", iface, "root", "tbf", "rate", strconv.Itoa(o.t.Point.Value)+"bit", "burst", "64kb", "latency", "20ms")
			if err != nil {
				return err
			}
		}
	}
	if r.by == "iptables" || r.by == "sluice" { // the helper opens the data connection
		if _, err := host.FetchFTP(o.t, o.server, netip.AddrPortFrom(officeOutside, 0), netip.AddrPortFrom(ftp, 21), host.Passive); err != nil {
			return fmt.Errorf("the published FTP server: %w", err)
		}
	}
	held, err := o.openConnections(out, web, ftp)
	defer held.close()
	if err != nil {
		return err
	}
	if err := o.stream(out, held, r.services); err != nil {
		return err
	}
	return o.reportMemory()
}

// translate installs the row's rules.
func (o *officeNetwork) translate(r router) error {
	switch r.by {
	case "":
		return nil
	case "iptables":
		return command(o.t, o.gateway, r.iptablesRules(), "iptables-legacy-restore")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	d, err := sluiced.Start(o.t, o.gateway, self, "router.yaml", []byte(r.sluiceConfig()))
	if err != nil {
		return err
	}
	o.t.Cleanup(d.Stop)
	o.sluice = d.PID()
	o.programs = append(o.programs, o.sluice)
	return o.waitIdle()
}

// waitIdle waits until the daemon is idle: after its rules are in force it loads programs for later changes. The wait
// is bounded, because a busy machine delays that work.
func (o *officeNetwork) waitIdle() error {
	before, err := processTime(o.sluice)
	for range 50 {
		if err != nil {
			return err
		}
		if err := wait(o.t, 200); err != nil {
			return err
		}
		var now float64
		if now, err = processTime(o.sluice); now == before {
			return err
		}
		before = now
	}
	o.t.Note("%s: the daemon was not idle after 10 s: its CPU time is included", o.t.Point.Name)
	return nil
}

// processTime returns the CPU time of a process in seconds, in steps of a clock tick.
func processTime(pid int) (float64, error) {
	_, fields := readStat(fmt.Sprintf("/proc/%d/stat", pid))
	if len(fields) < 13 {
		return 0, fmt.Errorf("process %d: no CPU time", pid)
	}
	user, errUser := strconv.ParseFloat(fields[11], 64)
	system, errSystem := strconv.ParseFloat(fields[12], 64)
	return (user + system) / clockTicks, errors.Join(errUser, errSystem)
}

// startPrograms runs dnsmasq and OpenVPN on the router, and a client of the VPN outside.
func (o *officeNetwork) startPrograms() error {
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return err
	}
	o.t.Cleanup(func() error { return os.RemoveAll(dir) })
	for _, start := range []func() (*program.Program, error){
		func() (*program.Program, error) { return program.StartDnsmasq(o.t, o.gateway, dir) },
		func() (*program.Program, error) { return program.StartOpenVPNServer(o.t, o.gateway, dir) },
	} {
		p, err := start()
		if err != nil {
			return err
		}
		o.t.Cleanup(p.Stop)
		o.programs = append(o.programs, p.PID())
	}
	client, err := program.StartOpenVPNClient(o.t, o.server, dir)
	if err != nil {
		return err
	}
	o.t.Cleanup(client.Stop)
	return nil
}

// startServers starts the web servers, the FTP server and the receivers of iperf3.
func (o *officeNetwork) startServers() error {
	for _, n := range []*lab.Node{o.server, o.web} {
		if _, err := startWebOn(o.t, &o.network, n); err != nil {
			return err
		}
		if _, err := daemon(o.t, n, nil, "iperf3", "-s"); err != nil {
			return err
		}
		if err := o.waitFor(o.t, n, "127.0.0.1:5201"); err != nil {
			return err
		}
	}
	ftp, err := host.ServeFTP(o.ftp, "ftp", netip.AddrPortFrom(officeFTP, 21).String())
	if err != nil {
		return err
	}
	o.t.Cleanup(ftp.Stop)
	return nil
}

// stream measures one TCP stream while the held connections, and the services if the row has them, are in use.
func (o *officeNetwork) stream(dest netip.Addr, held heldList, services bool) error {
	group, ctx := errgroup.WithContext(o.t)
	during, end := context.WithCancel(ctx) // ends with the stream
	defer end()
	group.Go(func() error { return held.sendRequests(during) })
	var vpn float64
	var leases *dhcpLoad
	if services {
		var err error
		if leases, err = o.lease(ctx); err != nil {
			return err
		}
		defer leases.clients.Close()
		group.Go(func() error { return leases.renew(during) })
		group.Go(func() (err error) {
			vpn, err = o.receiveByVPN(ctx)
			return err
		})
	}
	var bps float64
	before, started := readLoad(), time.Now()
	group.Go(func() (err error) {
		defer end()
		bps, err = o.measureStream(o.t, dest)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	used, seconds := readLoad().total-before.total, time.Since(started).Seconds()
	total := bps + vpn
	o.t.Report("throughput", total/1e6)
	if o.t.Point.Value > 0 {
		o.t.Report("share of line", 100*total/lineRate)
	}
	o.t.Report("CPU", used*1e3/(total*math.Ceil(o.t.Seconds)/1e9))
	if services {
		o.t.Report("VPN", vpn/1e6)
		o.t.Report("DHCP", float64(leases.renewed.Load())/seconds)
	}
	return nil
}

// measureStream sends one TCP stream and returns the bits a second that were received.
func (n *network) measureStream(t *Trial, dest netip.Addr) (float64, error) {
	cmd := n.client.Command(t, "iperf3", "-J", "-c", dest.String(), "-t", fmt.Sprint(math.Ceil(t.Seconds)))
	var r iperfResult
	err := t.withProfile("iperf3", func() error { return r.run(cmd) })
	return r.End.Received.BPS, err
}

// receiveByVPN returns the bits a second that a client of the VPN receives from the office's web server.
func (o *officeNetwork) receiveByVPN(ctx context.Context) (float64, error) {
	cmd := o.server.Command(ctx, "iperf3", "-J", "-c", officeWeb.String(), "-u", "-R", "-b", strconv.Itoa(vpnRate), "-l", "1200", "-t", fmt.Sprint(math.Ceil(o.t.Seconds)))
	var r iperfResult
	if err := r.run(cmd); err != nil {
		return 0, fmt.Errorf("through the VPN: %w", err)
	}
	got := r.End.Sum.BPS * (1 - r.End.Sum.LostPercent/100)
	if got == 0 {
		return 0, errors.New("through the VPN: nothing arrived")
	}
	return got, nil
}

// iperfResult is the part of iperf3's JSON that is used: Received of a TCP stream, Sum of UDP.
type iperfResult struct {
	End struct {
		Received struct {
			BPS float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct {
			BPS         float64 `json:"bits_per_second"`
			LostPercent float64 `json:"lost_percent"`
		} `json:"sum"`
	} `json:"end"`
}

func (r *iperfResult) run(cmd *exec.Cmd) error {
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("iperf3: %w: %.200s", err, out)
	}
	if err := json.Unmarshal(out, r); err != nil {
		return fmt.Errorf("iperf3: %w", err)
	}
	return nil
}

// reportMemory reports the memory that the gateway uses for the connections, and its programs.
func (o *officeNetwork) reportMemory() error {
	connections, err := o.connectionMemory(o.sluice)
	if err != nil {
		o.t.Note("no memory: %v", err)
		return nil
	}
	o.t.Report("memory of connections", float64(connections)/1e3)
	var resident uint64
	for _, pid := range o.programs {
		pss, err := proportionalSize(pid)
		if err != nil {
			return err
		}
		resident += pss
	}
	o.t.Report("memory of programs", float64(resident)/1e3)
	return nil
}
