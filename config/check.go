// SPDX-License-Identifier: Apache-2.0

package config

// Check is how the health of a service's backends is found out.
type Check struct {
	// Type of the probe.
	Type CheckType `yaml:"type" json:"type" jsonschema:"enum=tcp,enum=http,enum=https,enum=udp,enum=dns,enum=icmp,enum=exec,required"`
	// Port probed; default the backend's port, or the service's first port.
	Port uint16 `yaml:"port,omitempty" json:"port,omitempty"`
	// Interval between probes; default 2s.
	Interval Duration `yaml:"interval,omitempty" json:"interval,omitempty"`
	// Timeout of one probe; default 1s, less than Interval.
	Timeout Duration `yaml:"timeout,omitempty" json:"timeout,omitempty"`
	// Rise is how many good probes in a row bring a backend up; default 2.
	Rise int `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"minimum=1,maximum=100,default=2"`
	// Fall is how many bad probes in a row take a backend down; default 3.
	Fall int `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"minimum=1,maximum=100,default=3"`
	// Jitter spreads probes by up to this part of Interval, 0 to 0.5; default 0.1.
	Jitter *float64 `yaml:"jitter,omitempty" json:"jitter,omitempty"`
	// Initial is the state before the first probe ended: down (default) or up.
	Initial string `yaml:"initial,omitempty" json:"initial,omitempty" jsonschema:"enum=up,enum=down,default=down"`

	// Path, Host, Method and Headers of an http(s) request; default GET /.
	Path    string            `yaml:"path,omitempty" json:"path,omitempty"`
	Host    string            `yaml:"host,omitempty" json:"host,omitempty"`
	Method  string            `yaml:"method,omitempty" json:"method,omitempty"`
	Headers map[string]string `yaml:"headers,omitempty" json:"headers,omitempty"`
	// Status lists the good statuses ("200", "200-399"); default 200-399.
	Status []string `yaml:"status,omitempty" json:"status,omitempty"`
	// Body must occur in the first 64 KiB of the answer.
	Body string `yaml:"body,omitempty" json:"body,omitempty"`
	// InsecureSkipVerify accepts any certificate of an https backend.
	InsecureSkipVerify bool `yaml:"insecure-skip-verify,omitempty" json:"insecure-skip-verify,omitempty"`

	// Send and Expect are the payload and the answer's beginning for tcp and udp.
	Send   string `yaml:"send,omitempty" json:"send,omitempty"`
	Expect string `yaml:"expect,omitempty" json:"expect,omitempty"`
	// Query and QueryType of a dns probe; default "." and NS.
	Query     string `yaml:"query,omitempty" json:"query,omitempty"`
	QueryType string `yaml:"query-type,omitempty" json:"query-type,omitempty"`
	// Command of an exec probe: program and arguments, run without a shell; the
	// backend is in SLUICE_SERVICE, SLUICE_BACKEND, SLUICE_ADDRESS, SLUICE_PORT.
	Command []string `yaml:"command,omitempty" json:"command,omitempty"`
	// Via is the path of the probe: direct asks the backend's own address,
	// service (dsr, tunnel) sends it as the datapath would.
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
