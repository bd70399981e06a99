// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// The links of the gateway, the same in every world. A host on a link has the hardware address
// 02:00:00:00:LINK:LAST, where LAST is the last byte of its address, from 2 to 19. The gateway's is 1.
var (
	linkNames  = []string{"wan", "lan", "dmz"}
	linkNumber = map[string]byte{"wan": 1, "lan": 2, "dmz": 3}
	networks   = map[string][]string{
		"wan": {"203.0.113.0/24", "2001:db8:1::/64", "fe80::/64"},
		"lan": {"10.0.2.0/24", "fd00:2::/64", "fe80::/64"},
		"dmz": {"10.0.3.0/24", "fd00:3::/64", "fe80::/64"},
	}
	addresses = map[string][]string{
		"wan": {"203.0.113.1/24", "2001:db8:1::1/64"},
		"lan": {"10.0.2.1/24", "fd00:2::1/64"},
		"dmz": {"10.0.3.1/24", "fd00:3::1/64"},
	}
)

func gatewayMAC(link string) packet.MAC { return packet.MAC{2, 0, 0, 0, linkNumber[link], 1} }

// topology is a gateway with three links. Their other ends are in one namespace. With xdp the links support XDP, which
// needs NAPI at both ends and complete checksums.
func topology(xdp bool) lab.Topology {
	t := lab.Topology{Name: "oracle", Nodes: []lab.NodeSpec{
		{Name: "gateway", Forward: true, Routes: []lab.Route{
			{To: "default", Via: "203.0.113.2"}, {To: "default6", Via: "2001:db8:1::2"},
			{To: "10.0.20.0/24", Via: "10.0.2.8"}, {To: "fd00:20::/64", Via: "fd00:2::8"},
		}, Sysctls: settings()},
		{Name: "far", Sysctls: map[string]string{"net.ipv6.conf.all.disable_ipv6": "1"}},
	}}
	for _, l := range linkNames {
		t.Links = append(t.Links, lab.LinkSpec{
			A: lab.End{Node: "gateway", Iface: l + "0", Addresses: addresses[l], MAC: gatewayMAC(l).String(), NoTxChecksum: xdp, GRO: xdp},
			B: lab.End{Node: "far", Iface: l, MAC: packet.MAC{2, 0, 0, 0, linkNumber[l], 0xee}.String(), NoTxChecksum: xdp, GRO: xdp},
		})
	}
	return t
}

// settings disable rate limits and timers of the kernel that would affect the comparison.
func settings() map[string]string {
	s := map[string]string{
		"net.ipv4.icmp_ratelimit": "0", "net.ipv4.icmp_ratemask": "0", "net.ipv6.icmp.ratelimit": "0",
		"net.ipv4.conf.all.send_redirects": "0",
	}
	for _, link := range linkNames {
		of := link + "0"
		s["net.ipv4.conf."+of+".send_redirects"] = "0"
		for _, family := range []string{"ipv4", "ipv6"} {
			n := "net." + family + ".neigh." + of + "."
			s[n+"base_reachable_time_ms"] = "86400000"
			s[n+"gc_stale_time"] = "86400"
			s[n+"retrans_time_ms"] = "100"
			s[n+"delay_first_probe_time"] = "1"
			s[n+"mcast_solicit"] = "3"
			s[n+"ucast_solicit"] = "3"
			s[n+"anycast_delay"] = "0"
			s[n+"proxy_delay"] = "0"
		}
	}
	return s
}

// world is a gateway in a lab, with one datapath.
type world struct {
	name     string // "nftables", "xdp" or "tc"
	lab      *lab.Lab
	gateway  *lab.Node
	far      *lab.Node
	datapath datapath.Datapath
	hook     config.Attach
	snapshot *datapath.Snapshot
	revision uint64
	polled   *netdev.Polled
	ip       *shell
	wire     *wire

	sockets map[string]*socket
	seen    map[string]frame // the last packet of each conversation
	last    map[string]frame // sent in each conversation
	sent    packet.Packet    // in this step
	talk    int              // number of the conversation of this step
	pieces  int              // the largest fragment of the next packet; 0: it is whole
	ports   map[string]int   // numbers of the ports that the datapath chose
	asked   map[string]time.Time
	failure error // of the last apply
}

type socket struct {
	fd int
	v6 bool
}

// newWorld builds a lab of one datapath. Nothing is configured.
func newWorld(t testing.TB, name string) *world {
	t.Helper()
	l, err := lab.Up(context.Background(), topology(name == "xdp"))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{name: name, lab: l, gateway: l.Node("gateway"), far: l.Node("far"), sockets: map[string]*socket{},
		seen: map[string]frame{}, ports: map[string]int{}, asked: map[string]time.Time{}}
	if err := w.open(t); err != nil {
		w.close(t)
		t.Fatalf("%s: %v", name, err)
	}
	return w
}

func (w *world) open(t testing.TB) error {
	pins := ""
	if w.name != "nftables" {
		w.hook = config.Attach(w.name)
		dir := t.TempDir()
		if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
		pins = filepath.Join(dir, "sluice")
	}
	err := w.gateway.Do(func() (err error) {
		if w.polled, err = netdev.OpenPolled(); err != nil {
			return err
		}
		if w.name == "nftables" {
			w.datapath, err = nft.Open()
			return err
		}
		w.datapath, err = ebpf.Open(ebpf.Options{Dir: pins, StateDir: filepath.Join(filepath.Dir(pins), "state"), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		return err
	})
	if err != nil {
		return err
	}
	err = w.far.Do(func() (err error) {
		links := map[string]int{}
		for _, name := range linkNames {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			links[name] = i.Index
		}
		w.wire, err = newWire(links)
		return err
	})
	if err != nil {
		return err
	}
	w.ip, err = newShell(w.gateway)
	return err
}

func (w *world) close(t testing.TB) {
	var errs []error
	for name := range w.sockets {
		w.closeSocket(name)
	}
	if w.datapath != nil {
		errs = append(errs, w.datapath.Remove(context.Background()), w.datapath.Close())
	}
	if w.ip != nil {
		errs = append(errs, w.ip.close())
	}
	if w.polled != nil {
		errs = append(errs, w.polled.Close())
	}
	if w.wire != nil {
		unix.Close(w.wire.fd)
	}
	errs = append(errs, w.lab.Down())
	if err := errors.Join(errs...); err != nil {
		t.Errorf("%s: %v", w.name, err)
	}
}

// configure puts a configuration in force.
func (w *world) configure(yaml string) error {
	c, err := config.Decode("oracle.yaml", []byte(yaml))
	if err != nil {
		return err
	}
	if w.hook != "" {
		c.Attach = w.hook
	}
	w.revision++
	s := &datapath.Snapshot{Revision: w.revision, Config: c}
	for i := range c.Services {
		if err := w.datapath.CarriesService(&c.Services[i]); err != nil {
			return fmt.Errorf("service %s: %w", c.Services[i].Name, err)
		}
		s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: make([]datapath.State, len(c.Services[i].Backends))})
	}
	for i := range c.NAT {
		if err := w.datapath.CarriesNAT(&c.NAT[i]); err != nil {
			return fmt.Errorf("nat %s: %w", c.NAT[i].Name, err)
		}
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	w.snapshot = s
	return w.follow(true)
}

// follow applies the snapshot again if links, addresses, routes or rules have changed, as the engine does.
func (w *world) follow(always bool) error {
	if changed := w.polled.Changed(); !changed && !always || w.snapshot == nil {
		return nil
	}
	_, err := w.datapath.Apply(context.Background(), w.snapshot)
	w.failure = err
	if always {
		return err
	}
	return nil // the engine tries again
}

// settle waits until every watcher of the network has read all events of the kernel.
func (w *world) settle() error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(200 * time.Microsecond) {
		pending := 0
		err := w.gateway.Do(func() (err error) {
			pending, err = unreadEvents()
			return err
		})
		if err != nil || pending == 0 {
			time.Sleep(300 * time.Microsecond) // from the socket to the map
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: the events of the network are not read", w.name)
		}
	}
}

// unreadEvents counts the sockets of this namespace with unread neighbour events. Only watchers have such sockets.
func unreadEvents() (pending int, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/netlink")
	if err != nil {
		return 0, err
	}
	const neighbours = 1 << 2 // RTNLGRP_NEIGH
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 5 || f[1] != "0" { // NETLINK_ROUTE
			continue
		}
		groups, _ := strconv.ParseUint(f[3], 16, 32)
		if groups&neighbours != 0 && f[4] != "0" {
			pending++
		}
	}
	return pending, nil
}

// setting writes a sysctl.
func (w *world) setting(key, value string) error { return w.gateway.Sysctl(key, value) }

// listen opens a UDP socket of the gateway itself.
func (w *world) listen(name string, at netip.AddrPort) error {
	w.closeSocket(name)
	return w.gateway.Do(func() error {
		v6 := at.Addr().Is6()
		family := unix.AF_INET
		if v6 {
			family = unix.AF_INET6
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if v6 {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
		}
		if err := unix.Bind(fd, sockaddr(at)); err != nil {
			unix.Close(fd)
			return err
		}
		w.sockets[name] = &socket{fd, v6}
		return nil
	})
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func (w *world) closeSocket(name string) {
	if s := w.sockets[name]; s != nil {
		unix.Close(s.fd)
		delete(w.sockets, name)
	}
}

// received is what the gateway's own sockets got.
func (w *world) received() (lines []string) {
	b := make([]byte, 1<<16)
	for name, s := range w.sockets {
		for {
			n, from, err := unix.Recvfrom(s.fd, b, 0)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				lines = append(lines, fmt.Sprintf("socket %s: %v", name, err))
				break
			}
			lines = append(lines, fmt.Sprintf("socket %s: %q from %s", name, b[:min(n, 40)], addrOf(from)))
		}
	}
	return lines
}

func addrOf(s unix.Sockaddr) netip.AddrPort {
	switch a := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// shell is an "ip -batch" in a node that runs one command at a time.
type shell struct {
	node *lab.Node
	cmd  *exec.Cmd
	in   io.WriteCloser
	pipe *os.File
	out  *bufio.Reader
}

func newShell(n *lab.Node) (*shell, error) {
	s := &shell{node: n}
	return s, s.start()
}

func (s *shell) start() error {
	s.cmd = s.node.Command(context.Background(), "ip", "-oneline", "-force", "-batch", "-")
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer w.Close()
	s.cmd.Stdout, s.cmd.Stderr = w, w
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return err
	}
	s.pipe, s.out = r, bufio.NewReader(r)
	return s.cmd.Start()
}

// run runs a command and returns its output; "" if it succeeded. Some errors end the program; run starts it again.
func (s *shell) run(command string) (string, error) {
	if _, err := io.WriteString(s.in, command+"\nlink show dev lo\n"); err != nil {
		return "", err
	}
	var said bytes.Buffer
	for {
		line, err := s.out.ReadString('\n')
		if errors.Is(err, io.EOF) {
			_ = s.close()
			return strings.TrimSpace(said.String()), s.start()
		}
		if err != nil {
			return "", fmt.Errorf("ip %s: %w", command, err)
		}
		if strings.HasPrefix(line, "1: lo:") {
			return strings.TrimSpace(said.String()), nil
		}
		if !strings.HasPrefix(line, "Command failed") {
			said.WriteString(line)
		}
	}
}

func (s *shell) close() error {
	err := s.in.Close()
	_ = s.cmd.Wait() // the exit status belongs to the last command
	return errors.Join(err, s.pipe.Close())
}
