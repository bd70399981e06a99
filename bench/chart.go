// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/sluice-lb/sluice/svg"
)

// Geometry of the bar chart in pixels.
const (
	chartLabel = 260 // Room for row names; longer names get more.
	chartChar  = 7   // Room for one character of a row name.
	chartBars  = 460
	chartOver  = 24  // How far a whisker may reach beyond the longest bar.
	chartValue = 130 // Room for the excess of a whisker and for figures.
	chartBar   = 16
	chartGap   = 10
	chartHead  = 54
)

// chartColours of the points, distinct in light, dark and grey.
var chartColours = []string{"#2f6f9f", "#e08e45", "#5b9a68", "#a05195", "#7a7a7a", "#c44e52"}

// Chart draws the first metric of the result as horizontal bars, one colour a
// point, as SVG. The whisker spans the repetitions as far as there is room, and ~ marks
// noisy figures.
func (r *Result) Chart() []byte {
	var points []string
	metric := r.Metrics[0]
	for _, p := range r.Points {
		if r.hasMetric(p, metric.Name) {
			points = append(points, p)
		}
	}
	top := math.SmallestNonzeroFloat64 // not 0, because it is a divisor
	var rows []*ResultRow
	left := chartLabel
	for i := range r.Rows {
		if len(r.Rows[i].Cells) > 0 {
			rows = append(rows, &r.Rows[i])
			left = max(left, 18+chartChar*utf8.RuneCountInString(r.Rows[i].Name))
		}
		for _, c := range r.Rows[i].Cells {
			if c.Metric == metric.Name {
				top = max(top, c.Median)
			}
		}
	}
	height := chartHead + len(rows)*(len(points)*chartBar+chartGap) + 20
	width := left + chartBars + chartValue
	picture := svg.New(width, height, "")
	picture.Text(10, 20, "start", `font-weight="bold" font-size="14"`, r.Title+": "+metric.Name+", "+metric.Unit)
	x := 10
	for i, p := range points {
		picture.Rect(float64(x), 32, 12, 12, colour(i))
		picture.Text(float64(x+17), 42, "start", "", p)
		x += 40 + chartChar*utf8.RuneCountInString(p)
	}
	y := chartHead
	for _, row := range rows {
		r.chartRow(picture, row, points, metric, top, float64(left), float64(y))
		y += len(points)*chartBar + chartGap
	}
	return picture.Bytes()
}

func (r *Result) chartRow(picture *svg.Picture, row *ResultRow, points []string, m Metric, top, left, y float64) {
	picture.Text(left-8, y+float64(len(points)*chartBar/2)+4, "end", "", row.Name)
	for i, p := range points {
		c := row.findCell(p, m.Name)
		if c == nil {
			continue
		}
		at := y + float64(i*chartBar)
		w := c.Median / top * chartBars
		picture.Rect(left, at, w, chartBar-2, colour(i))
		low, high := max(w-c.Spread/2*w, 0), min(w+c.Spread/2*w, chartBars+chartOver)
		picture.Line(left+low, at+chartBar/2-1, left+high, at+chartBar/2-1, "")
		label := format(c.Median, m.Digits)
		if c.Noisy {
			label = "~" + label
		}
		if c.Share > 0 {
			label += fmt.Sprintf(" (%.2f)", c.Share)
		}
		picture.Text(left+math.Floor(high)+6, at+chartBar-4, "start", "", label)
	}
}

func colour(i int) string { return chartColours[i%len(chartColours)] }
