// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// CaptureWriter writes frames as a pcapng file (draft-ietf-opsawg-pcapng) for Wireshark and tcpdump. It is not safe
// for concurrent use.
type CaptureWriter struct {
	w          io.Writer
	interfaces map[string]uint32
	buffer     []byte
}

// Block types and option codes of pcapng.
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockPacket    = 6
	byteOrderMagic = 0x1a2b3c4d
	optionEnd      = 0
	optionComment  = 1
	optionName     = 2
	optionTicks    = 9 // if_tsresol
	linkEthernet   = 1
	snapLength     = 262144
	application    = 4 // shb_userappl
)

// NewCaptureWriter begins a capture file on w.
func NewCaptureWriter(w io.Writer) (*CaptureWriter, error) {
	c := &CaptureWriter{w: w, interfaces: map[string]uint32{}}
	body := binary.LittleEndian.AppendUint32(nil, byteOrderMagic)
	body = append(body, 1, 0, 0, 0) // version 1.0
	body = binary.LittleEndian.AppendUint64(body, ^uint64(0))
	body = appendOption(body, application, []byte("sluice"))
	body = appendOption(body, optionEnd, nil)
	return c, c.block(blockSection, body)
}

// Frame is one captured frame.
type Frame struct {
	Interface string
	Time      time.Time
	Bytes     []byte
	Length    int    // On the wire; 0 means len(Bytes).
	Comment   string // Displayed by Wireshark, for example the drop's reason.
}

// Write appends a frame. It describes an interface at its first frame.
func (c *CaptureWriter) Write(f Frame) error {
	id, ok := c.interfaces[f.Interface]
	if !ok {
		id = uint32(len(c.interfaces))
		body := binary.LittleEndian.AppendUint32(nil, linkEthernet)
		body = binary.LittleEndian.AppendUint32(body, snapLength)
		body = appendOption(body, optionName, []byte(f.Interface))
		body = appendOption(body, optionTicks, []byte{9}) // nanoseconds
		body = appendOption(body, optionEnd, nil)
		if err := c.block(blockInterface, body); err != nil {
			return err
		}
		c.interfaces[f.Interface] = id
	}
	ns := uint64(f.Time.UnixNano())
	length := max(f.Length, len(f.Bytes))
	body := binary.LittleEndian.AppendUint32(nil, id)
	body = binary.LittleEndian.AppendUint32(body, uint32(ns>>32))
	body = binary.LittleEndian.AppendUint32(body, uint32(ns))
	body = binary.LittleEndian.AppendUint32(body, uint32(len(f.Bytes)))
	body = binary.LittleEndian.AppendUint32(body, uint32(length))
	body = pad4(append(body, f.Bytes...))
	if f.Comment != "" {
		body = appendOption(body, optionComment, []byte(f.Comment))
		body = appendOption(body, optionEnd, nil)
	}
	return c.block(blockPacket, body)
}

func (c *CaptureWriter) block(kind uint32, body []byte) error {
	total := uint32(12 + len(body))
	b := binary.LittleEndian.AppendUint32(c.buffer[:0], kind)
	b = binary.LittleEndian.AppendUint32(b, total)
	b = append(b, body...)
	c.buffer = binary.LittleEndian.AppendUint32(b, total)
	if _, err := c.w.Write(c.buffer); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

func appendOption(b []byte, code uint16, value []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return pad4(append(b, value...))
}

func pad4(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}
