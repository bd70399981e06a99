// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// TestReloadsLoseNothing takes a backend out and in again while clients connect
// without pause: its last connections end, and no connection fails.
func TestReloadsLoseNothing(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	type result struct {
		made int
		err  error
	}
	done := make(chan result)
	go func() {
		r := result{}
		for ctx.Err() == nil && r.err == nil {
			if _, r.err = b.tcp("client", "", virtual["ipv4"]); r.err == nil {
				r.made++
			}
		}
		done <- r
	}()
	for i := range 20 {
		s := b.snapshot(c)
		if i%2 == 0 {
			s.Services[0].State[1], s.Services[0].State[4] = datapath.Drain, datapath.Drain
		}
		b.applySnapshot(s)
	}
	stop()
	if r := <-done; r.err != nil || r.made == 0 {
		t.Errorf("%d connections, then %v", r.made, r.err)
	}
}

// TestRestartIsSeamless closes the datapath without removing anything, as a
// process that is killed does, and adopts the rules with another.
func TestRestartIsSeamless(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeFullNAT, config.SchedulerMaglev))
	oneFamily(&c.Services[0], "ipv4")
	b.apply(c)
	conn, err := b.dial("tcp", "client", "", virtual["ipv4"])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := b.d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.tcp("client", "", virtual["ipv4"]); err != nil {
		t.Errorf("while no process runs: %v", err)
	}
	b.d = b.open()
	if change := b.applySnapshot(b.snapshot(c)); !change.Empty() {
		t.Errorf("adoption changed %+v", change)
	}
	if _, err := fmt.Fprintln(conn, "still there?"); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(conn)
	_, _ = r.ReadString('\n')
	if line, err := r.ReadString('\n'); err != nil || line != "still there?\n" {
		t.Errorf("the old connection answers %q, %v", line, err)
	}
}

// TestFTPThroughTheHelper speaks passive FTP to a published server: the helper
// puts the public address into the server's answer and lets the data through.
func TestFTPThroughTheHelper(t *testing.T) {
	b := newBench(t, lab.Office())
	l := listen("211.155.226.121", "21")
	b.apply(&config.Config{NAT: []config.NATRule{
		{Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", To: snatTo("211.155.226.121")},
		{Name: "ftp", Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.3"), Port: 21}, Helper: "ftp"},
	}})
	b.ftpServer("ftp", "10.1.10.3")
	control, err := b.dial("tcp", "outside", "203.0.113.1", "211.155.226.121:21")
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	r := bufio.NewReader(control)
	if _, err := r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(control, "PASV\r\n")
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(line, "(211,155,226,121,") {
		t.Fatalf("the helper left %q", line)
	}
	var n [6]int
	if _, err := fmt.Sscanf(line[strings.Index(line, "("):], "(%d,%d,%d,%d,%d,%d)", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5]); err != nil {
		t.Fatal(err)
	}
	data, err := b.dial("tcp", "outside", "203.0.113.1", fmt.Sprintf("211.155.226.121:%d", n[4]<<8|n[5]))
	if err != nil {
		t.Fatalf("data connection: %v", err)
	}
	defer data.Close()
	if text, err := bufio.NewReader(data).ReadString('\n'); text != "a file\n" {
		t.Errorf("data %q, %v", text, err)
	}
}

// ftpServer speaks as much FTP as the helper needs to see.
func (b *bench) ftpServer(node, address string) {
	b.Helper()
	control, err := b.lab.Node(node).Listen(address + ":21")
	if err != nil {
		b.Fatal(err)
	}
	data, err := b.lab.Node(node).Listen(address + ":40001")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { control.Close(); data.Close() })
	serve := func(l net.Listener, talk func(net.Conn)) {
		c, err := l.Accept()
		if err == nil {
			talk(c)
			c.Close()
		}
	}
	go serve(data, func(c net.Conn) { fmt.Fprint(c, "a file\n") })
	go serve(control, func(c net.Conn) {
		fmt.Fprint(c, "220 ready\r\n")
		r := bufio.NewReader(c)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if strings.HasPrefix(line, "PASV") {
				fmt.Fprintf(c, "227 Entering Passive Mode (%s,%d,%d)\r\n", strings.ReplaceAll(address, ".", ","), 40001>>8, 40001&255)
			}
		}
	})
}
