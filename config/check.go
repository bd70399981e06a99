// SPDX-License-Identifier: Apache-2.0

package config

// Check configures the health checks of a service's backends.
type Check struct {
	// Type of the probe.
	Type CheckType `yaml:"type" json:"type" jsonschema:"enum=tcp,enum=http,enum=https,enum=udp,enum=dns,enum=icmp,enum=exec,required"`
	// Port probed; default the backend's port, or the service's first port.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Interval between the starts of two probes, 100ms or more. With a long timeout it is shortened
	// slightly, so that a failure is detected within interval × fall + 0.5 s.
	Interval Duration `yaml:"interval,omitempty" json:"interval,omitzero" jsonschema:"default=2s"`
	// Timeout of one probe, less than the interval; default 1s, at most half the
	// interval.
	Timeout Duration `yaml:"timeout,omitempty" json:"timeout,omitzero"`
	// Rise is the number of consecutive successful probes after which a backend is up. The first
	// successful probe of a new backend is sufficient.
	Rise int `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"minimum=1,maximum=100,default=2"`
	// Fall is the number of consecutive failed probes after which a backend is down.
	Fall int `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"minimum=1,maximum=100,default=3"`
	// Jitter starts probes earlier by a random part of the interval, at most this fraction, 0 to
	// 0.5.
	Jitter *float64 `yaml:"jitter,omitempty" json:"jitter,omitempty" jsonschema:"default=0.1"`
	// Initial is the state before the first probe has ended.
	Initial string `yaml:"initial,omitempty" json:"initial,omitempty" jsonschema:"enum=up,enum=down,default=down"`

	// Path of an http(s) request, with the query if there is one; default /.
	Path string `yaml:"path,omitempty" json:"path,omitempty"`
	// Host of an http(s) request, and the name in an https certificate; default the backend's
	// address.
	Host string `yaml:"host,omitempty" json:"host,omitempty"`
	// Method of an http(s) request; default GET.
	Method string `yaml:"method,omitempty" json:"method,omitempty"`
	// Headers of an http(s) request.
	Headers map[string]string `yaml:"headers,omitempty" json:"headers,omitempty"`
	// Status lists the good statuses ("200", "200-399"); default 200-399.
	Status []string `yaml:"status,omitempty" json:"status,omitempty" jsonschema:"maxItems=64"`
	// Body must occur in the first 64 KiB of the answer.
	Body string `yaml:"body,omitempty" json:"body,omitempty"`
	// InsecureSkipVerify accepts any certificate of an https backend.
	InsecureSkipVerify bool `yaml:"insecure-skip-verify,omitempty" json:"insecure-skip-verify,omitempty"`

	// Send is the payload of a tcp or udp probe.
	Send string `yaml:"send,omitempty" json:"send,omitempty"`
	// Expect is the beginning of the answer to a tcp or udp probe. Without it a udp probe accepts
	// silence, and only an ICMP error is a failure.
	Expect string `yaml:"expect,omitempty" json:"expect,omitempty"`
	// Query is the name in a dns probe; default the root ".".
	Query string `yaml:"query,omitempty" json:"query,omitempty"`
	// QueryType of a dns probe: A, AAAA, CNAME, MX, NS, PTR, SOA, SRV or TXT;
	// default NS. Any answer with the code NOERROR is good.
	QueryType string `yaml:"query-type,omitempty" json:"query-type,omitempty"`
	// Command of an exec probe: the program's whole path and its arguments, run
	// without a shell; the backend is in SLUICE_SERVICE, SLUICE_BACKEND,
	// SLUICE_ADDRESS and SLUICE_PORT. Exit status 0 is good. At the timeout the
	// program and its children are killed.
	Command []string `yaml:"command,omitempty" json:"command,omitempty" jsonschema:"maxItems=256"`
	// Via is the path of the probe. direct sends it to the backend's own address. service (mode
	// dsr) sends it to the service's address through one backend, by an ip rule and a routing table
	// for each backend. It needs an address of the service that is not an address of this host.
	Via string `yaml:"via,omitempty" json:"via,omitempty" jsonschema:"enum=direct,enum=service,default=direct"`
	// Mark is the firewall mark of the probe's packets; 0 for none.
	Mark uint32 `yaml:"mark,omitempty" json:"mark,omitempty"`
}

// CheckType names a probe.
type CheckType string

// Probes.
const (
	CheckTCP   CheckType = "tcp"
	CheckHTTP  CheckType = "http"
	CheckHTTPS CheckType = "https"
	CheckUDP   CheckType = "udp"
	CheckDNS   CheckType = "dns"
	CheckICMP  CheckType = "icmp"
	CheckExec  CheckType = "exec"
)
