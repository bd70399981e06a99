// SPDX-License-Identifier: Apache-2.0

// Package svg writes pictures in SVG, with coordinates in pixels.
package svg

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Picture is a picture with a white background.
type Picture struct{ b bytes.Buffer }

// New begins a picture. The attributes of the root element set its font and size; without them, text has 12 pixels and
// the viewer scales the picture to its space.
func New(width, height int, attributes string) *Picture {
	if attributes == "" {
		attributes = `font-family="sans-serif" font-size="12"`
	}
	p := &Picture{}
	p.Add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" %s>`, width, height, attributes)
	p.Add(`<rect width="%d" height="%d" fill="#ffffff"/>`, width, height)
	return p
}

// Add appends elements, as a line.
func (p *Picture) Add(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

// Rect appends a filled rectangle.
func (p *Picture) Rect(x, y, width, height float64, fill string) {
	p.Add(`<rect x="%s" y="%s" width="%s" height="%s" fill="%s"/>`, number(x), number(y), number(width), number(height), fill)
}

// Line appends a line. Without other attributes it is dark.
func (p *Picture) Line(x1, y1, x2, y2 float64, attributes string) {
	if attributes == "" {
		attributes = `stroke="#222222"`
	}
	p.Add(`<line x1="%s" x2="%s" y1="%s" y2="%s" %s/>`, number(x1), number(x2), number(y1), number(y2), attributes)
}

// Text appends a dark text. The anchor is start, middle or end.
func (p *Picture) Text(x, y float64, anchor, attributes, s string) {
	p.Add(`<text x="%s" y="%s" text-anchor="%s" fill="#222222"%s>%s</text>`, number(x), number(y), anchor, prefixSpace(attributes), Escape(s))
}

// Bytes ends the picture and returns it.
func (p *Picture) Bytes() []byte {
	p.Add("</svg>")
	return p.b.Bytes()
}

// Escape returns XML text for any bytes: the name of a program need not be UTF-8 and may contain characters that XML
// forbids.
func Escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder never fails
	return b.String()
}

// number prints a coordinate with a tenth of a pixel.
func number(v float64) string { return strconv.FormatFloat(math.Round(10*v)/10, 'f', -1, 64) }

func prefixSpace(attributes string) string {
	if attributes == "" {
		return ""
	}
	return " " + attributes
}
