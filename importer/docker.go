// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
)

// docker imports the output of docker inspect for containers and networks.
type docker struct {
	Options
	d *draft.Draft
	// masqueraded lists the networks that already have a masquerade.
	masqueraded []netip.Prefix
}

func readDocker(text string, o Options) (*draft.Result, error) {
	list, err := draft.JSON(text)
	if err != nil {
		return nil, errors.New(err.Error() + "; pass the output of 'docker inspect $(docker ps -q)'")
	}
	k := &docker{Options: o, d: draft.New("docker", text)}
	for i := range k.d.Lines() {
		k.d.Structure(i + 1) // most keys do not concern packets
	}
	seen := false
	var containers []*draft.Value
	for _, v := range list {
		for _, item := range v.List() {
			switch {
			case item.Get("NetworkSettings", "Networks") != nil:
				containers = append(containers, item)
			case item.Get("IPAM") != nil:
				k.network(item)
				seen = true
			}
		}
	}
	if !seen && len(containers) == 0 {
		return nil, errors.New("no container and no network in it: pass the output of 'docker inspect $(docker ps -q)'; docker ps does not print addresses")
	}
	for _, c := range containers {
		k.container(c)
	}
	return k.d.Finish()
}

// network adds the masquerade of a bridge.
func (k *docker) network(v *draft.Value) {
	name, driver := v.Get("Name").Str(), v.Get("Driver").Str()
	switch {
	case driver != "bridge":
		if driver != "host" && driver != "null" {
			k.d.Lost(v.Line, "network "+name, "no equivalent for networks of driver "+driver, "leave it to Docker")
		}
		return
	case v.Get("Internal").Str() == "true" || v.Get("Options", "com.docker.network.bridge.enable_ip_masquerade").Str() == "false":
		k.d.Implied(v.Line, "network "+name, "its containers have no address outside")
		return
	}
	for _, c := range v.Get("IPAM", "Config").List() {
		if p, err := netip.ParsePrefix(c.Get("Subnet").Str()); err == nil {
			k.masquerade(name, p.Masked(), c.Line)
		}
	}
}

func (k *docker) masquerade(name string, p netip.Prefix, line int) {
	if slices.Contains(k.masqueraded, p) || p.Addr().Is6() && !p.Addr().IsPrivate() {
		return
	}
	k.masqueraded = append(k.masqueraded, p)
	k.d.NAT(config.NATRule{Name: name, Type: config.NATMasquerade, Source: []netip.Prefix{p}, Except: []netip.Prefix{p}}, line)
}

// container adds the port-forwards of a container.
func (k *docker) container(v *draft.Value) {
	name := strings.TrimPrefix(v.Get("Name").Str(), "/")
	var address4, address6 netip.Addr
	for _, n := range v.Get("NetworkSettings", "Networks").Fields {
		a4, err := netip.ParseAddr(n.Value.Get("IPAddress").Str())
		if err != nil {
			continue
		}
		if !address4.IsValid() {
			address4 = a4
			address6, _ = netip.ParseAddr(n.Value.Get("GlobalIPv6Address").Str())
		} else {
			k.d.Implied(n.Value.Line, "container "+name+": network "+n.Key, "ports are published through the first network")
		}
		if bits, err := strconv.Atoi(n.Value.Get("IPPrefixLen").Str()); err == nil {
			if p, err := a4.Prefix(bits); err == nil {
				k.masquerade(n.Key, p, n.Value.Line)
			}
		}
	}
	for _, port := range v.Get("NetworkSettings", "Ports").Fields {
		number, proto, _ := strings.Cut(port.Key, "/")
		inside, err := strconv.ParseUint(number, 10, 16)
		var p flow.Protocol
		if perr := p.UnmarshalText([]byte(proto)); err != nil || perr != nil {
			k.d.Lost(port.Value.Line, "container "+name+": "+port.Key, "not understood", "write a port-forward")
			continue
		}
		for _, at := range port.Value.Items { // no items if the port is not published
			k.publish(name, at, p, uint16(inside), address4, address6)
		}
	}
}

// publish adds one port-forward.
func (k *docker) publish(name string, at *draft.Value, p flow.Protocol, inside uint16, address4, address6 netip.Addr) {
	outside, err := strconv.ParseUint(at.Get("HostPort").Str(), 10, 16)
	host, herr := netip.ParseAddr(at.Get("HostIp").Str())
	text := "container " + name + ": " + at.Get("HostIp").Str() + ":" + at.Get("HostPort").Str()
	target := address4
	if host.Is6() {
		target = address6
	}
	switch {
	case err != nil:
		k.d.Lost(at.Line, text, "the port is not understood", "write a port-forward")
		return
	case host.IsValid() && host.IsLoopback():
		k.d.Lost(at.Line, text, "the port is published only for the host itself, by Docker's proxy", "leave it to Docker")
		return
	case !target.IsValid() && host.Is6():
		k.d.Implied(at.Line, text, "the container has no IPv6 address: Docker's own proxy answers there")
		return
	case !target.IsValid():
		k.d.Lost(at.Line, text, "the container has no address: it is stopped, or on the host's network", "start it, and import again")
		return
	}
	l := config.Listen{Ports: []flow.Ports{{First: uint16(outside), Last: uint16(outside)}}}
	to := inside
	if to == uint16(outside) {
		to = 0
	}
	n := config.NATRule{Name: name + "-" + p.String() + "-" + strconv.Itoa(int(outside)), Type: config.NATPortForward, Protocol: p, To: config.Target{Address: target, Port: to}}
	if herr == nil && !host.IsUnspecified() {
		l.Address = host
		n.Listen = &l
		k.d.NAT(n, at.Line)
		return
	}
	if len(k.Outside) == 0 {
		k.d.Lost(at.Line, text, "the port is published on every address of the host, and a listener needs one", "import again with --outside INTERFACE, the interface with the public address")
		return
	}
	for _, iface := range k.Outside {
		one := l
		one.Interface = iface
		n.Listen = &one
		object := k.d.NAT(n, at.Line)
		if iface == k.Outside[0] {
			k.d.Changed(object, at.Line, text, "Docker publishes the port on every address of the host, the object only on the address of interface "+iface, "import again with --outside IFACE1,IFACE2 for more interfaces")
		}
	}
}
