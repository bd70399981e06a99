// SPDX-License-Identifier: Apache-2.0

// Package pcp implements a server of the Port Control Protocol, version 2 (RFC 6887), and of its predecessor NAT-PMP
// (RFC 6886). Hosts behind a NAT rule request outside ports, and the datapath maps them.
package pcp

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// Sizes of messages in bytes (RFC 6887 §7, §11.1).
const (
	version    = 2
	minMessage = 2 // shorter messages are not answered (§8.3)
	maxMessage = 1100
	headerSize = 24
	mapSize    = 36 // of opcode MAP, after the header
)

// opcode of a message (§19.2).
type opcode uint8

const (
	announce opcode = iota
	mapOp
	opcodes
)

var opcodeNames = [...]string{"announce", "map"}

// String returns the opcode's name, or "other" for an unsupported one.
func (o opcode) String() string {
	if int(o) < len(opcodeNames) {
		return opcodeNames[o]
	}
	return "other"
}

// result of a request (§7.4).
type result uint8

const (
	success result = iota
	unsuppVersion
	notAuthorized
	malformedRequest
	unsuppOpcode
	unsuppOption
	malformedOption
	networkFailure
	noResources
	unsuppProtocol
	userExQuota
	cannotProvideExternal
	addressMismatch
)

var resultNames = [...]string{"success", "unsupp-version", "not-authorized", "malformed-request", "unsupp-opcode", "unsupp-option",
	"malformed-option", "network-failure", "no-resources", "unsupp-protocol", "user-ex-quota", "cannot-provide-external", "address-mismatch"}

func (r result) String() string { return resultNames[r] }

// lifetime of an error in seconds: the time that a client must wait before the same request (§7.4).
func (r result) lifetime() uint32 {
	switch r {
	case networkFailure, noResources, userExQuota, cannotProvideExternal:
		return 30
	}
	return 1800
}

// Options of requests (§13). Other mandatory options are refused.
const (
	optionPreferFailure = 2
	optionOptional      = 128 // a server may ignore options from this number on
)

type nonce [12]byte

// request is a message from a client. The fields after lifetime belong to MAP.
type request struct {
	opcode        opcode
	lifetime      uint32 // seconds
	nonce         nonce
	protocol      flow.Protocol
	internal      uint16
	external      netip.AddrPort // suggested; address and port may be zero
	preferFailure bool
}

// parse parses a message from an address. Only requests are answered; a result other than success is an error answer.
func parse(b []byte, from netip.Addr) (r request, res result, isRequest bool) {
	if len(b) < minMessage || b[1]&0x80 != 0 {
		return r, success, false
	}
	if b[0] == natpmpVersion {
		return r, success, true
	}
	r.opcode = opcode(b[1])
	if b[0] != version {
		return r, unsuppVersion, true
	}
	if r.opcode >= opcodes {
		return r, unsuppOpcode, true
	}
	body := headerSize
	if r.opcode == mapOp {
		body += mapSize
	}
	if len(b) > maxMessage || len(b)%4 != 0 || len(b) < body {
		return r, malformedRequest, true
	}
	if netip.AddrFrom16([16]byte(b[8:24])).Unmap() != from {
		return r, addressMismatch, true
	}
	r.lifetime = binary.BigEndian.Uint32(b[4:])
	if r.opcode == mapOp {
		m := b[headerSize:]
		copy(r.nonce[:], m)
		r.protocol, r.internal = flow.Protocol(m[12]), binary.BigEndian.Uint16(m[16:])
		r.external = netip.AddrPortFrom(netip.AddrFrom16([16]byte(m[20:36])).Unmap(), binary.BigEndian.Uint16(m[18:]))
	}
	return r, r.options(b[body:]), true
}

// options parses the options after the opcode's data.
func (r *request) options(b []byte) result {
	for len(b) > 0 { // in whole words
		code, size := b[0], int(binary.BigEndian.Uint16(b[2:]))
		whole := 4 + (size+3)/4*4
		switch {
		case whole > len(b):
			return malformedOption
		case code >= optionOptional:
		case code != optionPreferFailure || r.opcode != mapOp:
			return unsuppOption
		case size != 0 || r.preferFailure:
			return malformedOption
		default:
			r.preferFailure = true
		}
		b = b[whole:]
	}
	return success
}

// errorAnswer returns an error answer: a copy of the request with another header.
func errorAnswer(b []byte, res result, lifetime, epoch uint32) []byte {
	size := min(max(len(b), headerSize), maxMessage)
	if res == unsuppVersion {
		size = headerSize // the rest is specific to that version
	}
	out := make([]byte, size)
	copy(out, b)
	header(out, opcode(b[1]), res, lifetime, epoch)
	if res != unsuppVersion && res != malformedRequest {
		clear(out[12:headerSize]) // otherwise it contains the client's data (§7.2)
	}
	return out
}

// header writes all but the last 12 bytes.
func header(out []byte, o opcode, res result, lifetime, epoch uint32) {
	out[0], out[1], out[2], out[3] = version, 0x80|byte(o), 0, byte(res)
	binary.BigEndian.PutUint32(out[4:], lifetime)
	binary.BigEndian.PutUint32(out[8:], epoch)
}

// reply returns the answer to a granted request with the assigned endpoint.
func (r *request) reply(external netip.AddrPort, lifetime, epoch uint32) []byte {
	out := make([]byte, headerSize, headerSize+mapSize+4)
	if r.opcode == mapOp {
		out = append(out, r.nonce[:]...)
		out = append(out, byte(r.protocol), 0, 0, 0)
		out = binary.BigEndian.AppendUint16(out, r.internal)
		out = binary.BigEndian.AppendUint16(out, external.Port())
		address := external.Addr().As16()
		out = append(out, address[:]...)
	}
	if r.preferFailure {
		out = append(out, optionPreferFailure, 0, 0, 0)
	}
	header(out, r.opcode, success, lifetime, epoch)
	return out
}

func (r *request) String() string {
	return fmt.Sprintf("%s %s port %d for %d s, suggesting %s", r.opcode, r.protocol, r.internal, r.lifetime, r.external)
}
