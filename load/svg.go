// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"time"
)

// Geometry of the histogram in pixels.
const (
	svgWidth, svgHeight = 720, 320
	svgLeft, svgRight   = 60, 20
	svgTop, svgBottom   = 40, 50
)

// SVG draws the histogram over a logarithmic time axis, with the percentiles
// marked.
func (h *Histogram) SVG(title string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", svgWidth, svgHeight)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", svgWidth, svgHeight)
	svgText(&b, svgLeft, 20, "start", title)
	buckets := h.Buckets()
	if len(buckets) == 0 {
		svgText(&b, svgWidth/2, svgHeight/2, "middle", "no values")
		b.WriteString("</svg>\n")
		return b.Bytes()
	}
	low, high := float64(max(buckets[0].From, 1)), float64(buckets[len(buckets)-1].To)
	if high < low*10 {
		high = low * 10
	}
	x := func(ns float64) float64 {
		span := float64(svgWidth - svgLeft - svgRight)
		return svgLeft + span*(math.Log(max(ns, low))-math.Log(low))/(math.Log(high)-math.Log(low))
	}
	h.drawBars(&b, buckets, x)
	floor := svgHeight - svgBottom
	for decade := math.Pow(10, math.Ceil(math.Log10(low))); decade <= high; decade *= 10 {
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#222222"/>`+"\n", x(decade), x(decade), floor, floor+5)
		svgText(&b, x(decade), float64(floor+20), "middle", time.Duration(decade).String())
	}
	for i, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}} {
		at := x(float64(h.Quantile(q.q)))
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#c44e52" stroke-dasharray="4 3"/>`+"\n", at, at, svgTop, floor)
		svgText(&b, at+3, float64(svgTop+12+14*i), "start", fmt.Sprintf("%s %s", q.name, h.Quantile(q.q)))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// drawBars draws the density: counts over the width of a bucket on the
// logarithmic axis, so that wide buckets do not look full.
func (h *Histogram) drawBars(b *bytes.Buffer, buckets []Bucket, x func(float64) float64) {
	width := func(k Bucket) float64 { return math.Log(float64(k.To)) - math.Log(max(float64(k.From), 0.5)) }
	var top float64
	for _, k := range buckets {
		top = max(top, float64(k.Count)/width(k))
	}
	floor := float64(svgHeight - svgBottom)
	for _, k := range buckets {
		height := float64(k.Count) / width(k) / top * (floor - svgTop)
		from, to := x(float64(k.From)), x(float64(k.To))
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="#2f6f9f"/>`+"\n", from, floor-height, max(to-from, 1), height)
	}
	fmt.Fprintf(b, `<line x1="%d" x2="%d" y1="%.0f" y2="%.0f" stroke="#222222"/>`+"\n", svgLeft, svgWidth-svgRight, floor, floor)
}

func svgText(b *bytes.Buffer, x, y float64, anchor, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="#222222">`, x, y, anchor)
	_ = xml.EscapeText(b, []byte(s)) // a bytes.Buffer never fails
	b.WriteString("</text>\n")
}
