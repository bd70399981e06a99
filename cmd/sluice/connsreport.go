// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/table"
)

// connsReport is the output of 'sluice conns'.
type connsReport struct{ *conntrack.Report }

// write prints the report in sections of at most 80 columns.
func (r connsReport) write(w io.Writer) error {
	sections := []func(io.Writer) error{r.writeFill, r.writeTotals}
	add := func(title string, rows []conntrack.Row) {
		if len(rows) > 0 {
			sections = append(sections, func(w io.Writer) error { return r.writeRows(w, title, rows) })
		}
	}
	add(strings.ToUpper(r.By), r.Rows)
	add("STATE", r.States)
	add("SOURCE", r.Sources)
	add("SERVICE", r.Services)
	if len(r.SNATPorts) > 0 {
		sections = append(sections, r.writePorts)
	}
	if len(r.FreeFirst) > 0 {
		sections = append(sections, r.writeFree)
	}
	for i, section := range sections {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := section(w); err != nil {
			return err
		}
	}
	for _, b := range r.Blind {
		fmt.Fprintf(w, "\nnot seen: %s\n", wrap(b, reportWidth-10, "\n          "))
	}
	return nil
}

func (r connsReport) writeFill(w io.Writer) error {
	t := addressTable(w, "NAMESPACE", ">ENTRIES", ">MAX", ">FILL", ">HELD", ">GROWTH/s", ">FULL IN", ">DROPS/s")
	for _, n := range r.Namespaces {
		if n.Count == 0 && n.Counted == (conntrack.Counters{CPU: -1}) && len(r.Namespaces) > 1 {
			continue
		}
		t.Row(n.Namespace, n.Count, n.Max, percent(n.Raw), percent(n.Effective), fmt.Sprintf("%+.0f", n.Growth),
			fullIn(n.Fill), fmt.Sprintf("%.0f", float64(n.Counted.Drop)/r.Window))
	}
	if t.Len() == 0 {
		_, err := fmt.Fprintf(w, "no connection is tracked in %d namespaces\n", len(r.Namespaces))
		return err
	}
	return t.Write(w)
}

// reportWidth is the maximum width of a report that is not on a terminal. Reports are read in
// terminals of 80 columns, tickets and mails.
const reportWidth = 80

// addressTable is a table of addresses: as wide as the terminal, or as a report.
func addressTable(w io.Writer, headings ...string) *table.Table {
	t := table.New(headings...)
	t.Middle = true
	if out, ok := table.File(w); !ok || !term.IsTerminal(int(out.Fd())) {
		t.Width = reportWidth
	}
	return t
}

func (r connsReport) writeTotals(w io.Writer) error {
	n := r.Total
	_, err := fmt.Fprintf(w, "%d entries (%s): %d held, %d closing, %d not assured\nIPv4 %d, IPv6 %d; SNAT %d, DNAT %d, both %d; unreplied %d, offloaded %d\n",
		n.Entries, capacity.Bytes(r.Memory), n.Held(), n.Closing, n.Unassured,
		r.IPv4, r.IPv6, r.SNAT, r.DNAT, r.FullNAT, r.Unreplied, r.Offloaded)
	return err
}

func (r connsReport) writeRows(w io.Writer, title string, rows []conntrack.Row) error {
	t := addressTable(w, title, ">ENTRIES", ">SHARE", ">HELD", ">CLOSING", ">UNASSURED")
	for _, row := range rows {
		t.Row(row.Key, row.Entries, share(row.Entries, r.Total.Entries), row.Held(), row.Closing, row.Unassured)
	}
	return t.Write(w)
}

func (r connsReport) writePorts(w io.Writer) error {
	t := addressTable(w, "SNAT ADDRESS", "TOWARDS", ">PORTS", ">RANGE", ">OF", ">USED", ">REFUSED")
	for _, o := range r.SNATPorts {
		t.Row(o.Public, o.Protocol.String()+" "+o.Remote.String(), o.Used, o.Range, o.Pool, percent(o.Share()),
			percent(capacity.RefusalProbability(o.Share())))
	}
	return t.Write(w)
}

func (r connsReport) writeFree(w io.Writer) error {
	fmt.Fprintln(w, "FREE FIRST")
	for _, v := range r.FreeFirst {
		if _, err := fmt.Fprintf(w, "%9d  %s\n           %s\n", v.Entries, v.What, wrap(v.How, reportWidth-11, "\n           ")); err != nil {
			return err
		}
	}
	return nil
}

// wrap breaks s between words so that no line is longer than width.
func wrap(s string, width int, newline string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(s) {
		switch {
		case i == 0:
		case column+1+len(word) > width:
			b.WriteString(newline)
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

func fullIn(f conntrack.Fill) string {
	switch d := f.TimeToFull(); {
	case d < 0 || !f.Foreseeable():
		return "-"
	case d == 0:
		return "full"
	case d > 48*time.Hour:
		return ">2d"
	case d > 10*time.Minute:
		return d.Round(time.Minute).String()[:len(d.Round(time.Minute).String())-2]
	default:
		return d.Round(time.Second).String()
	}
}

func percent(v float64) string {
	switch {
	case v == 0:
		return "0%"
	case v < 0.001:
		return "<0.1%"
	case v < 0.1:
		return fmt.Sprintf("%.1f%%", 100*v)
	}
	return fmt.Sprintf("%.0f%%", 100*v)
}

func share(part, all uint32) string {
	if all == 0 {
		return "0%"
	}
	return percent(float64(part) / float64(all))
}

// writeJSONLine writes v as one line.
func writeJSONLine(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }
