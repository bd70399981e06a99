// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// helperList has the protocols and the server port of each conntrack helper of the kernel.
var helperList = map[Helper]struct {
	protocols []flow.Protocol
	port      uint16
}{
	"ftp": {[]flow.Protocol{flow.TCP}, 21}, "tftp": {[]flow.Protocol{flow.UDP}, 69}, "sip": {[]flow.Protocol{flow.UDP, flow.TCP}, 5060},
	"pptp": {[]flow.Protocol{flow.TCP}, 1723}, "snmp": {[]flow.Protocol{flow.UDP}, 162}, "amanda": {[]flow.Protocol{flow.UDP}, 10080},
	"irc": {[]flow.Protocol{flow.TCP}, 6667},
}

// Protocols returns the protocols of a helper; none for an unknown helper.
func (h Helper) Protocols() []flow.Protocol { return helperList[h].protocols }

// Port returns the server port of the helper's protocol.
func (h Helper) Port() uint16 { return helperList[h].port }

// HelperFor returns the helper for connections to a port, or "".
func HelperFor(p flow.Protocol, port uint16) Helper {
	for h, of := range helperList {
		if of.port == port && slices.Contains(of.protocols, p) {
			return h
		}
	}
	return ""
}
