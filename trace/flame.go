// SPDX-License-Identifier: Apache-2.0

package trace

import (
	_ "embed"
	"fmt"
	"html"
	"io"
	"maps"
	"slices"
	"strings"
)

// flameScript makes the picture react: a click zooms, the search box marks.
//
//go:embed flame.js
var flameScript string

// Sizes of the picture in pixels.
const (
	flameWidth  = 1200
	flameRow    = 17
	flameTop    = 64
	flameMargin = 10
	flameChar   = 6.7 // mean width of a character at 11 px
	flameMin    = 0.2 // narrower boxes are left out
)

// flameNode is a function in the tree of stacks, outermost at the root.
type flameNode struct {
	name     string
	samples  uint64
	phases   map[string]uint64 // samples by phase of the stacks through here
	children map[string]*flameNode
}

func (n *flameNode) child(name string) *flameNode {
	c := n.children[name]
	if c == nil {
		c = &flameNode{name: name, phases: map[string]uint64{}, children: map[string]*flameNode{}}
		n.children[name] = c
	}
	return c
}

// WriteFlameGraph draws the profile as one SVG file that needs nothing else: the
// colour of a box is that of the phase that most of its samples belong to. Idle
// time is left out.
func (p *Profile) WriteFlameGraph(w io.Writer) error {
	root := &flameNode{name: "all", phases: map[string]uint64{}, children: map[string]*flameNode{}}
	colors := map[string]string{}
	for _, s := range p.Stacks {
		if s.Phase.Name == phaseIdle.Name {
			continue
		}
		colors[s.Phase.Name] = s.Phase.Color
		path := []string{s.Program}
		if len(s.Frames) == 0 {
			path = append(path, "["+s.Phase.Name+"]")
		}
		for _, f := range slices.Backward(s.Frames) {
			path = append(path, f)
		}
		node := root
		node.samples += s.Samples
		for _, name := range path {
			node = node.child(name)
			node.samples += s.Samples
			node.phases[s.Phase.Name] += s.Samples
		}
	}
	depth := root.depth(float64(flameWidth-2*flameMargin) / float64(max(root.samples, 1)))
	legend := p.legend(colors)
	height := flameTop + depth*flameRow + 40 + (len(legend)+3)/4*20
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" version="1.1" width="%d" height="%d" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="11">`+"\n",
		flameWidth, height, flameWidth, height)
	fmt.Fprintf(&b, `<title>CPU time of the network stack</title>
<rect width="100%%" height="100%%" fill="#ffffff"/>
<text x="%d" y="22" font-size="16">CPU time by kernel stack: %d samples at %d/s on %d CPUs, %.1f s</text>
<text x="%d" y="42" id="details" fill="#555555">%s</text>
<text x="%d" y="22" id="reset" text-anchor="end" fill="#1f5fa8" style="cursor:pointer;display:none">show all</text>
<text x="%d" y="42" id="search" text-anchor="end" fill="#1f5fa8" style="cursor:pointer" tabindex="0" role="button">search (/)</text>
<g id="frames">
`, flameMargin, root.samples, p.Rate, p.CPUs, p.Window.Seconds(), flameMargin, html.EscapeString(p.summary()), flameWidth-flameMargin, flameWidth-flameMargin)
	f := flamePainter{w: &b, colors: colors, scale: float64(flameWidth-2*flameMargin) / float64(max(root.samples, 1)), total: root.samples, bottom: flameTop + depth*flameRow}
	f.draw(root, flameMargin, 0)
	b.WriteString("</g>\n")
	for i, line := range legend {
		x, y := flameMargin+i%4*295, flameTop+depth*flameRow+30+i/4*20
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="12" height="12" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n",
			x, y-10, line[0], x+18, y, html.EscapeString(line[1]))
	}
	fmt.Fprintf(&b, "<script><![CDATA[\n%s]]></script>\n</svg>\n", flameScript)
	_, err := io.WriteString(w, b.String())
	return err
}

// depth counts the rows that are wide enough to be seen.
func (n *flameNode) depth(scale float64) int {
	deepest := 0
	for _, c := range n.children {
		if float64(c.samples)*scale >= flameMin {
			deepest = max(deepest, c.depth(scale))
		}
	}
	return deepest + 1
}

// summary is the line under the title.
func (p *Profile) summary() string {
	if p.Packets == 0 {
		return "click a box to zoom"
	}
	return fmt.Sprintf("%d %s; click a box to zoom", p.Packets, p.Counted)
}

// legend lists phases with colour and text, the largest first.
func (p *Profile) legend(colors map[string]string) [][2]string {
	var out [][2]string
	for _, s := range p.Phases {
		if _, drawn := colors[s.Phase]; !drawn {
			continue
		}
		text := fmt.Sprintf("%s %.1f %%", s.Phase, 100*s.Share)
		if s.Network && s.MicrosPerPacket > 0 {
			text += fmt.Sprintf(", %.2f µs/packet", s.MicrosPerPacket)
		}
		out = append(out, [2]string{s.Color, text})
	}
	return out
}

type flamePainter struct {
	w      *strings.Builder
	colors map[string]string
	scale  float64
	total  uint64
	bottom int
}

// draw writes a node and its children, which stand on it.
func (f *flamePainter) draw(n *flameNode, x float64, level int) {
	width := float64(n.samples) * f.scale
	if width < flameMin {
		return
	}
	phase, most := "", uint64(0)
	for _, name := range slices.Sorted(maps.Keys(n.phases)) {
		if n.phases[name] > most {
			phase, most = name, n.phases[name]
		}
	}
	color := f.colors[phase]
	if color == "" {
		color = phaseOther.Color
	}
	y := f.bottom - (level+1)*flameRow
	label := ""
	if fit := int(width / flameChar); fit >= 3 {
		label = n.name
		if len(label) > fit {
			label = label[:fit-2] + ".."
		}
	}
	name := html.EscapeString(n.name)
	fmt.Fprintf(f.w, `<g class="f" data-n="%s"><title>%s: %d samples, %.2f %%, %s</title><rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s" stroke="#ffffff" stroke-width="0.5"/><text x="%.1f" y="%d">%s</text></g>`+"\n",
		name, name, n.samples, 100*float64(n.samples)/float64(max(f.total, 1)), html.EscapeString(phase), x, y, width, flameRow-1, color, x+3, y+12, html.EscapeString(label))
	for _, key := range slices.Sorted(maps.Keys(n.children)) {
		c := n.children[key]
		f.draw(c, x, level+1)
		x += float64(c.samples) * f.scale
	}
}
