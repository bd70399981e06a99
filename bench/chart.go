// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/xml"
	"fmt"
)

// Geometry of the bar chart in pixels.
const (
	chartLabel = 260 // room for row names
	chartBars  = 460
	chartValue = 130 // room for figures
	chartBar   = 16
	chartGap   = 10
	chartHead  = 54
)

// chartColours of the points, distinct in light, dark and grey.
var chartColours = []string{"#2f6f9f", "#e08e45", "#5b9a68", "#a05195", "#7a7a7a", "#c44e52"}

// Chart draws the first metric of the result as horizontal bars, one colour a
// point, as SVG. The whisker spans the repetitions.
func (r *Result) Chart() []byte {
	var points []string
	metric := r.Metrics[0]
	for _, p := range r.Points {
		if r.has(p, metric.Name) {
			points = append(points, p)
		}
	}
	var top float64
	var rows []*ResultRow
	for i := range r.Rows {
		if len(r.Rows[i].Cells) > 0 {
			rows = append(rows, &r.Rows[i])
		}
		for _, c := range r.Rows[i].Cells {
			if c.Metric == metric.Name {
				top = max(top, c.Median)
			}
		}
	}
	var b bytes.Buffer
	height := chartHead + len(rows)*(len(points)*chartBar+chartGap) + 20
	width := chartLabel + chartBars + chartValue
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", width, height)
	text(&b, 10, 20, "start", "font-weight=\"bold\" font-size=\"14\"", r.Title+", "+metric.Unit)
	x := 10
	for i, p := range points {
		fmt.Fprintf(&b, `<rect x="%d" y="32" width="12" height="12" fill="%s"/>`+"\n", x, colour(i))
		text(&b, x+17, 42, "start", "", p)
		x += 40 + 7*len(p)
	}
	y := chartHead
	for _, row := range rows {
		r.chartRow(&b, row, points, metric, top, y)
		y += len(points)*chartBar + chartGap
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func (r *Result) chartRow(b *bytes.Buffer, row *ResultRow, points []string, m Metric, top float64, y int) {
	text(b, chartLabel-8, y+len(points)*chartBar/2+4, "end", "", row.Name)
	for i, p := range points {
		c := row.cell(p, m.Name)
		if c == nil || top == 0 {
			continue
		}
		at := y + i*chartBar
		w := c.Median / top * chartBars
		fmt.Fprintf(b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", chartLabel, at, w, chartBar-2, colour(i))
		half := c.Spread / 2 * w
		fmt.Fprintf(b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#222222"/>`+"\n",
			chartLabel+w-half, chartLabel+w+half, at+chartBar/2-1, at+chartBar/2-1)
		label := format(c.Median, m.Digits)
		if c.Share > 0 {
			label += fmt.Sprintf(" (%.2f)", c.Share)
		}
		text(b, int(chartLabel+w+half)+6, at+chartBar-4, "start", "", label)
	}
}

func colour(i int) string { return chartColours[i%len(chartColours)] }

func text(b *bytes.Buffer, x, y int, anchor, attributes, s string) {
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="%s" fill="#222222" %s>`, x, y, anchor, attributes)
	_ = xml.EscapeText(b, []byte(s)) // a bytes.Buffer never fails
	b.WriteString("</text>\n")
}
