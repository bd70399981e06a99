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
	svgLeft, svgRight   = 40, 40
	svgTop, svgBottom   = 40, 50
)

// SVG draws the histogram over a logarithmic time axis and marks the percentiles.
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
	if high < low*10 { // show at least a decade, with the values in its middle
		middle := math.Sqrt(low * high)
		low, high = middle/math.Sqrt(10), middle*math.Sqrt(10)
	}
	x := func(ns float64) float64 {
		span := float64(svgWidth - svgLeft - svgRight)
		return svgLeft + span*(math.Log(max(ns, low))-math.Log(low))/(math.Log(high)-math.Log(low))
	}
	h.drawBars(&b, buckets, x)
	floor := svgHeight - svgBottom
	steps := []float64{1, 2, 5}
	if high > low*100 {
		steps = steps[:1]
	}
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for _, step := range steps {
			if at := decade * step; at >= low && at <= high {
				fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#222222"/>`+"\n", x(at), x(at), floor, floor+5)
				svgText(&b, x(at), float64(floor+20), "middle", time.Duration(at).String())
			}
		}
	}
	h.drawPercentiles(&b, x)
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// drawBars draws the density: counts divided by the bucket's width on the logarithmic axis, so that wide buckets do
// not look full.
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

// drawPercentiles marks the percentiles by lines, with the figures above them where there is room.
func (h *Histogram) drawPercentiles(b *bytes.Buffer, x func(float64) float64) {
	var lines, words bytes.Buffer
	for i, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}} {
		value := h.Quantile(q.q)
		at := x(float64(value))
		fmt.Fprintf(&lines, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#c44e52" stroke-dasharray="4 3"/>`+"\n", at, at, svgTop, svgHeight-svgBottom)
		beside, anchor := at+3, "start"
		if at > svgWidth-120 {
			beside, anchor = at-3, "end"
		}
		svgText(&words, beside, float64(svgTop+12+14*i), anchor, q.name+" "+threeDigits(value).String())
	}
	b.Write(lines.Bytes())
	fmt.Fprintf(b, `<g stroke="#ffffff" stroke-width="3" paint-order="stroke">`+"\n%s</g>\n", &words)
}

// threeDigits rounds a value with an error of up to 3 %.
func threeDigits(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for ; d/unit >= 1000; unit *= 10 {
	}
	return d.Round(unit)
}

func svgText(b *bytes.Buffer, x, y float64, anchor, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="#222222">`, x, y, anchor)
	_ = xml.EscapeText(b, []byte(s)) // a bytes.Buffer never fails
	b.WriteString("</text>\n")
}
