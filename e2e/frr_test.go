// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// frrDirectory has the daemons of Debian's package, which are not in $PATH.
const frrDirectory = "/usr/lib/frr"

// TestFRR exports the announced addresses of one gateway with FRR. The router learns and forgets them, and kill
// -9 of the daemon changes nothing.
func TestFRR(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("bird"), labtest.Tool("birdc"), labtest.Tool(filepath.Join(frrDirectory, "bgpd")))
	c := &cluster{t: t, lab: labtest.New(t, clusterTopology())}
	serveWeb(t, c.lab, "s1 s1 10.0.2.2:8080", "s2 s2 10.0.2.3:8080")
	serveDatagrams(t, c.lab, "s1 s1 192.0.2.30:53", "s2 s2 192.0.2.30:53")
	c.router = startBird(t, c.lab.Node("router"), clusterRouter)
	config, err := os.ReadFile("../examples/frr.conf")
	if err != nil {
		t.Fatal(err)
	}
	n1 := c.lab.Node("n1")
	startFRR(t, n1, strings.Replace(string(config), "bfd 5 100 100", "bfd 20 500 500", 1))
	d := start(t, n1, strings.Replace(example(t, "cluster.yaml"), "announce: {}", "announce: {table: 100}", 1))
	c.hops("192.0.2.30", "n1")
	if got := c.router.ask("show route all for 192.0.2.30"); !strings.Contains(got, "BGP.med: 10\n") {
		t.Errorf("the metric is not the MED:\n%s", got)
	}
	flows := sendNumbered(t, c.lab.Node("client"), "192.0.2.30:53", 10)
	flows.progress()
	updates := c.router.updates()
	if err := d.Kill(); err != nil {
		t.Fatal(err)
	}
	flows.progress()
	if err := d.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	flows.progress()
	if lost := flows.finish(); lost > 0 {
		t.Errorf("%d of %d datagrams are lost", lost, flows.sent.Load())
	}
	if now := c.router.updates(); now != updates {
		t.Errorf("updates at the router:\nbefore %s\n after %s", updates, now)
	}
	ip(t, n1, "link set lan0 down")
	c.hops("192.0.2.30", "")
	ip(t, n1, "link set lan0 up")
	c.hops("192.0.2.30", "n1")
	output(t, d, "stop")
	c.hops("192.0.2.30", "")
}

// startFRR runs zebra, bfdd and bgpd until the end of the test.
func startFRR(t *testing.T, n *lab.Node, config string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "frr") // short: the kernel limits the paths of sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, "frr.conf")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	frr, err := user.Lookup("frr")
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(frr.Uid)
	gid, _ := strconv.Atoi(frr.Gid)
	for _, path := range []string{dir, file} {
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, program := range []string{"zebra", "bfdd", "bgpd"} {
		args := []string{"-f", file, "-i", at(program + ".pid"), "-z", at("zserv"), "--vty_socket", dir, "-P", "0", "--log", "file:" + at(program+".log")}
		if program == "bfdd" {
			args = append(args, "--bfdctl", at("bfdctl"))
		}
		cmd := n.Command(t.Context(), filepath.Join(frrDirectory, program), args...)
		var said strings.Builder
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { endFRR(t, cmd, program, at(program+".log"), &said) })
		if program == "zebra" { // the others give up if its socket is missing for some time
			labtest.Eventually(t, patience, "zebra", func() error { _, err := os.Stat(at("zserv")); return err })
		}
	}
}

func endFRR(t *testing.T, cmd *exec.Cmd, program, log string, said *strings.Builder) {
	_ = cmd.Process.Signal(os.Interrupt)
	kill := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	kill.Stop()
	if text, _ := os.ReadFile(log); t.Failed() {
		t.Logf("%s:\n%s%s", program, said.String(), text)
	}
}
