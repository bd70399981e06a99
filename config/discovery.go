// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"
	"strings"
	"time"
)

// BackendsFrom says where backends are found: by one of dns, docker and directory. What is found is
// neither written to the file nor kept as a change; 'sluice config show --origin' lists it. Of two with
// one name or one address and port the one under backends counts.
type BackendsFrom struct {
	// DNS is a name that is asked for A and AAAA, in the families that the service can use; one that
	// begins with "_", as in _http._tcp.app.example, for SRV, whose ports, weights and priorities count.
	// It is asked again when the answer's time to live is over, 1 s to 5 min.
	DNS string `yaml:"dns,omitempty" json:"dns,omitempty" jsonschema:"maxLength=253"`
	// Servers that are asked instead of those of /etc/resolv.conf: addresses, with ports where
	// they are not 53.
	Servers []string `yaml:"servers,omitempty" json:"servers,omitempty" jsonschema:"maxItems=8"`
	// Docker is a label, as key or key=value: the running containers that have it are backends, those
	// with a health check while it is good. The labels sluice.port and sluice.weight set what they name.
	Docker string `yaml:"docker,omitempty" json:"docker,omitempty" jsonschema:"maxLength=255"`
	// Socket of the Docker engine.
	Socket string `yaml:"socket,omitempty" json:"socket,omitempty" jsonschema:"default=/var/run/docker.sock"`
	// Network of Docker whose addresses are taken; default the first by name in which the container
	// has one.
	Network string `yaml:"network,omitempty" json:"network,omitempty"`
	// Directory of files *.yaml, each a list of backends as under backends. A file that is broken counts
	// with what it had before.
	Directory string `yaml:"directory,omitempty" json:"directory,omitempty"`
	// Port of backends that are found without one; 0 keeps the port that the client asked for.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Hold is how long a backend stays that is not found any more; default 30s with dns, else 0s.
	Hold Duration `yaml:"hold,omitempty" json:"hold,omitzero"`
	// Least is how many stay at least: below it none is removed, however long it was not found.
	Least int `yaml:"least,omitempty" json:"least,omitempty" jsonschema:"minimum=1,maximum=4096,default=1"`
}

// Defaults of what is found.
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

// Origin says in words where the backends come from.
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

// holder is a configuration up to its backends.
const holder = "services:\n- name: found\n  protocol: tcp\n  mode: fullnat\n  listen: [{address: 192.0.2.1, ports: [80]}]\n  backends:\n"

// DecodeBackends reads a list of backends of either family, as it stands under backends in the file.
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
