// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"fmt"
	"strings"
	"time"
)

// Object is a named counter, a helper, connection timeouts, or a flowtable.
type Object struct {
	ID
	Kind     ObjectKind
	Helper   string // helper's name in the kernel: ftp, sip, ...
	Protocol uint8  // of a helper or of timeouts
	Devices  string // of a flowtable, sorted and separated by spaces
	// Policy holds timeouts: netlink attributes of NFTA_CT_TIMEOUT_DATA, each with a state and its seconds. Other
	// states use the kernel's sysctls.
	Policy string
	// Text is the policy in nft's syntax; empty for Read.
	Text string
	// Read marks an object read from the kernel, with a Policy that contains every state.
	Read bool
}

// ObjectKind is the kernel's NFT_OBJECT_*. Flowtables, which are a separate kind in the kernel, have the number 0.
type ObjectKind uint32

// Kinds of object.
const (
	ObjectFlowtable ObjectKind = 0
	ObjectCounter   ObjectKind = 1
	ObjectHelper    ObjectKind = 3
	ObjectTimeout   ObjectKind = 7
)

// String returns nft's keyword for the kind.
func (k ObjectKind) String() string {
	switch k {
	case ObjectFlowtable:
		return "flowtable"
	case ObjectHelper:
		return "ct helper"
	case ObjectTimeout:
		return "ct timeout"
	}
	return "counter"
}

// Equal reports whether the two objects have the same effect. The policy of an object read from the kernel may
// contain more states.
func (o *Object) Equal(p *Object) bool {
	a, b := *o, *p
	if a.Read {
		a, b = b, a
	}
	same := a.Policy == b.Policy || b.Read && contains(b.Policy, a.Policy)
	a.Policy, a.Text, a.Read = "", "", false
	b.Policy, b.Text, b.Read = "", "", false
	return same && a == b
}

// Timeout is the idle time of a connection in a state. States are numbered by the kernel's enum ctattr_timeout_* of
// the protocol.
type Timeout struct {
	State uint16
	Name  string // in nft's syntax
	After time.Duration
}

// NewTimeout returns the object of a protocol's timeouts; the kernel uses whole seconds.
func NewTimeout(id ID, protocol uint8, timeouts ...Timeout) *Object {
	var a Attrs
	var text []string
	for _, t := range timeouts {
		a.Uint32(t.State, uint32(t.After/time.Second))
		text = append(text, fmt.Sprintf("%s : %d", t.Name, t.After/time.Second))
	}
	return &Object{ID: id, Kind: ObjectTimeout, Protocol: protocol, Policy: string(a), Text: strings.Join(text, ", ")}
}

// String formats the object like nft.
func (o *Object) String() string {
	switch o.Kind {
	case ObjectFlowtable:
		return fmt.Sprintf("\tflowtable %s {\n\t\thook ingress priority filter + 10\n\t\tdevices = { %s }\n\t}\n\n",
			o.Name, strings.ReplaceAll(o.Devices, " ", ", "))
	case ObjectHelper:
		return fmt.Sprintf("\tct helper %s {\n\t\ttype %q protocol %s\n\t}\n\n", o.Name, o.Helper, InetProto.render([]byte{o.Protocol}))
	case ObjectTimeout:
		return fmt.Sprintf("\tct timeout %s {\n\t\tprotocol %s\n\t\tpolicy = { %s }\n\t}\n\n", o.Name, InetProto.render([]byte{o.Protocol}), o.Text)
	}
	return fmt.Sprintf("\tcounter %s {\n\t}\n\n", o.Name)
}
