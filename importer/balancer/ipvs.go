// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"net/netip"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// virtual is a virtual service of IPVS.
type virtual struct {
	object
	key       string
	line      int
	scheduler string
	portFlag  int // line of the flag of sh and mh; 0 without it
}

// IPVS imports the output of "ipvsadm-save -n".
func IPVS(text string, _ Options) (*draft.Result, error) {
	d := draft.New("ipvs", text, "#")
	var list []*virtual
	index := map[string]*virtual{}
	for i, line := range d.Lines() {
		w := strings.Fields(line)
		if len(w) > 0 && strings.HasSuffix(w[0], "ipvsadm") {
			w = w[1:]
		}
		if len(w) < 3 || strings.HasPrefix(w[0], "#") {
			continue // an unknown line gets a note at the end
		}
		if _, known := virtualProtocols[w[1]]; !known && w[1] != "-f" && w[1] != "--fwmark-service" {
			continue
		}
		switch w[0] {
		case "-A", "--add-service":
			v := newVirtual(d, i+1, w[1:])
			if index[v.key] == nil {
				index[v.key] = v
				list = append(list, v)
			} else {
				d.Lost(i+1, "", "the service is already in the file", "keep one of them")
			}
		case "-a", "--add-server":
			if v := index[w[1]+" "+w[2]]; v != nil {
				v.server(i+1, w[3:])
			} else {
				d.Lost(i+1, "", "no earlier line -A defines the service", "pass the whole output of ipvsadm-save")
			}
		}
	}
	if len(list) == 0 {
		return nil, errors.New("no virtual service in it: pass the output of 'ipvsadm-save -n', lines such as -A -t 192.0.2.1:80 -s wlc; ipvsadm -L is another form")
	}
	for _, v := range list {
		v.finish()
	}
	return d.Finish()
}

var virtualProtocols = map[string]flow.Protocol{
	"-t": flow.TCP, "--tcp-service": flow.TCP, "-u": flow.UDP, "--udp-service": flow.UDP, "--sctp-service": flow.SCTP,
}

func newVirtual(d *draft.Draft, line int, w []string) *virtual {
	v := &virtual{object: object{d: d}, line: line, key: w[0] + " " + w[1]}
	v.addLines(line)
	v.service.WhenDown = config.WhenDownReject // IPVS also rejects if no server is left
	proto := virtualProtocols[w[0]]
	a, err := hostPort(w[1])
	switch {
	case w[0] == "-f" || w[0] == "--fwmark-service":
		v.lost, v.next = "the service is for packets with a firewall mark, and the file does not have the rules that set it", "look for mark "+w[1]+" in iptables-save, and write a service that listens on these addresses and ports"
	case err != nil:
		v.lost, v.next = "the listener is a host name", "save with ipvsadm-save -n, which writes numbers"
	default:
		v.service.Protocol, v.service.Listen = proto, []config.Listen{listen(a)}
		v.service.Name = strings.ReplaceAll(proto.String()+"-"+w[1], "[", "")
		v.service.Name = strings.ReplaceAll(v.service.Name, "]", "")
	}
	v.options(w[2:])
	return v
}

// options parses the words after the address of a virtual service.
func (v *virtual) options(w []string) {
	for i := 0; i < len(w); i++ {
		word, value := w[i], ""
		if i+1 < len(w) {
			value = w[i+1]
		}
		switch word {
		case "-s", "--scheduler":
			v.scheduler = value
			i++
		case "-p", "--persistent":
			p := &config.Persistence{}
			if t, ok := seconds(value); ok {
				p.Timeout = t
				i++
			}
			v.service.Persistence = p
		case "-M", "--netmask":
			if value != "255.255.255.255" && value != "128" {
				v.noteChanged(v.line, word+" "+value, "persistence is for single clients, not for networks of them", "")
			}
			i++
		case "-b", "--sched-flags":
			for _, flag := range strings.Split(value, ",") {
				v.flag(flag, v.line)
			}
			i++
		case "-o", "--ops":
			v.noteChanged(v.line, word, "datagrams of one client and port stay together", "write mode: stateless, which keeps no flows")
		case "--pe":
			v.noteMissing(v.line, word+" "+value, noEngine, helperSIP)
			i++
		default:
			v.noteMissing(v.line, word, "not understood", "write the equivalent by hand")
		}
	}
}

// flag reads a flag of the scheduler.
func (v *virtual) flag(flag string, line int) {
	switch flag {
	case "sh-port", "mh-port":
		v.portFlag = line
	case "sh-fallback", "mh-fallback":
		v.d.Implied(line, flag, "clients of a backend that is down get another one")
	default:
		v.noteMissing(line, flag, "no equivalent for this flag of the scheduler", "write another scheduler if the service needs it")
	}
}

// count reads an integer.
func (v *virtual) count(line int, word, value string, set *int) {
	if n, ok := number(value); ok {
		*set = n
	} else {
		v.noteMissing(line, word+" "+value, "not understood", "write a number, and import again")
	}
}

// server reads the options of a real server.
func (v *virtual) server(line int, w []string) {
	b := config.Backend{Weight: 1}
	method := config.ModeDSR
	tunnel := &config.Tunnel{}
	var err error
	for i := 0; i < len(w); i++ {
		word, value := w[i], ""
		if i+1 < len(w) {
			value = w[i+1]
		}
		switch word {
		case "-r", "--real-server":
			var a netip.AddrPort
			a, err = hostPort(value)
			b.Address, b.Port = a.Addr(), a.Port()
			i++
		case "-g", "--gatewaying":
			method = config.ModeDSR
		case "-i", "--ipip":
			method = config.ModeTunnel
		case "-m", "--masquerading":
			method = config.ModeDNAT
		case "-w", "--weight":
			v.count(line, word, value, &b.Weight)
			i++
		case "-x", "--u-threshold":
			v.count(line, word, value, &b.MaxConnections)
			i++
		case "-y", "--l-threshold":
			if value != "0" {
				v.noteMissing(line, word+" "+value, "no equivalent for a lower threshold: a backend takes connections again as soon as one ends", "")
			}
			i++
		case "--tun-type":
			tunnel.Type = config.TunnelType(value)
			if value == "gre" {
				v.lost, v.next = "no equivalent for GRE tunnels", "use ipip or gue at the servers"
			}
			i++
		case "--tun-port":
			port := 0
			v.count(line, word, value, &port)
			tunnel.Port = uint16(port)
			i++
		default:
			v.noteMissing(line, word, "not understood", "write the equivalent by hand")
		}
	}
	if err != nil || !b.Address.IsValid() {
		v.d.Lost(line, "", "the server's address is not understood", "save with ipvsadm-save -n, which writes numbers")
		return
	}
	if tunnel.Type != config.TunnelGUE || method != config.ModeTunnel {
		tunnel = nil
	}
	if !v.sameMethod(line, method, tunnel) {
		return
	}
	if b.Weight == 0 {
		b.Drain, b.Weight = true, 1
	}
	if b.Weight == 1 {
		b.Weight = 0 // the default
	}
	v.addLines(line)
	v.service.Backends = append(v.service.Backends, b)
}

func (v *virtual) finish() {
	s := &v.service
	if s.Mode == "" {
		s.Mode = config.ModeDNAT // no servers
	}
	for i := range s.Backends {
		b := &s.Backends[i]
		if s.Mode.OneWay() {
			b.Port = 0 // the port is not translated
		} else {
			b.Port = portFor(s, b.Port)
		}
	}
	if s.Backends == nil {
		s.Backends = []config.Backend{}
	}
	v.schedule(v.scheduler, v.line, v.portFlag)
	v.add()
}
