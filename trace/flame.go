// SPDX-License-Identifier: Apache-2.0

package trace

import (
	_ "embed"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/sluice-lb/sluice/svg"
)

// flameScript makes the picture react: a click zooms, the search box marks.
//
//go:embed flame.js
var flameScript string

// Sizes of the picture in pixels.
const (
	flameWidth  = 1200
	flameRow    = 17
	flameTop    = 72
	flameMargin = 10
	flameBoxes  = flameWidth - 2*flameMargin
	flameChar   = 6.7 // Width of a character of a fixed-width font at 11 px, 0.6 em in most.
	flameMin    = 0.2 // Narrower boxes are left out.
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

// WriteFlameGraph draws the profile as one self-contained SVG file. The colour of a box is the
// colour of the phase with most of its samples. Idle time is omitted.
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
	f := flamePainter{colors: colors, scale: flameBoxes / float64(max(root.samples, 1)), total: root.samples}
	depth := root.depth(f.scale)
	f.bottom = flameTop + depth*flameRow
	legend := p.legend(colors)
	height := f.bottom + 40 + (len(legend)+3)/4*20
	f.b = svg.New(flameWidth, height, fmt.Sprintf(`width="%d" height="%d" font-family="system-ui, sans-serif" font-size="11"`, flameWidth, height))
	f.b.Add(`<title>CPU time of the network stack</title>
<text x="%d" y="22" font-size="16">CPU time by kernel stack: %d samples at %d/s on %d CPUs, %.1f s</text>
<text x="%d" y="42" id="details" font-family="monospace" fill="#555555">%s</text>
<g fill="#1f5fa8" cursor="pointer">
<text x="%d" y="60" id="search" style="display:none" tabindex="0" role="button">search (/)</text>
<text x="%d" y="60" id="reset" style="display:none" tabindex="0" role="button">show all (Esc)</text>
</g>
<g id="frames" font-family="monospace" data-width="%d" data-char="%g">`, flameMargin, root.samples, p.Rate, p.CPUs, p.Window.Seconds(), flameMargin, svg.Escape(p.summary()), flameMargin, flameMargin+80, flameBoxes, flameChar)
	f.drawNode(root, 0, 0)
	f.b.Add("</g>")
	for i, line := range legend {
		x, y := flameMargin+i%4*295, f.bottom+30+i/4*20
		f.b.Add(`<rect x="%d" y="%d" width="12" height="12" fill="%s"/><text x="%d" y="%d">%s</text>`,
			x, y-10, line[0], x+18, y, svg.Escape(line[1]))
	}
	f.b.Add("<script><![CDATA[\n%s]]></script>", flameScript)
	_, err := w.Write(f.b.Bytes())
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
func (p *Profile) summary() string { return fmt.Sprintf("%d %s", p.Packets, p.Counted) }

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
	b      *svg.Picture
	colors map[string]string
	scale  float64 // Pixels for each sample.
	total  uint64  // Samples.
	bottom int
}

// drawNode writes a node that begins after the given number of samples, and then its children above it.
// The script computes with samples, because rounded pixels are wrong when magnified.
func (f *flamePainter) drawNode(n *flameNode, start uint64, level int) {
	width := float64(n.samples) * f.scale
	if level == 0 {
		width = flameBoxes // also if there are no samples
	}
	if width < flameMin {
		return
	}
	text, color := fmt.Sprintf("%s: %d samples, %.2f %%", n.name, n.samples, 100*float64(n.samples)/float64(max(f.total, 1))), phaseOther.Color
	if phase := n.phase(); phase != "" {
		text, color = text+", "+phase, f.colors[phase]
	}
	x, y := flameMargin+float64(start)*f.scale, f.bottom-(level+1)*flameRow
	f.b.Add(`<g class="f" data-n="%s" data-x="%d" data-s="%d"><title>%s</title><rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s"/><text x="%.2f" y="%d">%s</text></g>`,
		svg.Escape(n.name), start, n.samples, svg.Escape(text), x, y, width-min(0.5, width/4), flameRow-1, color, x+3, y+12, svg.Escape(cutToWidth(n.name, width-4)))
	for _, key := range slices.Sorted(maps.Keys(n.children)) {
		c := n.children[key]
		f.drawNode(c, start, level+1)
		start += c.samples
	}
}

// phase returns the phase with most samples of the node.
func (n *flameNode) phase() string {
	phase, most := "", uint64(0)
	for _, name := range slices.Sorted(maps.Keys(n.phases)) {
		if n.phases[name] > most {
			phase, most = name, n.phases[name]
		}
	}
	return phase
}

// cutToWidth cuts a name to a width in pixels.
func cutToWidth(name string, width float64) string {
	fit := int(width / flameChar)
	letters := []rune(name)
	switch {
	case fit < 3:
		return ""
	case len(letters) > fit:
		return string(letters[:fit-2]) + ".."
	}
	return name
}
