// SPDX-License-Identifier: Apache-2.0

package datapath

// Attachment describes how a datapath receives the packets of an interface.
type Attachment struct {
	Interface string
	Kind      string // the driver's kind of a virtual link, "device" for hardware
	// Hooks in packet order: xdp, xdp-generic, tc. Empty: the kernel alone handles the packets.
	Hooks []string
	// Why explains why it is not native XDP alone; "" if it is, or if the configuration selects the hook.
	Why string
}

// Attacher is a Datapath with programs on interfaces.
type Attacher interface {
	// Attachments returns the interfaces that are up, except loopbacks.
	Attachments() []Attachment
}
