// SPDX-License-Identifier: Apache-2.0

// Package importer translates configurations of other programs: it reads their text and returns a
// configuration of Sluice, with notes about every line that has no equivalent. It is pure. The caller
// supplies facts that the text lacks.
package importer

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/sluice-lb/sluice/importer/balancer"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/importer/netfilter"
)

// Options are facts that the text of a source lacks.
type Options struct {
	// Outside lists the interfaces with the public addresses. They are used where the source
	// accepts packets to any address of the host.
	Outside []string
	// Addresses has the host's own addresses by interface, with the prefix length of their network;
	// nil if unknown.
	Addresses map[string][]netip.Prefix
}

// Source is a program with a configuration that can be imported.
type Source struct {
	Name string
	// What describes the input. Command prints the input, or is its file.
	What, Command string

	read func(text string, o Options) (*draft.Result, error)
}

// Sources lists the programs.
var Sources = []Source{
	{"nftlb", "farms, addresses and policies of nftlb", "curl -H 'Key: KEY' http://localhost:5555/farms", loadBalancer(balancer.NFTLB)},
	{"ipvs", "virtual services of IPVS", "ipvsadm-save -n", loadBalancer(balancer.IPVS)},
	{"keepalived", "virtual servers and their checkers", "/etc/keepalived/keepalived.conf", loadBalancer(balancer.Keepalived)},
	{"iptables", "rules of iptables and ip6tables, sets of ipset", "iptables-save", func(text string, o Options) (*draft.Result, error) {
		return netfilter.IPTables(text, netfilter.Options{Outside: o.Outside, Addresses: o.Addresses})
	}},
	{"nftables", "rules of nftables", "nft -j list ruleset", func(text string, o Options) (*draft.Result, error) {
		return netfilter.Nftables(text, netfilter.Options{Outside: o.Outside, Addresses: o.Addresses})
	}},
	{"haproxy", "HAProxy in mode tcp", "/etc/haproxy/haproxy.cfg", loadBalancer(balancer.HAProxy)},
	{"docker", "published ports and bridges", "docker inspect $(docker ps -q)", readDocker},
}

func loadBalancer(read func(string, balancer.Options) (*draft.Result, error)) func(string, Options) (*draft.Result, error) {
	return func(text string, o Options) (*draft.Result, error) {
		return read(text, balancer.Options{Outside: o.Outside})
	}
}

// input describes the input: a file, or the output of a command.
func (s Source) input() string {
	if strings.HasPrefix(s.Command, "/") {
		return s.Command
	}
	return "the output of '" + s.Command + "'"
}

// Limits of an imported text: twice the rules of a large Kubernetes node.
const (
	MaxSize  = 64 << 20 // maximum size of the input in bytes
	MaxLines = 500_000
)

// Limits of a configuration of a load balancer. The time of an import grows with the square of the
// number of sections, because their names are compared with each other.
const (
	maxLines    = 500_000
	maxSections = 10_000
)

// sections matches the first lines of sections.
var sections = regexp.MustCompile(`(?m)^[ \t]*(?:listen|frontend|backend|defaults|virtual_server|virtual_server_group|vrrp_instance|real_server)\b`)

// checkSize returns an error for a text with more lines or sections than an import handles.
func checkSize(text string) error {
	if n := strings.Count(text, "\n"); n > maxLines {
		return fmt.Errorf("%d lines, more than the limit of %d: import it in parts", n, maxLines)
	}
	if n := len(sections.FindAllStringIndex(text, maxSections+1)); n > maxSections {
		return fmt.Errorf("more than %d sections: import it in parts", maxSections)
	}
	return nil
}

// Import reads the text of a source.
func Import(source, text string, o Options) (*draft.Result, error) {
	for _, s := range Sources {
		if s.Name != source {
			continue
		}
		switch {
		case len(text) > MaxSize:
			return nil, fmt.Errorf("larger than %d MiB: import it in parts", MaxSize>>20)
		case strings.Count(text, "\n") > MaxLines:
			return nil, fmt.Errorf("more than %d lines: import it in parts", MaxLines)
		case strings.TrimSpace(text) == "":
			return nil, fmt.Errorf("it is empty: pass %s", s.input())
		case strings.Contains(text, "\x00"):
			return nil, fmt.Errorf("it is not text: pass %s", s.input())
		}
		if err := checkSize(text); err != nil {
			return nil, err
		}
		return s.read(text, o)
	}
	return nil, fmt.Errorf("unknown source %q", source)
}
