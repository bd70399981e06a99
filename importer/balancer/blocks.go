// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"strings"
)

// block is a statement of keepalived.conf with the statements in its braces.
type block struct {
	line, end int
	words     []string
	inner     []*block
	braces    bool
}

// maxDepth is the maximum nesting of blocks.
const maxDepth = 16

// token is a word, a brace, or the end of a line ("\n").
type token struct {
	text   string
	line   int
	quoted bool
}

// tokens splits the lines into words. A word that begins with # or ! begins a comment.
func tokens(lines []string) (list []token) {
	for i, line := range lines {
		rest := line
		for {
			rest = strings.TrimLeft(rest, " \t\r\f\v")
			if rest == "" || rest[0] == '#' || rest[0] == '!' {
				break
			}
			if rest[0] == '"' {
				inner, after, _ := strings.Cut(rest[1:], `"`)
				list = append(list, token{inner, i + 1, true})
				rest = after
				continue
			}
			if rest[0] == '{' || rest[0] == '}' {
				list = append(list, token{rest[:1], i + 1, false})
				rest = rest[1:]
				continue
			}
			end := strings.IndexAny(rest, " \t\r\f\v{}")
			if end < 0 {
				end = len(rest)
			}
			list = append(list, token{rest[:end], i + 1, false})
			rest = rest[end:]
		}
		list = append(list, token{"\n", i + 1, false})
	}
	return list
}

// blocks reads the statements of a file.
func blocks(lines []string) ([]*block, error) {
	p := &blockReader{tokens: tokens(lines)}
	list, err := p.read(0)
	if err == nil && len(p.tokens) > 0 {
		err = fmt.Errorf("line %d: a closing brace has no opening brace", p.tokens[0].line)
	}
	return list, err
}

type blockReader struct {
	tokens []token
	last   int // line of the last token
}

// read parses statements up to a closing brace, which it does not consume.
func (p *blockReader) read(depth int) (list []*block, err error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("line %d: blocks are nested more than %d deep", p.last, maxDepth)
	}
	var b *block
	for len(p.tokens) > 0 {
		t := p.tokens[0]
		p.last = t.line
		switch {
		case t.text == "\n" && !t.quoted:
			p.tokens = p.tokens[1:]
			if b != nil && !p.braceFollows() {
				b = nil
			}
		case t.text == "{" && !t.quoted:
			if b == nil {
				return nil, fmt.Errorf("line %d: a brace without a name before it", t.line)
			}
			p.tokens = p.tokens[1:]
			if b.inner, err = p.read(depth + 1); err != nil {
				return nil, err
			}
			if len(p.tokens) == 0 {
				return nil, fmt.Errorf("line %d: the brace is not closed", b.line)
			}
			b.braces, b.end = true, p.tokens[0].line
			p.tokens = p.tokens[1:]
			b = nil
		case t.text == "}" && !t.quoted:
			return list, nil
		default:
			if b == nil {
				b = &block{line: t.line, end: t.line}
				list = append(list, b)
			}
			b.words = append(b.words, t.text)
			p.tokens = p.tokens[1:]
		}
	}
	return list, nil
}

// braceFollows reports whether the next token other than the end of a line is an opening brace.
func (p *blockReader) braceFollows() bool {
	for _, t := range p.tokens {
		if t.text != "\n" || t.quoted {
			return t.text == "{" && !t.quoted
		}
	}
	return false
}

// arg returns the nth word after the name, or "".
func (b *block) arg(n int) string {
	if n < len(b.words) {
		return b.words[n]
	}
	return ""
}

// lines returns the line numbers from the name of the block to its closing brace.
func (b *block) lines() (list []int) {
	for n := b.line; n <= b.end; n++ {
		list = append(list, n)
	}
	return list
}

// text returns the statement as quoted in notes.
func (b *block) text() string { return strings.Join(b.words, " ") }
