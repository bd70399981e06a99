// SPDX-License-Identifier: Apache-2.0

package load

import (
	"math"
	"time"

	"github.com/sluice-lb/sluice/svg"
)

// Geometry of the histogram in pixels.
const (
	svgWidth, svgHeight = 720, 320
	svgLeft, svgRight   = 40, 40
	svgTop, svgBottom   = 40, 50
	svgFloor            = svgHeight - svgBottom
)

// SVG draws the histogram over a logarithmic time axis and marks the percentiles.
func (h *Histogram) SVG(title string) []byte {
	picture := svg.New(svgWidth, svgHeight, "")
	picture.Text(svgLeft, 20, "start", "", title)
	buckets := h.Buckets()
	if len(buckets) == 0 {
		picture.Text(svgWidth/2, svgHeight/2, "middle", "", "no values")
		return picture.Bytes()
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
	h.drawBars(picture, buckets, x)
	steps := []float64{1, 2, 5}
	if high > low*100 {
		steps = steps[:1]
	}
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for _, step := range steps {
			if at := decade * step; at >= low && at <= high {
				picture.Line(x(at), svgFloor, x(at), svgFloor+5, "")
				picture.Text(x(at), svgFloor+20, "middle", "", time.Duration(at).String())
			}
		}
	}
	h.drawPercentiles(picture, x)
	return picture.Bytes()
}

// drawBars draws the density: counts divided by the bucket's width on the logarithmic axis, so that wide buckets do
// not look full.
func (h *Histogram) drawBars(picture *svg.Picture, buckets []Bucket, x func(float64) float64) {
	width := func(k Bucket) float64 { return math.Log(float64(k.To)) - math.Log(max(float64(k.From), 0.5)) }
	var top float64
	for _, k := range buckets {
		top = max(top, float64(k.Count)/width(k))
	}
	for _, k := range buckets {
		height := float64(k.Count) / width(k) / top * (svgFloor - svgTop)
		from, to := x(float64(k.From)), x(float64(k.To))
		picture.Rect(from, svgFloor-height, max(to-from, 1), height, "#2f6f9f")
	}
	picture.Line(svgLeft, svgFloor, svgWidth-svgRight, svgFloor, "")
}

// drawPercentiles marks the percentiles by lines, with the figures above them where there is room.
func (h *Histogram) drawPercentiles(picture *svg.Picture, x func(float64) float64) {
	percentiles := []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}}
	for _, p := range percentiles {
		at := x(float64(h.Quantile(p.q)))
		picture.Line(at, svgTop, at, svgFloor, `stroke="#c44e52" stroke-dasharray="4 3"`)
	}
	picture.Add(`<g stroke="#ffffff" stroke-width="3" paint-order="stroke">`)
	for i, p := range percentiles {
		value := h.Quantile(p.q)
		at, anchor := x(float64(value))+3, "start"
		if at > svgWidth-117 {
			at, anchor = at-6, "end"
		}
		picture.Text(at, float64(svgTop+12+14*i), anchor, "", p.name+" "+threeDigits(value).String())
	}
	picture.Add("</g>")
}

// threeDigits rounds a value with an error of up to 3 %.
func threeDigits(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for ; d/unit >= 1000; unit *= 10 {
	}
	return d.Round(unit)
}
