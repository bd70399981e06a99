// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// newLayers returns, by name, an empty layer with the defaults of texts.
var newLayers = map[string]func() Layer{
	"eth": func() Layer { return &Ethernet{} }, "vlan": func() Layer { return &VLAN{} },
	"arp": func() Layer { return &ARP{Operation: 1} },
	"ip4": func() Layer { return &IPv4{TTL: 64} }, "ip6": func() Layer { return &IPv6{HopLimit: 64} },
	"hbh": func() Layer { return &Options6{} }, "dstopts": func() Layer { return &Options6{Destination: true} },
	"routing": func() Layer { return &Routing{} }, "frag": func() Layer { return &Fragment{} },
	"tcp": func() Layer { return &TCP{Window: 65535} }, "udp": func() Layer { return &UDP{} },
	"sctp": func() Layer { return &SCTP{} }, "gue": func() Layer { return &GUE{} },
	"icmp": func() Layer { return &ICMP{} }, "icmp6": func() Layer { return &ICMP{V6: true} },
	"data": func() Layer { return &Data{} }, "ext": func() Layer { return &Extension{} },
	"trailer": func() Layer { return &Trailer{} },
}

// Text parses the text form of a packet.
func Text(s string) (Packet, error) {
	var p Packet
	for _, part := range split(strings.TrimSpace(s), '/') {
		l, err := textLayer(strings.TrimSpace(part))
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", len(p)+1, err)
		}
		p = append(p, l)
	}
	return p, nil
}

// Edit returns p with changed fields. changes has the form of a packet, but lists only changed fields:
// "eth(src=...)/ip4(dst=10.0.0.1)". The nth layer of a name changes the nth layer with that name in p.
func (p Packet) Edit(changes string) (Packet, error) {
	edited, err := Text(p.String()) // makes a deep copy
	if err != nil {
		return nil, err
	}
	seen := map[string]int{}
	for _, part := range split(strings.TrimSpace(changes), '/') {
		name, args, err := splitLayer(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		l := edited.nth(name, seen[name])
		if l == nil {
			return nil, fmt.Errorf("no %s layer number %d in %s", name, seen[name]+1, p)
		}
		seen[name]++
		if err := setFields(l, args); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return edited, nil
}

func (p Packet) nth(name string, n int) Layer {
	for _, l := range p {
		if l.Name() == name {
			if n == 0 {
				return l
			}
			n--
		}
	}
	return nil
}

func textLayer(s string) (Layer, error) {
	name, args, err := splitLayer(s)
	if err != nil {
		return nil, err
	}
	make, ok := newLayers[name]
	if !ok {
		return nil, fmt.Errorf("%q: no such layer", name)
	}
	l := make()
	if err := setFields(l, args); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}

func splitLayer(s string) (name, args string, err error) {
	name, rest, ok := strings.Cut(s, "(")
	args, closed := strings.CutSuffix(rest, ")")
	if ok != closed {
		return "", "", fmt.Errorf("%q: brackets do not match", s)
	}
	return name, args, nil
}

func setFields(l Layer, args string) error {
	for _, arg := range split(args, ',') {
		arg = strings.TrimSpace(arg)
		if arg == "" {
			continue
		}
		key, value, has := strings.Cut(arg, "=")
		f, ok := fieldOf(l, key)
		if !ok {
			if f, ok = fieldOf(l, ""); !ok {
				return fmt.Errorf("%q: no such field", key)
			}
			key, value, has = "", arg, true
		}
		if err := f.set(value, has); err != nil {
			return fmt.Errorf("%s: %w", strings.TrimPrefix(key, "="), err)
		}
	}
	return nil
}

// fieldOf calls fields again for every lookup, because an ICMP message's fields depend on its type.
func fieldOf(l Layer, key string) (field, bool) {
	for _, f := range l.fields() {
		if f.key == key {
			return f, true
		}
	}
	return field{}, false
}

// split cuts s at sep outside of brackets and quotes.
func split(s string, sep byte) []string {
	var parts []string
	depth, start, quoted := 0, 0, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '(' || c == '[':
			depth++
		case c == ')' || c == ']':
			depth--
		case c == sep && depth == 0:
			parts = append(parts, s[start:i])
			start = i + 1
		}
	}
	return append(parts, s[start:])
}

// showData renders a payload in its shortest form.
func showData(b []byte) string {
	switch {
	case bytes.Equal(b, Pattern(len(b))):
		return strconv.Itoa(len(b))
	case printable(b):
		return strconv.Quote(string(b))
	}
	return "0x" + hex.EncodeToString(b)
}

func printable(b []byte) bool {
	for _, c := range b {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return true
}

func readData(s string) ([]byte, error) {
	switch {
	case strings.HasPrefix(s, `"`):
		t, err := strconv.Unquote(s)
		return []byte(t), err
	case strings.HasPrefix(s, "0x"):
		return parseHex(s)
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("%q: not a length, a quoted text or 0x and hexadecimal bytes", s)
	}
	return Pattern(int(n)), nil
}

// Match returns the values in p of the $variables in text: by variable, without quotes. text is a packet or an edit
// in the language of packet cases. The nth layer of a name in text corresponds to the nth layer with that name in p.
func Match(text string, p Packet) map[string]string {
	found := map[string]string{}
	seen := map[string]int{}
	for _, part := range split(text, '/') {
		name, args, err := splitLayer(strings.TrimSpace(part))
		if err != nil {
			return found
		}
		l := p.nth(name, seen[name])
		seen[name]++
		if l == nil {
			continue
		}
		for _, arg := range split(args, ',') {
			key, value, has := strings.Cut(strings.TrimSpace(arg), "=")
			f, ok := fieldOf(l, key)
			if !has || !ok || !strings.HasPrefix(value, "$") {
				continue
			}
			shown := f.show()
			if shown == "" { // a default: the hidden defaults are zeros and the constants of texts
				shown = key + "=" + defaultOf(name, key)
			}
			_, found[value], _ = strings.Cut(shown, "=")
		}
	}
	return found
}

// defaultOf returns the value of a hidden field.
func defaultOf(layer, key string) string {
	switch {
	case key == "ttl" || key == "hl":
		return "64"
	case key == "win":
		return "65535"
	}
	return "0"
}
