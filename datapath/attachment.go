// SPDX-License-Identifier: Apache-2.0

package datapath

// Attachment is how a datapath meets the packets that arrive by an interface.
type Attachment struct {
	Interface string
	Kind      string // the driver's kind of a virtual link, "device" for hardware
	// Hooks in the order in which a packet meets them: xdp, xdp-generic, tc. None: what
	// arrives is left to the kernel.
	Hooks []string
	// Why it is not native XDP alone, in words; "" when it is, or when the configuration
	// asks for the hook.
	Why string
}

// Attacher is a Datapath that is attached to interfaces.
type Attacher interface {
	// Attachments lists the interfaces that are up, loopbacks excepted.
	Attachments() []Attachment
}
