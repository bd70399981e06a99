// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"strings"
)

// lineRate of the shaped links in bits per second.
const lineRate = 100e6

// vpnRate is the rate of the traffic through the VPN in bits per second.
const vpnRate = 4e6

// heldConnections are open during the measurement, as in the study.
const heldConnections = 4000

func routerSuite() Suite {
	s := Suite{
		Name: "router", Title: "The software router: NAT with published servers, DHCP, VPN and firewall",
		About: "The office of `sluice lab up office`: one TCP stream of iperf3 from the office to a server outside, real TCP stacks at both ends, " +
			"over links shaped to 100 Mbit/s by tbf and over unshaped ones. Meanwhile 4,000 other connections are open and in use: 2,000 from " +
			"the office to a web server outside, 1,900 from outside to the published web server, 100 to the published FTP server. Rows " +
			"with DHCP and VPN run dnsmasq and OpenVPN on the router: 200 DHCP clients obtain leases and renew them without pause, and a " +
			"client of the VPN receives 4 Mbit/s of UDP from the office, over the same line as the stream. Throughput is what arrives of the " +
			"stream and through the VPN, the share that of the line's 100 Mbit/s. CPU is that of the whole machine, all ends included. " +
			"Memory of connections is what the gateway keeps for them: of connection tracking its entries, 384 bytes each with their " +
			"extensions; of eBPF all its maps as the kernel charges them, which are allocated as a whole, here for 65,536 flows of either " +
			"family. Memory of programs is the proportional set size of the Sluice daemon, dnsmasq and OpenVPN on the router.",
		AllCPUs: true, Seconds: 1, MaxReps: 3,
		Reproduces: "the software router study: 86.4 % of the line with NAT, published HTTP and FTP servers and a rate-limited log; 81.7 % with a DHCP server " +
			"and a VPN on the router too; 77.1 % with the firewall policy on top",
		Points: []Point{{Name: "100 Mbit/s", Value: lineRate}, {Name: "unshaped", Value: 0}},
		Metrics: []Metric{
			{Name: "throughput", Unit: "Mbit/s", Digits: 1}, {Name: "share of line", Unit: "%", Digits: 1, Absolute: true},
			{Name: "CPU", Unit: "ms a gigabit", LowerIsBetter: true},
			{Name: "memory of connections", Unit: "kB", LowerIsBetter: true, Absolute: true},
			{Name: "memory of programs", Unit: "kB", LowerIsBetter: true, Absolute: true},
			{Name: "DHCP", Unit: "leases/s", Absolute: true}, {Name: "VPN", Unit: "Mbit/s", Digits: 1, Absolute: true},
		},
		NotShown: []string{
			"Old hardware: the study's router was a PC with 100 Mbit/s cards, where NAT cost throughput; here the line is full in every row, and the CPU column shows the cost.",
			"The output of the log: in a network namespace the kernel evaluates the rule and its limit, and writes a line only where the host has set net.netfilter.nf_log_all_netns.",
			"Memory of rules and programs in the kernel, and the hash table of connection tracking, which the host has once.",
		},
	}
	const (
		published = "NAT + servers + log"
		services  = published + " + DHCP + VPN"
		policy    = services + " + firewall"
	)
	s.Rows = append(s.Rows, router{}.row("no NAT", "the kernel routes in both directions"))
	for _, by := range []struct{ name, about string }{
		{"iptables", "SNAT, DNAT to two servers with the FTP helper, a LOG rule with a limit"},
		{"sluice", "examples/office.yaml by the daemon, which places it on nftables for the log and the FTP helper"},
		{"ebpf", "the same rules by the daemon on eBPF at tc, without the log and the FTP helper, which eBPF does not carry"},
	} {
		name, first, second, third := by.name, published, services, policy
		if name == "ebpf" {
			name = "sluice ebpf (tc)"
			first, second, third = strings.ReplaceAll(first, " + log", ""), strings.ReplaceAll(second, " + log", ""), strings.ReplaceAll(third, " + log", "")
		}
		s.Rows = append(s.Rows,
			router{by: by.name}.row(name+": "+first, by.about),
			router{by: by.name, services: true}.row(name+": "+second, "the same with dnsmasq and OpenVPN on the router, both in use"),
			router{by: by.name, services: true, policy: true}.row(name+": "+third, "the same with a policy for the router and the VPN, and a deny list of 100 networks"))
		for i, row := range []struct {
			what         string
			study, reach float64
		}{{first, 86.4, 0.95}, {second, 81.7, 0.95}, {third, 77.1, 0.93}} {
			if by.name == "iptables" {
				s.Comparisons = append(s.Comparisons, Comparison{
					What: "iptables: " + row.what, Row: name + ": " + row.what, Metric: "share of line", Published: row.study,
					Source: fmt.Sprintf("the software router study, row %d, %% of a 100 Mbit/s line", i+1),
				})
				continue
			}
			s.Comparisons = append(s.Comparisons, goals(name+": "+row.what+" / no NAT", name+": "+row.what, "no NAT", map[string]float64{"100 Mbit/s": row.reach})...)
		}
	}
	s.Rows = append(s.Rows, router{by: "fullnat"}.row("sluice ebpf fullnat (tc)", "a service in mode fullnat before the server outside, both addresses rewritten by tc"))
	s.Comparisons = append(s.Comparisons, goals("fullnat by TC / no NAT", "sluice ebpf fullnat (tc)", "no NAT", map[string]float64{"unshaped": 0.95})...)
	return s
}

// router is the router of a row.
type router struct {
	// by is "" without NAT, iptables, sluice, ebpf or fullnat.
	by string
	// services runs dnsmasq and OpenVPN. policy adds the firewall.
	services, policy bool
}

func (r router) row(name, about string) Row {
	programs := []string{"iperf3", "tc", "nginx"}
	if r.services {
		programs = append(programs, "dnsmasq", "openvpn")
	}
	return Row{Name: name, About: about, Absent: tool(programs...), Run: func(t *Trial) error {
		o, err := newOffice(t)
		if err != nil {
			return err
		}
		return o.measure(r)
	}}
}

// deniedNetworks returns a hundred networks of the deny list.
func deniedNetworks(separator string) string {
	var all []string
	for i := range 100 {
		all = append(all, fmt.Sprintf("198.51.%d.0/24", i))
	}
	return strings.Join(all, separator)
}

// sluiceConfig returns the configuration of the daemon.
func (r router) sluiceConfig() string {
	if r.by == "fullnat" {
		service := "  - {name: %s, listen: [{address: 192.0.2.10, ports: [%d]}], protocol: tcp, mode: fullnat, source-pool: [211.155.226.121], backends: [{name: a, address: 203.0.113.10, port: %[2]d}]}\n"
		return routerEBPF + "services:\n" + fmt.Sprintf(service, "stream", 5201) + fmt.Sprintf(service, "web", 80)
	}
	conf := "nat:\n" +
		"  - {name: office, type: snat, source: [10.1.10.0/24, 10.8.0.0/24], out: wan0, to: [211.155.226.121]}\n" +
		"  - {name: http, type: port-forward, listen: {address: 211.155.226.121, ports: [80]}, protocol: tcp, to: {address: 10.1.10.2, port: 80}}\n" +
		"  - {name: ftp, type: port-forward, listen: {address: 211.155.226.121, ports: [21]}, protocol: tcp, to: {address: 10.1.10.3, port: 21}"
	log := "    - {action: log, protocol: tcp, hook: forward, rate: 6/minute, burst: 1, prefix: \"NAT:\", level: debug}\n"
	if r.by == "ebpf" {
		conf, log = routerEBPF+conf+"}\n", ""
	} else {
		conf += ", helper: ftp}\n"
	}
	switch {
	case r.policy:
		conf += "firewall:\n  sets: {banned: [" + deniedNetworks(", ") + "]}\n  rules:\n    - {action: drop, source: \"@banned\"}\n" + log
		if r.by != "ebpf" { // it carries rules of the first hook only
			conf += "    - {action: drop, hook: input, in: wan0, protocol: udp, ports: [53, 67]}\n" +
				"    - {action: drop, hook: input, in: wan0, protocol: tcp, ports: [22, 53]}\n" +
				"    - {action: accept, in: tun0, destination: 10.1.10.0/28}\n" +
				"    - {action: drop, in: tun0, destination: 10.1.10.0/24}\n"
		}
	case log != "":
		conf += "firewall:\n  rules:\n" + log
	}
	return conf
}

const routerEBPF = "datapath: ebpf\nattach: tc\ntables: {flows: 65536, flows6: 65536}\n"

// iptablesRules returns the same rules for iptables-restore.
func (r router) iptablesRules() string {
	rules := "*raw\n-A PREROUTING -d 211.155.226.121 -p tcp --dport 21 -j CT --helper ftp\nCOMMIT\n" +
		"*nat\n-A PREROUTING -d 211.155.226.121 -p tcp --dport 80 -j DNAT --to-destination 10.1.10.2:80\n" +
		"-A PREROUTING -d 211.155.226.121 -p tcp --dport 21 -j DNAT --to-destination 10.1.10.3:21\n" +
		"-A POSTROUTING -s 10.1.10.0/24 -o wan0 -j SNAT --to-source 211.155.226.121\n" +
		"-A POSTROUTING -s 10.8.0.0/24 -o wan0 -j SNAT --to-source 211.155.226.121\nCOMMIT\n*filter\n"
	if r.policy {
		for _, network := range strings.Split(deniedNetworks(" "), " ") {
			rules += "-A FORWARD -s " + network + " -j DROP\n"
		}
	}
	rules += "-A FORWARD -p tcp -m limit --limit 6/minute --limit-burst 1 -j LOG --log-level debug --log-prefix NAT:\n"
	if r.policy {
		rules += "-A INPUT -i wan0 -p udp -m multiport --dports 53,67 -j DROP\n-A INPUT -i wan0 -p tcp -m multiport --dports 22,53 -j DROP\n" +
			"-A FORWARD -i tun0 -d 10.1.10.0/28 -j ACCEPT\n-A FORWARD -i tun0 -d 10.1.10.0/24 -j DROP\n"
	}
	return rules + "COMMIT\n"
}
