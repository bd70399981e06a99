// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/netdev"
)

var (
	_ datapath.Attacher       = (*Datapath)(nil)
	_ datapath.Warner         = (*Datapath)(nil)
	_ datapath.Adopter        = (*Datapath)(nil)
	_ datapath.ChangeDetector = (*Datapath)(nil)
)

// Attachments implements datapath.Attacher.
func (d *Datapath) Attachments() (list []datapath.Attachment) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.snapshot == nil {
		return nil
	}
	for _, i := range d.lastHost.Interfaces {
		if !i.Up || i.Loopback {
			continue
		}
		at := datapath.Attachment{Interface: i.Name, Kind: i.Kind}
		for _, hook := range []config.Attach{config.AttachXDP, config.AttachXDPGeneric, config.AttachTC} {
			if a := d.attached[attachPoint{i.Index, hook}]; a != nil {
				at.Hooks = append(at.Hooks, string(hook))
			}
		}
		at.Why = d.whyNotXDP(i, at.Hooks)
		list = append(list, at)
	}
	return list
}

// whyNotXDP returns the reason why an interface does not use native XDP alone.
func (d *Datapath) whyNotXDP(i netdev.Interface, hooks []string) string {
	c := d.snapshot.Config
	master, port := i.PortOf(d.lastHost.Interfaces)
	tc := d.attached[attachPoint{i.Index, config.AttachTC}]
	switch {
	case d.unattached[i.Index] != nil:
		return d.unattached[i.Index].Error()
	case len(hooks) == 0 && !i.Ethernet() && !i.Bare():
		return unknownHeaders
	case len(hooks) == 0 && port:
		return fmt.Sprintf("its packets are met at the %s %s", master.Kind, master.Name)
	case len(hooks) == 0:
		return "not among the interfaces of the configuration"
	case len(hooks) > 1:
		return "TC carries new flows and what leaves by " + interfaceNames(d.lastHost.WithoutTransmit(c)) + ", where frames from XDP would be lost"
	case tc == nil || c.Attach == config.AttachTC:
		return ""
	case i.Bare():
		return "its packets have no Ethernet headers, which XDP wants"
	case tc.fallbackErr != nil:
		return tc.fallbackErr.Error()
	case i.Virtual():
		return "behind a virtual link local stacks may leave checksums and segments unfinished, which XDP cannot see"
	}
	return "cards hide the tags of VLANs from XDP: " + interfaceNames(d.lastHost.VlansOf(i))
}
