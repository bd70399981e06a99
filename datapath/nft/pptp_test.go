// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// pptpMessage returns a control message. Its body begins with the given fields, and is zero after them.
func pptpMessage(kind uint16, size int, fields ...uint16) []byte {
	m := binary.BigEndian.AppendUint16(nil, uint16(size))
	m = binary.BigEndian.AppendUint16(m, 1)          // control message
	m = binary.BigEndian.AppendUint32(m, 0x1a2b3c4d) // magic cookie
	m = binary.BigEndian.AppendUint16(m, kind)
	m = binary.BigEndian.AppendUint16(m, 0)
	for _, f := range fields {
		m = binary.BigEndian.AppendUint16(m, f)
	}
	return append(m, make([]byte, size-len(m))...)
}

// pptp makes a call (RFC 2637 sections 2.1, 2.2, 2.7, 2.8) and sends a packet
// through its tunnel each way, by the other side's number of the call.
func (p *peers) pptp() error {
	client, server, err := p.streams()
	if err != nil {
		return err
	}
	const clientCall, serverCall = 17, 42
	tell := func(from, to net.Conn, message []byte) (callID uint16, err error) {
		if _, err := from.Write(message); err != nil {
			return 0, err
		}
		got := make([]byte, len(message))
		if _, err := io.ReadFull(to, got); err != nil {
			return 0, err
		}
		return binary.BigEndian.Uint16(got[12:]), nil
	}
	const connected = 1 << 8 // the result is the upper half of its field
	if _, err := tell(client, server, pptpMessage(pptpStartRequest, 156, 0x100)); err != nil {
		return err
	}
	if _, err := tell(server, client, pptpMessage(pptpStartReply, 156, 0x100, connected)); err != nil {
		return err
	}
	theirs, err := tell(client, server, pptpMessage(pptpCallRequest, 168, clientCall)) // the helper gives it another number
	if err != nil {
		return err
	}
	ours, err := tell(server, client, pptpMessage(pptpCallReply, 32, serverCall, theirs, connected))
	if err != nil {
		return err
	}
	tunnel, err := p.packet("outside", "ip4:47", caller)
	if err != nil {
		return err
	}
	far, err := p.packet("ftp", "ip4:47", helped)
	if err != nil {
		return err
	}
	gre := func(call uint16) []byte { // enhanced GRE (RFC 2637 section 4.1) with key and sequence number
		g := []byte{0x30, 0x01, 0x88, 0x0b, 0, 5}
		return append(binary.BigEndian.AppendUint16(g, call), "\x00\x00\x00\x01frame"...)
	}
	_, from, err := pass(tunnel, &net.IPAddr{IP: addr(published).AsSlice()}, gre(ours), far)
	if err != nil {
		return fmt.Errorf("tunnel to the server: %w", err)
	}
	packet, from, err := pass(far, from, gre(theirs), tunnel)
	if err != nil {
		return fmt.Errorf("tunnel to the client: %w", err)
	}
	if from.String() != published || !bytes.Equal(packet, gre(clientCall)) {
		return fmt.Errorf("tunnel to the client: from %s: % x", from, packet)
	}
	return nil
}
