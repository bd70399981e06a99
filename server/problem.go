// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
)

// writeProblem responds with an error document (RFC 9457), like the handlers.
func writeProblem(w http.ResponseWriter, status int, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(huma.NewError(status, detail)) // fails if the client has closed the connection
}

// withProblems serves the mux, and replaces the mux's own plain-text errors by error documents.
func withProblems(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refusal, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		said := &bufferedWriter{header: http.Header{}}
		refusal.ServeHTTP(said, r)
		switch said.status {
		case http.StatusNotFound:
			writeProblem(w, said.status, fmt.Sprintf("nothing is at %s: /openapi.json lists the API, /metrics is the Prometheus page", r.URL.EscapedPath()))
		case http.StatusMethodNotAllowed:
			allowed := said.header.Get("Allow")
			w.Header().Set("Allow", allowed)
			writeProblem(w, said.status, fmt.Sprintf("%s takes %s, not %s", r.URL.EscapedPath(), allowed, r.Method))
		default: // to the clean form of a path
			refusal.ServeHTTP(w, r)
		}
	})
}

// bufferedWriter is a buffered response that is checked before it is sent.
type bufferedWriter struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (u *bufferedWriter) Header() http.Header         { return u.header }
func (u *bufferedWriter) WriteHeader(status int)      { u.status = status }
func (u *bufferedWriter) Write(b []byte) (int, error) { return u.body.Write(b) }

// send writes the response as the last one on a connection.
func (u *bufferedWriter) send(w io.Writer) error {
	r := http.Response{StatusCode: u.status, ProtoMajor: 1, ProtoMinor: 1, Header: u.header, Body: io.NopCloser(&u.body), ContentLength: int64(u.body.Len()), Close: true}
	return r.Write(w)
}
