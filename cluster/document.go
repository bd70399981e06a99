// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"

	"github.com/sluice-lb/sluice/config"
)

// maxDocument is the largest document in the store, in bytes after compression. etcd refuses requests above 1.5 MiB.
const maxDocument = 1 << 20

// Document is the configuration of a cluster. The store has the text of the operator: each version adds its own defaults, and
// refuses keys that it does not know.
type Document struct {
	By   string `json:"by"`   // client that made the change, and its node
	Name string `json:"name"` // of the file, for messages
	YAML string `json:"yaml"`
}

// encode returns the value in the store: JSON, compressed by gzip.
func encode(d *Document) ([]byte, error) {
	text, err := json.Marshal(d)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(text); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if b.Len() > maxDocument {
		return nil, fmt.Errorf("%s has %d bytes after compression, and a document in the store at most %d", d.Name, b.Len(), maxDocument)
	}
	return b.Bytes(), nil
}

// decode returns a document of the store, and its configuration.
func decode(value []byte) (*Document, *config.Config, error) {
	r, err := gzip.NewReader(bytes.NewReader(value))
	if err != nil {
		return nil, nil, fmt.Errorf("document of the store: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(r, config.MaxFileSize))
	if err != nil {
		return nil, nil, fmt.Errorf("document of the store: %w", err)
	}
	d := &Document{}
	if err := json.Unmarshal(text, d); err != nil {
		return nil, nil, fmt.Errorf("document of the store: %w", err)
	}
	cfg, err := config.Decode(d.Name, []byte(d.YAML))
	return d, cfg, err
}
