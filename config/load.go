// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	goccy "github.com/goccy/go-yaml"
	goccyparser "github.com/goccy/go-yaml/parser"
	"go.yaml.in/yaml/v3"
)

// Two YAML libraries are at work, each where it is the better one. go.yaml.in/yaml
// reads: 10,000 services with 4 backends each are parsed in a quarter
// of a second, where goccy/go-yaml needs more than a second. goccy/go-yaml reads
// a file again only when it is not YAML, because it knows the column of a syntax
// error.

// MaxFileSize is the largest configuration that is read, in bytes.
const MaxFileSize = 64 << 20

// maxErrors is how many errors are reported of one file.
const maxErrors = 1000

// maxText limits one value or key, in bytes: messages repeat values.
const maxText = 4096

// The second reading of a file, for the column of a syntax error, is given up for
// files that are larger than this, in bytes, or that open more brackets within
// each other: its time grows with the square of the depth. The line must do then.
const (
	maxSyntaxSize  = 256 << 10
	maxSyntaxDepth = 64
)

// Load reads, completes and validates the file at path. The error is an Errors
// when the file could be read.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return Decode(path, data)
}

// Decode reads, completes (SetDefaults) and validates a configuration in YAML, which includes JSON.
// Messages contain name as the file's name. The error is an Errors with all errors, in file order.
func Decode(name string, data []byte) (*Config, error) {
	return decode(name, data, 2*nodeLimit(len(data)))
}

func decode(name string, data []byte, budget int) (*Config, error) {
	if len(data) > MaxFileSize {
		return nil, Errors{{File: name, Cause: fmt.Sprintf("larger than %d MiB", MaxFileSize>>20), Hint: "split the sets or services over several gateways"}}
	}
	root, err := parseBounded(data)
	if err != nil {
		return nil, finish(name, data, Errors{err})
	}
	if root == nil || root.Tag == "!!null" {
		// An interrupted write or a full disk can leave an empty file. It must not end all
		// services.
		return nil, Errors{{File: name, Cause: "nothing is configured: the file is empty, or has only comments", Hint: "write services: [] for a gateway that does nothing"}}
	}
	c := &Config{}
	d := decoder{budget: budget}
	d.document(root, c)
	c.SetDefaults()
	errs, more := d.errs, d.truncated
	if !more {
		v := c.validate()
		errs, more = append(errs, d.unlessFailed(v.errs)...), v.truncated
	}
	for _, e := range errs {
		e.setPosition(root)
		e.Object = objectName(c, e.path)
	}
	if len(errs) == 0 {
		return c, nil
	}
	errs = finish(name, data, errs)
	if more || len(errs) > maxErrors {
		errs = append(errs[:min(len(errs), maxErrors)], &Error{File: name, Cause: fmt.Sprintf("more than %d errors", maxErrors), Hint: "correct these first"})
	}
	return nil, errs
}

// parseBounded is parse for texts from outside.
func parseBounded(data []byte) (*yaml.Node, *Error) {
	if e := tooDense(data); e != nil {
		return nil, e
	}
	return parse(data)
}

// parse reads the one document of data. It returns nil for an empty one.
func parse(data []byte) (*yaml.Node, *Error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err == nil {
		err = dec.Decode(&next)
		if errors.Is(err, io.EOF) {
			return doc.Content[0], checkLength(doc.Content[0], 1)
		}
		if err == nil {
			return nil, &Error{Line: next.Line, Column: next.Column, Cause: "a second document", Hint: "write one configuration in one file"}
		}
	}
	return nil, syntaxError(data, err)
}

// checkLength returns an error about the first value or key that is too long or too deep, nil for none.
func checkLength(n *yaml.Node, depth int) *Error {
	if depth > maxDepth {
		return &Error{Line: n.Line, Column: n.Column, Cause: fmt.Sprintf("values more than %d deep in each other", maxDepth), Hint: "no key has values that deep"}
	}
	if len(n.Value) > maxText {
		return &Error{Line: n.Line, Column: n.Column, Cause: fmt.Sprintf("a value of %d bytes", len(n.Value)), Hint: fmt.Sprintf("write one of at most %d", maxText)}
	}
	for _, c := range n.Content {
		if e := checkLength(c, depth+1); e != nil {
			return e
		}
	}
	return nil
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?(.*)`)

// syntaxError turns the parser's error into one with a position.
func syntaxError(data []byte, err error) *Error {
	m := yamlLine.FindStringSubmatch(err.Error())
	e := &Error{Line: 1, Column: 1, Cause: "not YAML: " + m[2]}
	if n, err := strconv.Atoi(m[1]); err == nil {
		e.Line = n
	}
	if len(data) <= maxSyntaxSize && depth(data) <= maxSyntaxDepth && !strings.Contains(m[2], "depth") {
		e.improveMessage(data)
	}
	if strings.Contains(m[2], "UTF-8") || strings.Contains(m[2], "control characters") { // the parser gives no position for these
		e.atStray(data)
	}
	if lines := bytes.SplitN(data, []byte("\n"), e.Line+1); e.Line <= len(lines) && bytes.HasPrefix(bytes.TrimLeft(lines[e.Line-1], " "), []byte("\t")) {
		e.Cause, e.Hint = "not YAML: a tab in the indentation", "indent by spaces"
	}
	return e
}

// atStray moves e to the first bytes that are no text: a file in Latin-1, or with the colours
// of a terminal.
func (e *Error) atStray(data []byte) {
	line, column := 1, 1
	for at := 0; at < len(data); {
		r, size := utf8.DecodeRune(data[at:])
		switch {
		case r == utf8.RuneError && size == 1:
			e.Line, e.Column, e.Cause, e.Hint = line, column, fmt.Sprintf("not YAML: the byte 0x%02x is not UTF-8", data[at]), "save the file in UTF-8"
			return
		case unicode.IsControl(r) && !strings.ContainsRune("\t\n\r\u0085", r):
			e.Line, e.Column, e.Cause, e.Hint = line, column, fmt.Sprintf("not YAML: a control character (%U)", r), "remove it"
			return
		case r == '\n':
			line, column = line+1, 0
		}
		at, column = at+size, column+1
	}
}

// improveMessage puts the other parser's opinion on a syntax error into e. That parser
// must not be the end of the gateway: if it panics, e stays as it is.
func (e *Error) improveMessage(data []byte) {
	defer func() { _ = recover() }()
	var at goccy.Error
	if _, err := goccyparser.ParseBytes(data, 0); errors.As(err, &at) && at.GetToken() != nil {
		p := at.GetToken().Position
		e.Line, e.Column = p.Line, p.Column
		e.Cause = "not YAML: " + strings.ReplaceAll(at.GetMessage(), "\n", " ")
	}
}

// depth is how many brackets are open at once at most, those in texts included.
func depth(data []byte) (most int) {
	open := 0
	for _, b := range data {
		switch b {
		case '[', '{':
			open++
			most = max(most, open)
		case ']', '}':
			open--
		}
	}
	return most
}
