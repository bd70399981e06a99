// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"
	"strings"
	"time"
)

// BackendsFrom discovers backends from one of dns, docker and directory. Discovered backends are
// not written to the file and are not stored as changes. 'sluice config show --origin' lists them.
// If a discovered backend has the same name, or the same address and port, as one under backends,
// the latter is used.
type BackendsFrom struct {
	// DNS is a name to resolve. Its A and AAAA records are used, in the families that the service
	// supports. A name that begins with "_", such as _http._tcp.app.example, is resolved as SRV
	// with ports, weights and priorities. The query is repeated when the answer's TTL ends, after 1
	// s to 5 min.
	DNS string `yaml:"dns,omitempty" json:"dns,omitempty" jsonschema:"maxLength=253"`
	// Servers to query instead of the name servers in /etc/resolv.conf: addresses, with a port
	// unless it is 53.
	Servers []string `yaml:"servers,omitempty" json:"servers,omitempty" jsonschema:"maxItems=8"`
	// Docker is a label, key or key=value. Running containers with this label are backends; those
	// with a health check only while they are healthy. The labels sluice.port and sluice.weight set
	// port and weight.
	Docker string `yaml:"docker,omitempty" json:"docker,omitempty" jsonschema:"maxLength=255"`
	// Socket of the Docker engine.
	Socket string `yaml:"socket,omitempty" json:"socket,omitempty" jsonschema:"default=/var/run/docker.sock"`
	// Network is the Docker network to take addresses from; default the container's first network
	// by name.
	Network string `yaml:"network,omitempty" json:"network,omitempty"`
	// Directory of files *.yaml, each a list of backends in the form of backends. A file with an
	// error keeps its previous content in force.
	Directory string `yaml:"directory,omitempty" json:"directory,omitempty"`
	// Port of discovered backends without a port; 0 keeps the port that the client addressed.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Hold is the time for which a backend remains that is no longer discovered; default 30s with
	// dns, else 0s.
	Hold Duration `yaml:"hold,omitempty" json:"hold,omitzero"`
	// Least is the minimum number of discovered backends. Below it none is removed, however long it
	// is missing.
	Least int `yaml:"least,omitempty" json:"least,omitempty" jsonschema:"minimum=1,maximum=4096,default=1"`
}

// Defaults of discovery.
const (
	defaultSocket = "/var/run/docker.sock"
	defaultHold   = 30 * time.Second
)

func (f *BackendsFrom) setDefaults() {
	orElse(&f.Least, 1)
	if f.Docker != "" {
		orElse(&f.Socket, defaultSocket)
	}
	if f.DNS != "" {
		orElse(&f.Hold, Duration(defaultHold))
	}
}

// Origin describes the source of the backends.
func (f *BackendsFrom) Origin() string {
	switch {
	case f.DNS != "":
		return "dns " + f.DNS
	case f.Docker != "":
		return "docker " + f.Docker
	}
	return "directory " + f.Directory
}

func (v *validator) backendsFrom(p path, f *BackendsFrom) {
	sources := 0
	for _, s := range []string{f.DNS, f.Docker, f.Directory} {
		if s != "" {
			sources++
		}
	}
	if sources != 1 {
		v.errorf(p, "write one of dns: app.example, docker: app=web and directory: /etc/sluice/backends.d", "backends come from one source, not from %d", sources)
	}
	v.rules(p, []rule{
		{len(f.Servers) > 0 && f.DNS == "", "servers", "remove it, or write dns", "servers apply to dns only"},
		{f.Socket != "" && f.Docker == "", "socket", "remove it, or write docker", "socket applies to docker only"},
		{f.Network != "" && f.Docker == "", "network", "remove it, or write docker", "network applies to docker only"},
		{f.Socket != "" && !strings.HasPrefix(f.Socket, "/"), "socket", "write the whole path", "socket " + f.Socket + " is no whole path"},
		{f.Directory != "" && !strings.HasPrefix(f.Directory, "/"), "directory", "write the whole path", "directory " + f.Directory + " is no whole path"},
	})
	for i, s := range f.Servers {
		if _, ok := ServerAddress(s); !ok {
			v.errorf(p.key("servers").index(i), "write an address, as in 10.0.0.53 or [2001:db8::53]:5353", "server %s is no address", s)
		}
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(f.DNS, "."), ".") {
		if f.DNS != "" && (label == "" || len(label) > 63) {
			v.errorf(p.key("dns"), "write a name as in app.example", "%q is no name of the DNS", f.DNS)
			break
		}
	}
}

// ServerAddress returns the address and port of a DNS server.
func ServerAddress(s string) (netip.AddrPort, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a, 53), true
	}
	at, err := netip.ParseAddrPort(s)
	return at, err == nil
}

// holder is the beginning of a configuration, up to its list of backends.
const holder = "services:\n- name: found\n  protocol: tcp\n  mode: fullnat\n  listen: [{address: 192.0.2.1, ports: [80]}]\n  backends:\n"

// DecodeBackends reads a list of backends of either family, in the form of the key backends.
func DecodeBackends(name string, raw []byte) ([]Backend, error) {
	const margin = "    "
	c, err := Decode(name, []byte(holder+margin+strings.ReplaceAll(string(raw), "\n", "\n"+margin)))
	if err == nil {
		return c.Services[0].Backends, nil
	}
	var list Errors
	if errors.As(err, &list) {
		for _, e := range list {
			e.Line -= strings.Count(holder, "\n")
			e.Column -= len(margin)
			e.Object = strings.TrimPrefix(strings.TrimPrefix(e.Object, "service found"), ": ")
		}
	}
	return nil, err
}
