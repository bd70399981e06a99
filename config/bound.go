// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
)

// A node of the YAML tree takes about 170 bytes, and "[1,1,1]" has a node for every second byte. A text
// from outside is therefore refused before it is parsed if it may have many nodes for its size: at most
// one for every bytesPerNode bytes, and freeNodes more, so that short texts may be dense.
const (
	bytesPerNode = 5
	freeNodes    = 16384
	// maxDepth bounds how deep values lie in each other; a configuration needs 10.
	maxDepth = 64
	// shortItem is the length in bytes of an item of a flow list below which it counts as a key without a
	// value, which has two nodes. Most addresses are longer.
	shortItem = 10
)

// nodeLimit returns how many nodes a text of that many bytes may have.
func nodeLimit(size int) int { return freeNodes + size/bytesPerNode }

// Bounded returns an error if a text, in YAML or JSON, may take much more memory than its size allows. Call
// it before the text is parsed.
func Bounded(data []byte) error {
	if e := tooDense(data); e != nil {
		return Errors{e}
	}
	return nil
}

func tooDense(data []byte) *Error {
	if n, most := nodesAtMost(data), nodeLimit(len(data)); n > most {
		return &Error{Line: 1, Column: 1, Cause: fmt.Sprintf("up to %d values in %d bytes, of which at most %d are read", n, len(data), most),
			Hint: "send objects one by one, or split the configuration over several gateways"}
	}
	return nil
}

// nodesAtMost estimates the number of nodes of a text from the characters that separate them. It ignores
// quotes and comments, and counts the characters inside them too. A scanner that tracks quotes could be
// made to skip nodes by a quote that YAML does not read as one. The estimate is exact for the common forms:
// keys with values, items of block lists, and items of flow lists that are not short. It is too low by a
// third at most, for lists of pairs without braces ([a: b, c: d]), and by half for long keys without values.
func nodesAtMost(data []byte) (nodes int) {
	flow, colon, begin := false, false, 0 // of the part since the last separator
	end := func(at int) {
		switch {
		case flow && data[begin] == '[' && at < len(data) && (data[at] == '[' || data[at] == '{') && len(bytes.TrimLeft(data[begin+1:at], " \t\r\n")) == 0:
			nodes++ // the first item of a list is a list or a mapping
		case flow && (colon || at-begin < shortItem):
			nodes += 2
		case flow:
			nodes++
		}
		flow, colon, begin = false, false, at
	}
	for i := 0; i < len(data); i++ {
		switch c := data[i]; c {
		case ',', '[', '{':
			end(i)
			flow = true
		case '-':
			if isIndicatorEnd(data, i+1) {
				nodes++
			}
		case '?':
			if isIndicatorEnd(data, i+1) {
				nodes += 2
			}
		case ':':
			if colon = true; !flow && isIndicatorEnd(data, i+1) {
				nodes += 2
			}
		case '\n', '\r', 0x85, 0xa8, 0xa9: // The last ones end U+0085, U+2028 and U+2029, which break lines too.
			if !flow || len(bytes.TrimLeft(data[begin+1:i], " \t\r\n")) > 0 { // Else the item is on the next line.
				end(i)
			}
		}
	}
	end(len(data))
	return nodes + 1
}

// isIndicatorEnd reports whether an indicator that ends at i may be one: a blank, a line break or the end follows.
func isIndicatorEnd(data []byte, i int) bool {
	return i >= len(data) || data[i] <= ' ' || data[i] >= 0x80
}
