// SPDX-License-Identifier: Apache-2.0

// Package importer makes configurations of Sluice of those of other programs: text in, a
// configuration and notes about every line that has no equal out. It is pure: what the text does
// not tell, the caller does.
package importer

import (
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/importer/netfilter"
)

// Options are what the text of a source does not tell.
type Options struct {
	// Outside are the interfaces whose addresses are meant where the source takes what is
	// sent to any address of the host.
	Outside []string
}

// Source is a program whose configuration can be imported.
type Source struct {
	Name string
	// What is read, and the command that prints it.
	What, Command string

	read func(text string, o Options) (*draft.Result, error)
}

// Sources lists all.
var Sources = []Source{
	{"iptables", "rules of iptables and ip6tables, and sets of ipset", "iptables-save", func(text string, o Options) (*draft.Result, error) {
		return netfilter.IPTables(text, netfilter.Options{Outside: o.Outside})
	}},
}

// MaxSize is the largest text that is read, in bytes.
const MaxSize = 64 << 20

// Import reads the text of a source.
func Import(source, text string, o Options) (*draft.Result, error) {
	for _, s := range Sources {
		if s.Name != source {
			continue
		}
		switch {
		case len(text) > MaxSize:
			return nil, fmt.Errorf("larger than %d MiB: import it in parts", MaxSize>>20)
		case strings.TrimSpace(text) == "":
			return nil, fmt.Errorf("it is empty: give what '%s' prints", s.Command)
		case strings.Contains(text, "\x00"):
			return nil, fmt.Errorf("it is no text: give what '%s' prints", s.Command)
		}
		return s.read(text, o)
	}
	return nil, fmt.Errorf("unknown source %q", source)
}
