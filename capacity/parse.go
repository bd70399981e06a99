// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/sluice-lb/sluice/flow"
)

// DecodeLoad reads a load from YAML. Unknown keys are errors. It does not validate the values; [For] does.
func DecodeLoad(text []byte) (load Load, err error) {
	err = yaml.UnmarshalWithOptions(text, &load, yaml.Strict())
	return load, err
}

// ParseClass reads CLIENTSxCONNECTIONS, such as 30x400, optionally after NAME=. Without a name it is called "class N", with N
// counted from 1; i is its index in a list, from 0.
func ParseClass(text string, i int) (c Class, err error) {
	name, numbers, named := strings.Cut(text, "=")
	if !named {
		name, numbers = fmt.Sprintf("class %d", i+1), text
	}
	clients, each, ok := strings.Cut(numbers, "x")
	c.Name = name
	var bad [2]error
	c.Clients, bad[0] = strconv.ParseUint(clients, 10, 32)
	c.Connections, bad[1] = strconv.ParseUint(each, 10, 32)
	if !ok || bad[0] != nil || bad[1] != nil {
		return c, fmt.Errorf("%s: want CLIENTSxCONNECTIONS, such as 30x400", text)
	}
	return c, nil
}

// ParseRequests reads [PROTOCOL:]RATE/s[:LIFETIME[:LINGER]], such as 800/s:2s:120s. The protocol is tcp (default) or udp.
func ParseRequests(text string) (r Requests, err error) {
	bad := func() (Requests, error) {
		return r, fmt.Errorf("%s: want [udp:]RATE/s[:LIFETIME[:LINGER]], such as 800/s:2s", text)
	}
	parts := strings.Split(text, ":")
	r.Name, r.Protocol = text, flow.TCP
	if p, err := flow.ParseProtocol(parts[0]); err == nil && p.HasPorts() {
		r.Protocol, parts = p, parts[1:]
	}
	if len(parts) == 0 || len(parts) > 3 {
		return bad()
	}
	rate, ok := strings.CutSuffix(parts[0], "/s")
	if r.Rate, err = strconv.ParseFloat(rate, 64); err != nil || !ok {
		return bad()
	}
	for i, to := range []*time.Duration{&r.Lifetime, &r.Linger} {
		if len(parts) > i+1 {
			if *to, err = time.ParseDuration(parts[i+1]); err != nil {
				return bad()
			}
		}
	}
	return r, nil
}
