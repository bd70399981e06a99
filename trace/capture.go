// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/packet"
)

// Capture writes sampled packets to a pcapng file. The comment of each packet is the cause of its drop.
// Packets without an Ethernet header get a header of zeros, because the file has the link type Ethernet.
type Capture struct {
	w    *packet.CaptureWriter
	boot time.Time // wall clock time at CLOCK_MONOTONIC zero
}

// NewCapture begins a file on w.
func NewCapture(w io.Writer) (*Capture, error) {
	c, err := packet.NewCaptureWriter(w)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return &Capture{w: c, boot: time.Now().Add(-time.Duration(now.Nano()))}, nil
}

// Write adds one packet. namespace is the name for the sample's Netns.
func (c *Capture) Write(s *DropSample, cause Cause, namespace string) error {
	frame := s.Data
	length := s.whole
	if s.L3Offset == 0 {
		frame = append(make([]byte, ethernetHeader), s.Data...)
		frame[12], frame[13] = byte(s.EthType>>8), byte(s.EthType)
		length += ethernetHeader
	}
	comment := fmt.Sprintf("%s: %s %s at %s", cause.Title, s.Reason, s.Hook, s.Location)
	if s.Original.IsValid() {
		comment += fmt.Sprintf("; before NAT %s, answers %s", s.Original, s.Reply)
	}
	err := c.w.Write(packet.Frame{
		Interface: namespace + "/" + s.Interface, Time: c.boot.Add(s.Time),
		Bytes: frame, Length: max(length, len(frame)), Comment: comment,
	})
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

// ethernetHeader is the length of an Ethernet header without VLAN tag.
const ethernetHeader = 14

// CaptureTo makes the watcher write its samples to a new pcapng file, which replaces an existing one. closeFile returns
// the last error of the writes and of closing the file; call it after [Watcher.Stop].
func (w *Watcher) CaptureTo(path string) (closeFile func() error, err error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	c, err := NewCapture(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	names := map[uint64]string{}
	for _, ns := range w.Namespaces {
		names[ns.Inode] = ns.Name
	}
	var mu sync.Mutex // protects failed
	var failed error
	w.OnSample = func(s *DropSample, cause Cause) {
		if err := c.Write(s, cause, names[uint64(s.Netns)]); err != nil {
			mu.Lock()
			failed = err
			mu.Unlock()
		}
	}
	return func() error {
		mu.Lock()
		defer mu.Unlock()
		return errors.Join(failed, file.Close())
	}, nil
}
