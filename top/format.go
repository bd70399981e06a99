// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
)

// group formats a number with thousands separators: 1,048,576.
func group[N uint32 | uint64](n N) string {
	s := strconv.FormatUint(uint64(n), 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// decimal formats a rate.
func decimal(v float64) string {
	if v > 0 && v < 10 {
		return fmt.Sprintf("%.1f", v)
	}
	return group(uint64(max(v, 0)))
}

// percent formats a share of 0 to 1.
func percent(v float64) string {
	switch {
	case v <= 0:
		return "0%"
	case v < 0.001:
		return "<0.1%"
	case v < 0.1:
		return fmt.Sprintf("%.1f%%", 100*v)
	}
	return fmt.Sprintf("%.0f%%", 100*v)
}

// bar draws a share in plain ASCII: [######....].
func bar(share float64, width int) string {
	n := int(min(max(share, 0), 1)*float64(width-2) + 0.5)
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", width-2-n) + "]"
}

// size formats bytes with a binary unit.
func size(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return strconv.FormatUint(n, 10) + "B"
	}
	v, i := float64(n)/1024, 0
	for ; v >= 1024 && i < len(units)-1; i++ {
		v /= 1024
	}
	return fmt.Sprintf("%.1f%c", v, units[i])
}

// duration formats the time until a table is full.
func duration(f conntrack.Fill) string {
	switch d := f.TimeToFull(); {
	case d < 0:
		return "-"
	case d == 0:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return ">2d"
}
