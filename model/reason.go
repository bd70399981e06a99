// SPDX-License-Identifier: Apache-2.0

package model

// Reason is the cause of an Action. The values equal the names in the eBPF datapath's enum reason,
// in lower case with hyphens. File docs/reference/reasons.md explains each one.
type Reason string

// Reasons of the model. A datapath has further reasons for conditions of a real machine, such as a
// full table or a local socket.
const (
	ReasonFlow                Reason = "flow"
	ReasonNewFlow             Reason = "new-flow"
	ReasonStateless           Reason = "stateless"
	ReasonSYN                 Reason = "syn"
	ReasonSYNACK              Reason = "syn-ack"
	ReasonStatic              Reason = "static"
	ReasonICMPError           Reason = "icmp-error"
	ReasonFragment            Reason = "fragment"
	ReasonNotIP               Reason = "not-ip"
	ReasonNotOurs             Reason = "not-ours"
	ReasonNotRouted           Reason = "not-routed"
	ReasonExcepted            Reason = "excepted"
	ReasonNoNeighbour         Reason = "no-neighbour"
	ReasonToFragment          Reason = "to-fragment"
	ReasonOtherStation        Reason = "other-station"
	ReasonNoRoute             Reason = "no-route"
	ReasonDenied              Reason = "denied"
	ReasonNotAllowed          Reason = "not-allowed"
	ReasonTruncated           Reason = "truncated"
	ReasonBadHeader           Reason = "bad-header"
	ReasonBadChecksum         Reason = "bad-checksum"
	ReasonTTLExceeded         Reason = "ttl-exceeded"
	ReasonTooBig              Reason = "too-big"
	ReasonNoPort              Reason = "no-port"
	ReasonNoAddress           Reason = "no-address"
	ReasonClash               Reason = "clash"
	ReasonClientPorts         Reason = "client-ports"
	ReasonClientFlows         Reason = "client-flows"
	ReasonNoBackend           Reason = "no-backend"
	ReasonLimitRate           Reason = "limit-rate"
	ReasonLimitClientRate     Reason = "limit-client-rate"
	ReasonLimitConnections    Reason = "limit-connections"
	ReasonLimitBackend        Reason = "limit-backend"
	ReasonLimitResets         Reason = "limit-resets"
	ReasonStrictTCP           Reason = "strict-tcp"
	ReasonCookie              Reason = "cookie"
	ReasonBadCookie           Reason = "bad-cookie"
	ReasonFiltered            Reason = "filtered"
	ReasonNoBinding           Reason = "no-binding"
	ReasonNoFlow              Reason = "no-flow"
	ReasonErrorWithoutFlow    Reason = "error-without-flow"
	ReasonOrphanFragment      Reason = "orphan-fragment"
	ReasonHeldFragment        Reason = "held-fragment"
	ReasonToFragment6         Reason = "to-fragment6"
	ReasonLoop                Reason = "loop"
	ReasonUntranslatable      Reason = "untranslatable"
	ReasonUnsupportedProtocol Reason = "unsupported-protocol"
	ReasonUnserved            Reason = "unserved"
	ReasonUnresolved          Reason = "unresolved"
	ReasonRerouted            Reason = "rerouted"
)
