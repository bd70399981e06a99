// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
)

// Interfaces names network interfaces: "wan0", or several, separated by commas: "wan0,ppp*". A word
// that ends in "*" matches all names with that prefix, including interfaces that appear later. ""
// matches every interface. In YAML and JSON one word, or a list of words.
type Interfaces string

// InterfacesOf joins the words of a list.
func InterfacesOf(words ...string) Interfaces { return Interfaces(strings.Join(words, ",")) }

// Words returns the names and patterns; none for every interface.
func (i Interfaces) Words() []string {
	return splitWords(string(i))
}

// Names returns the words without a wildcard.
func (i Interfaces) Names() []string { return slices.DeleteFunc(i.Words(), wildcard) }

// MatchesSeveral reports whether i can match more than one interface, but not all.
func (i Interfaces) MatchesSeveral() bool { return strings.ContainsAny(string(i), ",*") }

// Has reports whether i matches the interface.
func (i Interfaces) Has(name string) bool {
	if i == "" || string(i) == name {
		return true
	}
	return i.MatchesSeveral() && slices.ContainsFunc(i.Words(), func(w string) bool {
		start, wild := strings.CutSuffix(w, "*")
		return w == name || wild && strings.HasPrefix(name, start)
	})
}

// Overlaps reports whether i and other can match the same interface.
func (i Interfaces) Overlaps(other Interfaces) bool {
	if i == "" || other == "" || i == other {
		return true
	}
	return slices.ContainsFunc(i.Words(), func(w string) bool {
		return slices.ContainsFunc(other.Words(), func(o string) bool { return wordsMeet(w, o) })
	})
}

func wordsMeet(a, b string) bool {
	x, wildA := strings.CutSuffix(a, "*")
	y, wildB := strings.CutSuffix(b, "*")
	return a == b || wildA && strings.HasPrefix(y, x) || wildB && strings.HasPrefix(x, y)
}

// Covers reports whether i matches every interface that other matches.
func (i Interfaces) Covers(other Interfaces) bool {
	if i == "" || i == other {
		return true
	}
	words := other.Words()
	return len(words) > 0 && !slices.ContainsFunc(words, func(o string) bool {
		return !slices.ContainsFunc(i.Words(), func(w string) bool {
			start, wild := strings.CutSuffix(w, "*")
			return w == o || wild && strings.HasPrefix(strings.TrimSuffix(o, "*"), start)
		})
	})
}

func wildcard(word string) bool { return strings.HasSuffix(word, "*") }

// MarshalJSON writes one word, or a list.
func (i Interfaces) MarshalJSON() ([]byte, error) { return marshalWords(string(i)) }

// UnmarshalJSON is the inverse of MarshalJSON.
func (i *Interfaces) UnmarshalJSON(b []byte) (err error) {
	*(*string)(i), err = unmarshalWords("interfaces", b)
	return err
}

// splitWords splits at commas; "" has no words.
func splitWords(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func marshalWords(s string) ([]byte, error) {
	if words := splitWords(s); len(words) > 1 {
		return json.Marshal(words)
	}
	return json.Marshal(s)
}

func unmarshalWords(what string, b []byte) (string, error) {
	var one string
	if json.Unmarshal(b, &one) == nil {
		return one, nil
	}
	var list []string
	if json.Unmarshal(b, &list) != nil {
		return "", errors.New(what + ": neither a word nor a list of words")
	}
	return strings.Join(list, ","), nil
}

// interfaces checks each word, and that none is written twice.
func (v *validator) interfaces(p path, i Interfaces) {
	words := i.Words()
	for n, w := range words {
		wp := p
		if len(words) > 1 {
			wp = p.index(n)
		}
		start, wild := strings.CutSuffix(w, "*")
		switch {
		case w == "":
			v.errorf(wp, "remove it", "an empty name of an interface")
		case w == "*":
			v.errorf(wp, "leave the key out", `"*" is every interface`)
		case wild && len(start) > 15:
			v.errorf(wp, "write up to 15 characters before *", "no interface has a name that begins with %q", start)
		case slices.Index(words, w) < n:
			v.errorf(wp, "remove it", "%s is named twice", w)
		case wild:
			v.ifname(wp, start)
		default:
			v.ifname(wp, w)
		}
	}
}
