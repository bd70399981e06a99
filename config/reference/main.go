// SPDX-License-Identifier: Apache-2.0

// Command reference generates the JSON Schema and the reference page from the configuration's types
// and their doc comments.
//
//	go run ./config/reference docs/reference
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: reference DIR")
		os.Exit(64)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

// generatedFiles are the generated files by name.
func generatedFiles() (map[string][]byte, error) {
	c, err := readComments(sourceDir())
	if err != nil {
		return nil, err
	}
	schema, err := schema(c)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{"sluice.schema.json": schema, "config.md": markdown(c)}, nil
}

func write(dir string) error {
	files, err := generatedFiles()
	if err != nil {
		return err
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// sourceDir is the directory of package config in the module that the working directory is in:
// where this file was compiled is not known with -trimpath.
func sourceDir() string {
	for dir := "."; ; dir = filepath.Join(dir, "..") {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil || len(dir) > 64 {
			return filepath.Join(dir, "config")
		}
	}
}

// docComments are doc comments by type ("Service") and field ("Service.Name").
type docComments map[string]string

// commentOf returns the comment of a type, or of its field if field is not empty. The Go field name at the
// start of the comment is replaced by its key.
func (c docComments) commentOf(t reflect.Type, field string) string {
	if field == "" {
		return c[t.Name()]
	}
	text := c[t.Name()+"."+field]
	f, _ := t.FieldByName(field)
	key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	if rest, ok := strings.CutPrefix(text, field+" "); ok && key != "" {
		return key + " " + rest
	}
	return text
}

func readComments(dir string) (docComments, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	c, set := docComments{}, token.NewFileSet()
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, file, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if decl, ok := n.(*ast.GenDecl); ok && decl.Tok == token.TYPE {
				c.add(decl)
			}
			return true
		})
	}
	return c, nil
}

func (c docComments) add(decl *ast.GenDecl) {
	for _, spec := range decl.Specs {
		ts := spec.(*ast.TypeSpec)
		c[ts.Name.Name] = sentence(decl.Doc)
		st, ok := ts.Type.(*ast.StructType)
		if !ok {
			continue
		}
		for _, f := range st.Fields.List {
			for _, name := range f.Names {
				c[ts.Name.Name+"."+name.Name] = sentence(f.Doc)
			}
		}
	}
}

// sentence joins the lines of a comment.
func sentence(g *ast.CommentGroup) string {
	if g == nil {
		return ""
	}
	return strings.Join(strings.Fields(g.Text()), " ")
}
