// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
)

// Cluster configures this gateway as one of several behind the same routers.
type Cluster struct {
	// Name of the cluster. It is part of the keys in the store, so that several clusters can use one.
	Name string `yaml:"name,omitempty" json:"name,omitempty" jsonschema:"default=default"`
	// Nodes are the gateways that use this file. They divide the addresses of snat, nat64 and
	// source-pool among themselves: an address is used by one node. Each pool needs at least one
	// address for each node. Add new nodes at the end of the list.
	Nodes []Node `yaml:"nodes,omitempty" json:"nodes,omitempty" jsonschema:"maxItems=32"`
	// Announce writes the addresses of services, port-forwards and pools as kernel routes. A BGP
	// speaker on this host exports them. A route is removed while no backend of its services is
	// usable, an interface is down, or the rules of the datapath are missing.
	Announce *Announce `yaml:"announce,omitempty" json:"announce,omitempty"`
	// Store is an etcd in which the nodes keep one configuration for all of them. Each node reads this
	// key from its own file only.
	Store *ClusterStore `yaml:"store,omitempty" json:"store,omitempty"`
}

// ClusterStore is an etcd, version 3.4 or later.
type ClusterStore struct {
	// Endpoints are the client URLs of the members of etcd, as in https://10.255.0.1:2379. http is
	// possible with loopback addresses only: who can write to the store controls all nodes.
	Endpoints []string `yaml:"endpoints" json:"endpoints" jsonschema:"required,minItems=1,maxItems=16"`
	// TLS are the files for the connections to the store.
	TLS *ClusterTLS `yaml:"tls,omitempty" json:"tls,omitempty"`
}

// ClusterTLS are absolute paths of PEM files. The daemon reads them for each new connection.
type ClusterTLS struct {
	// CA that signed the certificates of the members of etcd.
	CA string `yaml:"ca" json:"ca" jsonschema:"required"`
	// Cert is the certificate of this node, and its chain.
	Cert string `yaml:"cert" json:"cert" jsonschema:"required"`
	// Key of that certificate.
	Key string `yaml:"key" json:"key" jsonschema:"required"`
}

// Node is one gateway of a cluster.
type Node struct {
	// Name of the node: its host name, with or without the domain, or the value of --node.
	Name string `yaml:"name" json:"name" jsonschema:"required"`
	// Address of an interface of the node. It identifies a host whose name is not in the list, and
	// reveals a host that has the name of another node.
	Address netip.Addr `yaml:"address" json:"address" jsonschema:"type=string,required"`
}

// Announce are the routes of the announced addresses: "unreachable ADDRESS table TABLE proto
// PROTOCOL metric METRIC". All keys have defaults, so that "announce: {}" is enough.
type Announce struct {
	// Table is the number of the routing table. No routing rule may select it.
	Table int `yaml:"table,omitempty" json:"table,omitempty" jsonschema:"minimum=1,maximum=2147483647,default=5100"`
	// Protocol marks the routes. Sluice removes all other routes of this protocol from the table.
	Protocol int `yaml:"protocol,omitempty" json:"protocol,omitempty" jsonschema:"minimum=5,maximum=255,default=76"`
	// Metric of the routes. A speaker can export it as the MED: routers that compare it prefer the
	// gateway with the lowest one. The node that replaces the owner of a pool address announces the
	// address with a metric that is higher by 90.
	Metric int `yaml:"metric,omitempty" json:"metric,omitempty" jsonschema:"minimum=1,maximum=2147483647,default=10"`
	// Interfaces that the gateway needs. While one of them is missing, is down or has no carrier,
	// no address is announced. The default is the interfaces of the key interfaces; if that is empty
	// too, interfaces do not matter.
	Interfaces []string `yaml:"interfaces,omitempty" json:"interfaces,omitempty" jsonschema:"maxItems=64"`
}

// Defaults of announcements.
const (
	defaultAnnounceTable    = 5100
	defaultAnnounceProtocol = 76
	defaultAnnounceMetric   = 10
)

// BackupMetric is added to the metric of a pool address at the backup of its owner.
const BackupMetric = 90

// Nodes returns the gateways that use the configuration; nil for a single gateway.
func (c *Config) Nodes() []Node {
	if c.Cluster == nil {
		return nil
	}
	return c.Cluster.Nodes
}

// Announcements returns the settings of announcements, or nil if nothing is announced.
func (c *Config) Announcements() *Announce {
	if c.Cluster == nil {
		return nil
	}
	return c.Cluster.Announce
}

// Store returns the settings of the cluster's store, or nil without one.
func (c *Config) Store() *ClusterStore {
	if c.Cluster == nil {
		return nil
	}
	return c.Cluster.Store
}

// WithStoreOf returns the configuration with the name of the cluster and the store of another one.
func (c *Config) WithStoreOf(other *Config) *Config {
	own, cluster := c.copy(), Cluster{}
	if c.Cluster != nil {
		cluster = *c.Cluster
	}
	cluster.Name, cluster.Store = other.Cluster.Name, other.Cluster.Store
	own.Cluster = &cluster
	return own
}

func (c *Cluster) setDefaults() {
	orElse(&c.Name, "default")
	if a := c.Announce; a != nil {
		orElse(&a.Table, defaultAnnounceTable)
		orElse(&a.Protocol, defaultAnnounceProtocol)
		orElse(&a.Metric, defaultAnnounceMetric)
	}
}

// cluster checks the part of the configuration about several gateways.
func (v *validator) cluster() {
	v.nodes()
	v.store()
	if c := v.c.Cluster; c != nil && c.Announce == nil && c.Store == nil && len(c.Nodes) == 0 {
		v.errorf(at("cluster"), "write announce: {}, or nodes: [{name: n1, address: 10.255.0.1}, ...]", "neither nodes nor announce")
	}
	a := v.c.Announcements()
	if a == nil {
		return
	}
	where := at("cluster").key("announce")
	if a.Table >= 253 && a.Table <= 255 {
		v.errorf(where.key("table"), "write the number of a table that no routing rule selects, such as 5100", "packets are routed by table %d, and would be refused by the announced routes", a.Table)
	}
	for i, name := range a.Interfaces {
		p := where.key("interfaces").index(i)
		v.ifname(p, name)
		if slices.Contains(a.Interfaces[:i], name) {
			v.errorf(p, "keep one of them", "interface %s is listed twice", name)
		}
	}
}

// store checks the name of the cluster, and the connection to its store.
func (v *validator) store() {
	s, p := v.c.Store(), at("cluster").key("store")
	if v.c.Cluster != nil {
		v.name(at("cluster").key("name"), v.c.Cluster.Name)
	}
	if s == nil {
		return
	}
	if len(v.c.Nodes()) == 0 {
		v.errorf(p, "list the gateways under cluster.nodes", "a store is for the nodes of a cluster, and none is listed").atKey = true
	}
	secure := false
	for i, e := range s.Endpoints {
		p := p.key("endpoints").index(i)
		u, err := url.Parse(e)
		switch {
		case err != nil, u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "", u.Port() == "", e != u.Scheme+"://"+u.Host:
			v.errorf(p, "write it as https://10.255.0.1:2379", "%q is not the client URL of an etcd", e)
		case slices.Contains(s.Endpoints[:i], e):
			v.errorf(p, "keep one of them", "endpoint %s is listed twice", e)
		case u.Scheme == "https":
			secure = true
		case !isLoopback(u.Hostname()):
			v.errorf(p, "write https, and tls: {ca: ..., cert: ..., key: ...}", "%s is not encrypted: an attacker on the path could change the configuration of all nodes", e)
		}
	}
	switch {
	case secure && s.TLS == nil:
		v.errorf(p, "write tls: {ca: /etc/sluice/ca.pem, cert: /etc/sluice/node.pem, key: /etc/sluice/node.key}", "https endpoints without tls: the node and etcd could not identify each other").atKey = true
	case s.TLS != nil:
		for _, f := range []struct{ key, path string }{{"ca", s.TLS.CA}, {"cert", s.TLS.Cert}, {"key", s.TLS.Key}} {
			if f.path != "" && !filepath.IsAbs(f.path) {
				v.errorf(p.key("tls").key(f.key), "write an absolute path, as in /etc/sluice/"+f.key+".pem", "%q is not an absolute path", f.path)
			}
		}
	}
}

// isLoopback reports whether a host of a URL is this host.
func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.IsLoopback()
}
