// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"fmt"
	"strings"
)

// Diff describes how the frame got differs from want, one field per line ("ip4: want ttl=63, got ttl=64"); "" if they
// are equal. It omits a computed field that is correct in both frames, even if its value differs because of another
// field.
func Diff(want, got []byte) string {
	if bytes.Equal(want, got) {
		return ""
	}
	w, g := Parse(want), Parse(got)
	var out []string
	for i := 0; i < max(len(w), len(g)); i++ {
		if i >= len(w) || i >= len(g) || w[i].Name() != g[i].Name() {
			out = append(out, fmt.Sprintf("layers from %d on: want %s, got %s", i+1, layersFrom(w, i), layersFrom(g, i)))
			break
		}
		for _, d := range diffLayer(w[i], g[i]) {
			out = append(out, w.label(i)+": "+d)
		}
	}
	if len(out) == 0 {
		out = append(out, fmt.Sprintf("bytes: want %x, got %x", want, got))
	}
	return strings.Join(out, "\n")
}

func layersFrom(p Packet, i int) string {
	if i >= len(p) {
		return "nothing"
	}
	return p[i:].String()
}

// label names layer i. Repeated names are numbered from the second on.
func (p Packet) label(i int) string {
	n := 0
	for _, l := range p[:i+1] {
		if l.Name() == p[i].Name() {
			n++
		}
	}
	if n == 1 {
		return p[i].Name()
	}
	return fmt.Sprintf("%s#%d", p[i].Name(), n)
}

func diffLayer(want, got Layer) []string {
	var out []string
	theirs := map[string]field{}
	var order []string
	for _, f := range got.fields() {
		theirs[f.key] = f
		order = append(order, f.key)
	}
	for _, f := range want.fields() {
		o, both := theirs[f.key]
		delete(theirs, f.key)
		switch {
		case !both && f.show() != "":
			out = append(out, "want "+f.show())
		case both && f.show() != o.show():
			out = append(out, fmt.Sprintf("want %s, got %s", shownOr(f), shownOr(o)))
		}
	}
	for _, key := range order {
		if f, ok := theirs[key]; ok && f.show() != "" {
			out = append(out, "got "+f.show())
		}
	}
	return out
}

func shownOr(f field) string {
	switch s := f.show(); {
	case s != "" && f.forced != nil:
		return s + " (not what the packet calls for)"
	case s != "":
		return s
	case f.forced != nil:
		return "right " + f.key
	default:
		return "default " + f.key
	}
}
