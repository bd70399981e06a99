// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
)

// formatVersion is the version of the document's form.
const formatVersion = 1

const documentName = "changes.json"

// maxDocument is the largest document that is read, in bytes: its history can hold several configurations.
const maxDocument = 16 * config.MaxFileSize

// document is the form on disk.
type document struct {
	Layout   int           `json:"layout"`
	File     string        `json:"file"` // The operator's file.
	Base     string        `json:"base"` // File of the same directory: the configuration that the edits begin from.
	Revision uint64        `json:"revision"`
	Edits    []config.Edit `json:"edits"` // they turn the file's configuration into the one in force
	States   []Override    `json:"states"`
	History  []Revision    `json:"history"` // oldest first
	Trial    *Trial        `json:"trial,omitempty"`
	Shared   Shared        `json:"shared,omitzero"` // The base is this document.
}

// encodeDocument returns the document with its checksum.
func encodeDocument(doc *document) ([]byte, error) {
	text, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	return disk.Seal(text), nil
}

// decodeDocument reads a document and checks its content. A document of an earlier version has no
// checksum; there, an unknown member counts as damage.
func decodeDocument(raw []byte) (*document, error) {
	text := bytes.TrimSpace(raw)
	if len(text) == 0 {
		return nil, errors.New("the file is empty")
	}
	text, sealed, err := disk.Unseal(text)
	if err != nil {
		return nil, err
	}
	doc := &document{}
	d := json.NewDecoder(bytes.NewReader(text))
	if !sealed {
		d.DisallowUnknownFields()
	}
	if err := d.Decode(doc); err != nil {
		return nil, fmt.Errorf("the file is damaged: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("the file is damaged: more than one document")
	}
	switch doc.Layout {
	case formatVersion:
	case 0:
		return nil, errors.New("the file names no layout: it is not a document of changes")
	default:
		return nil, fmt.Errorf("layout %d, this version reads %d", doc.Layout, formatVersion)
	}
	for _, s := range doc.States {
		if err := s.check(); err != nil {
			return nil, fmt.Errorf("the file is damaged: %w", err)
		}
	}
	return doc, nil
}

// baseName returns the name of a base with that content. Two contents have different names.
func baseName(text []byte) string {
	sum := sha256.Sum256(text)
	return "base-" + hex.EncodeToString(sum[:8]) + ".yaml"
}
