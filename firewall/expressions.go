// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// undecodedExpr is an undecoded expression of a rule. It may be a condition, and may write to any register.
type undecodedExpr struct {
	expr.Any // nil: satisfies the interface and is never called
	name     string
	err      error // the decoding error; nil if this package does not need the expression
}

// errUnknown is the error for an expression of a newer kernel.
var errUnknown = errors.New("an expression that is not known here")

// expressions returns a new value for each decoded expression, by the kernel's name.
var expressions = map[string]func() expr.Any{
	"bitwise":      func() expr.Any { return &expr.Bitwise{} },
	"cmp":          func() expr.Any { return &expr.Cmp{} },
	"connlimit":    func() expr.Any { return &expr.Connlimit{} },
	"counter":      func() expr.Any { return &expr.Counter{} },
	"dynset":       func() expr.Any { return &expr.Dynset{} },
	"exthdr":       func() expr.Any { return &expr.Exthdr{} },
	"fib":          func() expr.Any { return &expr.Fib{} },
	"flow_offload": func() expr.Any { return &expr.FlowOffload{} },
	"hash":         func() expr.Any { return &expr.Hash{} },
	"immediate":    func() expr.Any { return &expr.Immediate{} },
	"limit":        func() expr.Any { return &expr.Limit{} },
	"log":          func() expr.Any { return &expr.Log{} },
	"lookup":       func() expr.Any { return &expr.Lookup{} },
	"masq":         func() expr.Any { return &expr.Masq{} },
	"match":        func() expr.Any { return &expr.Match{} },
	"meta":         func() expr.Any { return &expr.Meta{} },
	"nat":          func() expr.Any { return &expr.NAT{} },
	"numgen":       func() expr.Any { return &expr.Numgen{} },
	"payload":      func() expr.Any { return &expr.Payload{} },
	"queue":        func() expr.Any { return &expr.Queue{} },
	"quota":        func() expr.Any { return &expr.Quota{} },
	"range":        func() expr.Any { return &expr.Range{} },
	"redir":        func() expr.Any { return &expr.Redir{} },
	"reject":       func() expr.Any { return &expr.Reject{} },
	"socket":       func() expr.Any { return &expr.Socket{} },
	"synproxy":     func() expr.Any { return &expr.SynProxy{} },
	"target":       func() expr.Any { return &expr.Target{} },
}

// unasked are known expressions with attributes that this package does not need.
var unasked = map[string]bool{
	"byteorder": true, "dup": true, "fwd": true, "inner": true, "last": true, "osf": true, "rt": true, "tproxy": true,
	"tunnel": true, "xfrm": true, "secmark": true,
}

// decode decodes an expression from its name and attributes. from is the map that selects an object, if any.
func decode(family byte, b []byte) (e expr.Any, from string) {
	name, data, err := split(b)
	if err != nil {
		return &undecodedExpr{name: name, err: err}, ""
	}
	switch name {
	case "notrack": // notrack has no attributes to decode
		return &expr.Notrack{}, ""
	case "ct":
		return decodeCt(data), ""
	case "objref":
		return decodeObjref(data)
	}
	if unasked[name] {
		return &undecodedExpr{name: name}, ""
	}
	make, known := expressions[name]
	if !known {
		return &undecodedExpr{name: name, err: errUnknown}, ""
	}
	e = make()
	if err := expr.Unmarshal(family, data, e); err != nil {
		return &undecodedExpr{name: name, err: err}, ""
	}
	// An immediate in the verdict register contains a verdict and no data.
	if i, is := e.(*expr.Immediate); is && i.Register == unix.NFT_REG_VERDICT && len(i.Data) == 0 {
		v := &expr.Verdict{}
		if err := expr.Unmarshal(family, data, v); err != nil {
			return &undecodedExpr{name: name, err: err}, ""
		}
		return v, ""
	}
	return e, ""
}

// split splits an expression into its name and its attributes.
func split(b []byte) (name string, data []byte, err error) {
	a, err := mdnetlink.NewAttributeDecoder(b)
	if err != nil {
		return "", nil, err
	}
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_EXPR_NAME:
			name = a.String()
		case unix.NFTA_EXPR_DATA:
			data = bytes.Clone(a.Bytes())
		}
	}
	return name, data, a.Err()
}

// decodeCt decodes attributes that the library does not support: the direction, which is one byte, and a source
// register.
func decodeCt(data []byte) expr.Any {
	a, err := mdnetlink.NewAttributeDecoder(data)
	if err != nil {
		return &undecodedExpr{name: "ct", err: err}
	}
	a.ByteOrder = binary.BigEndian
	e := &expr.Ct{}
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_CT_KEY:
			e.Key = expr.CtKey(a.Uint32())
		case unix.NFTA_CT_DIRECTION:
			e.Direction = uint32(a.Uint8())
		case unix.NFTA_CT_DREG:
			e.Register = a.Uint32()
		case unix.NFTA_CT_SREG:
			e.Register, e.SourceRegister = a.Uint32(), true
		}
	}
	if err := a.Err(); err != nil {
		return &undecodedExpr{name: "ct", err: err}
	}
	return e
}

// decodeObjref decodes a reference to an object, or to a map of objects.
func decodeObjref(data []byte) (e expr.Any, from string) {
	a, err := mdnetlink.NewAttributeDecoder(data)
	if err != nil {
		return &undecodedExpr{name: "objref", err: err}, ""
	}
	a.ByteOrder = binary.BigEndian
	ref := &expr.Objref{}
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_OBJREF_IMM_TYPE:
			ref.Type = int(a.Uint32())
		case unix.NFTA_OBJREF_IMM_NAME:
			ref.Name = a.String()
		case unix.NFTA_OBJREF_SET_NAME:
			from = a.String()
		}
	}
	if err := a.Err(); err != nil {
		return &undecodedExpr{name: "objref", err: err}, ""
	}
	return ref, from
}
