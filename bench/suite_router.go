// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/capacity"
)

// lineRate of the shaped links in bits per second.
const lineRate = 100e6

func routerSuite() Suite {
	s := Suite{
		Name: "router", Title: "The software router: forwarding, NAT, NAT with log and firewall",
		About: "One TCP stream of iperf3 from a client behind the router to a server outside, real TCP stacks at both ends, over " +
			"links shaped to 100 Mbit/s by tbf and over unshaped ones, with the segmentation offloads (GSO, GRO) that hosts have. The " +
			"share is that of the line's 100 Mbit/s; CPU is that of the whole machine, both TCP stacks included; connections are those " +
			"that 20 real clients open, use once and close, over the same links. Memory is what the gateway keeps for connections " +
			"while 1,000 of them are open: of connection tracking its entries, 384 bytes each with their extensions; of eBPF all its " +
			"maps as the kernel charges them, which are allocated as a whole, here for 65,536 flows of either family. It is not that of " +
			"rules, of programs, of the daemon, nor of the hash table of connection tracking, which the host has once.",
		AllCPUs: true, Seconds: 1, MaxReps: 3,
		Reproduces: "the software router study: 86 % of the line when forwarding, 82 % with NAT, 77 % with NAT, log and firewall",
		Points:     []Point{{Name: "100 Mbit/s", Value: lineRate}, {Name: "unshaped", Value: 0}},
		Metrics: []Metric{
			{Name: "throughput", Unit: "Mbit/s"}, {Name: "share of line", Unit: "%", Digits: 1, Absolute: true},
			{Name: "CPU", Unit: "ms a gigabit", LowerIsBetter: true}, {Name: "connections", Unit: "1/s"},
			{Name: "memory", Unit: "bytes", LowerIsBetter: true, Absolute: true},
		},
		NotShown: []string{
			"Old hardware: the study's router was a PC with 100 Mbit/s cards, where NAT cost throughput; here the line is full in every row, and the CPU column shows the cost.",
			"Memory a connection: tables of eBPF take as much when they are empty; the suite scale divides by flows that fill them.",
		},
	}
	add := func(name, about string, set setup) {
		s.Rows = append(s.Rows, Row{Name: name, About: about, Absent: tool("iperf3", "tc", "nginx"), Run: func(t *Trial) error {
			n, err := newNetwork(t)
			if err != nil {
				return err
			}
			if set != nil {
				if err := set(t, n); err != nil {
					return err
				}
			}
			return n.reportRouter(t, server4)
		}})
	}
	sluiceTo := func(dest netip.Addr, name, about, path string, yaml string) {
		r := sluiceRow(name, about, path, func(Point) string { return yaml }, func(t *Trial, n *network) error { return n.reportRouter(t, dest) })
		absent := r.Absent
		r.Absent = func(p Point) string {
			if why := tool("iperf3", "tc", "nginx")(p); why != "" {
				return why
			}
			return absent(p)
		}
		s.Rows = append(s.Rows, r)
	}
	sluice := func(name, about, path string, yaml string) { sluiceTo(server4, name, about, path, yaml) }
	add("forwarding only", "the kernel routes", nil)
	add("iptables NAT", "masquerade", iptablesRule("POSTROUTING", "-o", "lan0", "-j", "MASQUERADE"))
	add("iptables NAT + log + firewall", "masquerade, a limited log rule and 100 filter rules", iptablesRouter)
	add("nft NAT", "masquerade", nftMasquerade)
	const nat = "nat:\n  - {name: office, type: masquerade, out: lan0}\n"
	head := func(attach string) string { return service{attach: attach}.head(Point{}) }
	sluice("sluice nftables NAT", "masquerade", "nftables", head("")+nat)
	sluice("sluice nftables NAT + log + firewall", "masquerade, a limited log rule, a deny set of 100 addresses", "nftables", head("")+nat+routerFirewall())
	sluice("sluice ebpf NAT (tc)", "masquerade by tc", "ebpf", head("tc")+nat)
	full := service{mode: "fullnat", protocol: "tcp", attach: "tc", port: 5201, vip: vip4, backend: server4}.yaml(Point{})
	web := "  - {name: web, listen: [{address: " + vip4.String() + ", ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [" + pool4 + "], backends: [{name: a, address: " + server4.String() + ", port: 80}]}\n"
	sluiceTo(vip4, "sluice ebpf fullnat (tc)", "both addresses rewritten by tc", "ebpf", full+web)
	for _, c := range []struct {
		what, row string
		published float64
	}{{"NAT", "iptables NAT", 82}, {"NAT + log + firewall", "iptables NAT + log + firewall", 77}} {
		s.Comparisons = append(s.Comparisons, Comparison{
			What: "iptables " + c.what + " / forwarding", Row: c.row, Against: "forwarding only",
			Published: c.published, PublishedAgainst: 86, Source: "the software router study, % of a 100 Mbit/s line",
		})
	}
	s.Comparisons = append(s.Comparisons, goals("fullnat by TC / forwarding", "sluice ebpf fullnat (tc)", "forwarding only", map[string]float64{"unshaped": 0.95})...)
	return s
}

func routerFirewall() string {
	s := "firewall:\n  sets:\n    banned: ["
	for i := range 100 {
		s += fmt.Sprintf("198.51.100.%d/32, ", i)
	}
	return s + "]\n  rules:\n    - {action: drop, source: \"@banned\"}\n    - {action: log, protocol: tcp, hook: forward, rate: 6/minute, burst: 1, prefix: \"NAT:\"}\n"
}

func iptablesRouter(t *Trial, n *network) error {
	rules := "*nat\n-A POSTROUTING -o lan0 -j MASQUERADE\nCOMMIT\n*filter\n"
	for i := range 100 {
		rules += fmt.Sprintf("-A FORWARD -s 198.51.100.%d -j DROP\n", i)
	}
	rules += "-A FORWARD -p tcp -m limit --limit 6/minute --limit-burst 1 -j LOG --log-prefix NAT:\nCOMMIT\n"
	return command(t, n.gateway, rules, "iptables-legacy-restore")
}

// reportRouter shapes the links at the points that require it, runs iperf3 to an address, and then opens connections
// to it.
func (n *network) reportRouter(t *Trial, dest netip.Addr) error {
	if t.Point.Value > 0 {
		for _, iface := range []string{"wan0", "lan0"} {
			err := command(t, n.gateway, "", "tc", "qdisc", "add", "dev", iface, "root", "tbf", "rate", strconv.Itoa(t.Point.Value)+"bit", "burst", "64kb", "latency", "20ms")
			if err != nil {
				return err
			}
		}
	}
	if _, err := daemon(t, n.server, nil, "iperf3", "-s"); err != nil {
		return err
	}
	if err := n.waitFor(t, n.server, "127.0.0.1:5201"); err != nil {
		return err
	}
	before := readLoad()
	bps, err := n.bulk(t, dest)
	if err != nil {
		return err
	}
	used := readLoad().total - before.total
	t.Report("throughput", bps/1e6)
	if t.Point.Value > 0 {
		t.Report("share of line", 100*bps/lineRate)
	}
	t.Report("CPU", used*1e3/(bps*math.Ceil(t.Seconds)/1e9))
	if _, err := startWeb(t, n); err != nil {
		return err
	}
	// Memory is measured first, because the entries of the other loads stay for minutes.
	if err := n.reportMemory(t, netip.AddrPortFrom(dest, 80)); err != nil {
		return err
	}
	r, err := askWeb(t, n, "http://"+dest.String()+"/", 20)
	if err != nil {
		return err
	}
	t.Report("connections", r.RequestsPerSecond)
	return nil
}

// heldConnections are open while the memory is read.
const heldConnections = 1000

// reportMemory opens connections and reports the memory that the gateway uses for them.
func (n *network) reportMemory(t *Trial, dest netip.AddrPort) error {
	for range heldConnections {
		c, err := n.client.Dial(t, nil, "tcp", dest.String())
		if err != nil {
			return err
		}
		defer c.Close()
	}
	entries, err := n.tracked()
	if err != nil {
		t.Note("no memory: %v", err)
		return nil
	}
	maps, err := mapMemory()
	if err != nil {
		t.Note("no memory: %v", err)
		return nil
	}
	t.Report("memory", float64(entries*capacity.EntryBytes(capacity.Extensions{NAT: true})+maps))
	return nil
}

// tracked returns the number of connections that the gateway's kernel tracks.
func (n *network) tracked() (entries uint64, err error) {
	const file = "/proc/sys/net/netfilter/nf_conntrack_count"
	err = n.gateway.Do(func() error {
		if !readable(file) {
			return nil // without the module there are no entries
		}
		entries, err = strconv.ParseUint(readLine(file), 10, 64)
		return err
	})
	return entries, err
}

// mapMemory returns the memory that the kernel charges for the BPF maps of this process. Only the row's datapath
// creates maps in this suite.
func mapMemory() (sum uint64, err error) {
	const dir = "/proc/self/fdinfo"
	fds, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{} // a map may have several descriptors
	for _, fd := range fds {
		b, err := os.ReadFile(filepath.Join(dir, fd.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		}
		if err != nil {
			return 0, err
		}
		of := map[string]string{}
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			of[key] = strings.TrimSpace(value)
		}
		id := of["map_id"]
		if id == "" || seen[id] {
			continue
		}
		seen[id] = true
		bytes, err := strconv.ParseUint(of["memlock"], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("map %s: memlock: %w", id, err)
		}
		sum += bytes
	}
	return sum, nil
}

// bulk sends one TCP stream and returns the bits a second that were received.
func (n *network) bulk(t *Trial, dest netip.Addr) (float64, error) {
	cmd := n.client.Command(t, "iperf3", "-J", "-c", dest.String(), "-t", fmt.Sprint(math.Ceil(t.Seconds)))
	var out []byte
	err := t.profiled("iperf3", func() (err error) {
		out, err = cmd.Output()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("iperf3: %w: %.200s", err, out)
	}
	var r struct {
		End struct {
			Received struct {
				BPS float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return 0, fmt.Errorf("iperf3: %w", err)
	}
	return r.End.Received.BPS, nil
}
