// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Message types and attributes of ctnetlink; names and numbers from
// linux/netfilter/nfnetlink_conntrack.h.
const (
	msgNew         = 0
	msgGet         = 1
	msgDelete      = 2
	msgGetStatsCPU = 4
	msgGetStats    = 5

	ctaTupleOrig    = 1
	ctaTupleReply   = 2
	ctaStatus       = 3
	ctaProtoInfo    = 4
	ctaHelp         = 5
	ctaNATSource    = 6
	ctaTimeout      = 7
	ctaMark         = 8
	ctaCountersOrig = 9
	ctaCountersRepl = 10
	ctaID           = 12
	ctaNATDest      = 13
	ctaZone         = 18
	ctaTimestamp    = 20
	ctaMarkMask     = 21
	ctaFilter       = 25
	ctaStatusMask   = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum        = 1
	ctaProtoSrcPort    = 2
	ctaProtoDstPort    = 3
	ctaProtoICMPID     = 4
	ctaProtoICMPType   = 5
	ctaProtoICMPCode   = 6
	ctaProtoICMPv6ID   = 7
	ctaProtoICMPv6Type = 8
	ctaProtoICMPv6Code = 9

	ctaNATv4Min    = 1
	ctaNATv4Max    = 2
	ctaNATProto    = 3
	ctaNATv6Min    = 4
	ctaNATv6Max    = 5
	ctaProtoNATMin = 1
	ctaProtoNATMax = 2

	ctaInfoTCP  = 1
	ctaInfoDCCP = 2
	ctaInfoSCTP = 3
	ctaState    = 1 // First attribute of each of the three.
	ctaTCPFlags = 4 // of the original direction; 5: of the reply (enum ctattr_protoinfo_tcp)

	ctaCounterPackets = 1
	ctaCounterBytes   = 2

	ctaTimeStart = 1
	ctaTimeStop  = 2

	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2

	// Bits of the filter flags (CTA_FILTER_F_* in net/netfilter/nf_conntrack_netlink.c), in the order of their
	// attributes.
	filterIPSrc    = 1 << 0
	filterIPDst    = 1 << 1
	filterProtoNum = 1 << 3
	filterSrcPort  = 1 << 4
	filterDstPort  = 1 << 5

	nested     = 1 << 15
	typeMask   = 1<<14 - 1
	headerLen  = unix.SizeofNlMsghdr
	genericLen = 4 // Struct nfgenmsg.
	attrLen    = 4 // Struct nlattr.
)

var errTruncated = errors.New("conntrack message: attribute runs past its end")

var host = binary.NativeEndian

// request starts a message in b: netlink header and nfgenmsg. finish writes its length.
func request(b []byte, kind, family uint8, flags uint16, seq uint32) []byte {
	b = host.AppendUint32(b, 0)
	b = host.AppendUint16(b, unix.NFNL_SUBSYS_CTNETLINK<<8|uint16(kind))
	b = host.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = host.AppendUint32(b, seq)
	b = host.AppendUint32(b, 0)
	return append(b, family, unix.NFNETLINK_V0, 0, 0)
}

// finish sets the length of the message that starts at offset start.
func finish(b []byte, start int) []byte {
	host.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// attribute appends one attribute with its padding.
func attribute(b []byte, kind uint16, value ...byte) []byte {
	b = host.AppendUint16(b, uint16(attrLen+len(value)))
	b = host.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func attribute16(b []byte, kind uint16, v uint16) []byte {
	return attribute(b, kind, byte(v>>8), byte(v))
}

func attribute32(b []byte, kind uint16, v uint32) []byte {
	return attribute(b, kind, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
}

// openNest opens a nested attribute and returns its offset for closeNest.
func openNest(b []byte, kind uint16) ([]byte, int) {
	return attribute(b, kind|nested), len(b)
}

func closeNest(b []byte, start int) []byte {
	host.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// next splits the first attribute off b. kind is 0 when b is empty; ok is false
// when the attribute is cut short.
func next(b []byte) (kind uint16, value, rest []byte, ok bool) {
	if len(b) < attrLen {
		return 0, nil, nil, len(b) == 0
	}
	n := int(host.Uint16(b))
	if n < attrLen || n > len(b) {
		return 0, nil, nil, false
	}
	kind, value = host.Uint16(b[2:])&typeMask, b[attrLen:n]
	if n = (n + 3) &^ 3; n >= len(b) {
		return kind, value, nil, true
	}
	return kind, value, b[n:], true
}

// message is one netlink message of a datagram.
type message struct {
	kind  uint16 // netlink type
	flags uint16
	seq   uint32
	body  []byte // after the netlink header
}

// nextMessage splits the first message off a datagram. ok is false at its end.
func nextMessage(b []byte) (m message, rest []byte, ok bool, err error) {
	if len(b) < headerLen {
		return m, nil, false, nil
	}
	n := int(host.Uint32(b))
	if n < headerLen || n > len(b) {
		return m, nil, false, fmt.Errorf("netlink message of %d bytes in a datagram of %d", n, len(b))
	}
	m = message{kind: host.Uint16(b[4:]), flags: host.Uint16(b[6:]), seq: host.Uint32(b[8:]), body: b[headerLen:n]}
	return m, b[min((n+3)&^3, len(b)):], true, nil
}

// errno returns the error that an NLMSG_ERROR or NLMSG_DONE message carries.
func (m message) errno() error {
	if len(m.body) < 4 {
		return nil
	}
	if v := int32(host.Uint32(m.body)); v < 0 {
		return unix.Errno(-v)
	}
	return nil
}
