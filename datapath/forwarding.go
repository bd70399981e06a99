// SPDX-License-Identifier: Apache-2.0

package datapath

// Forwards reports the families that the kernel must forward for a snapshot.
func (s *Snapshot) Forwards() (v4, v6 bool) {
	note := func(is4 bool) { v4, v6 = v4 || is4, v6 || !is4 }
	for _, svc := range s.Services {
		for _, l := range svc.Listen {
			if !l.Follows() {
				note(l.Address.Is4())
				continue
			}
			for _, b := range svc.Backends {
				note(b.Address.Is4())
			}
		}
	}
	for _, n := range s.NAT {
		if n.Type.CrossesFamilies() {
			return true, true
		}
		for _, p := range n.Source {
			note(p.Addr().Is4())
		}
		if n.Listen != nil {
			note(n.To.Address.Is4())
		}
		if n.External.IsValid() {
			note(n.External.Addr().Is4())
		}
	}
	return v4, v6
}
