// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// PortSet is one or several port ranges, such as a MAP-E port set (RFC 7597). An empty set means
// every port. In YAML and JSON one range, or a list of ranges.
type PortSet []flow.Ports

// maxRanges is the maximum number of ranges of a PortSet.
const maxRanges = 1024

// Span is the range from the lowest port to the highest.
func (s PortSet) Span() (all flow.Ports) {
	for i, r := range s {
		if i == 0 {
			all = r
		}
		all = flow.Ports{First: min(all.First, r.First), Last: max(all.Last, r.Last)}
	}
	return all
}

// Contains reports whether a port is in the set.
func (s PortSet) Contains(port uint16) bool {
	return len(s) == 0 || slices.ContainsFunc(s, func(r flow.Ports) bool { return r.Contains(port) })
}

// Len returns the number of ports in the set.
func (s PortSet) Len() (n int) {
	if len(s) == 0 {
		return flow.Ports{}.Len()
	}
	for _, r := range s {
		n += r.Len()
	}
	return n
}

// String returns the set in the form "5136-5151,9232-9247".
func (s PortSet) String() string {
	words := make([]string, len(s))
	for i, r := range s {
		words[i] = r.String()
	}
	return strings.Join(words, ",")
}

// MarshalJSON writes one range, or a list.
func (s PortSet) MarshalJSON() ([]byte, error) {
	if len(s) == 1 {
		return json.Marshal(s[0])
	}
	return json.Marshal([]flow.Ports(s))
}

// UnmarshalJSON is the inverse of MarshalJSON.
func (s *PortSet) UnmarshalJSON(b []byte) error {
	var one flow.Ports
	if json.Unmarshal(b, &one) == nil {
		*s = PortSet{one}
		return nil
	}
	if json.Unmarshal(b, (*[]flow.Ports)(s)) != nil {
		return errors.New("ports: neither a range nor a list of ranges")
	}
	return nil
}

// portSet checks that no range of a NAT rule overlaps another one.
func (v *validator) portSet(p path, r *NATRule) {
	pp := p.key("ports")
	if len(r.Ports) > maxRanges {
		v.errorf(pp, "write fewer, or make several rules", "%d ranges are more than %d", len(r.Ports), maxRanges)
		return
	}
	for i, a := range r.Ports {
		for _, b := range r.Ports[:i] {
			if a.Overlaps(b) {
				v.errorf(pp.index(i), "write each port once", "ports %s overlap %s", a, b)
				break
			}
		}
	}
	if len(r.Ports) > 1 && r.PortBlock > 0 {
		v.errorf(p.key("port-block"), "remove it, or keep one range", "port-block divides one range of ports, and there are %d", len(r.Ports)).atKey = true
	}
}
