// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/audit"
)

// askedKey is the context key of a *bool that is set once a requested change will be recorded by
// control.
type askedKey struct{}

// markRecorded marks the change of a request as recorded by control.
func markRecorded(ctx context.Context) {
	if noted, ok := ctx.Value(askedKey{}).(*bool); ok {
		*noted = true
	}
}

// auditRefused records requests for changes that are refused before they reach control: invalid, not
// permitted, or for a missing object.
func auditRefused(next http.Handler, record *audit.Log) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isReadOnly(r) || r.URL.Query().Has("dry-run") {
			next.ServeHTTP(w, r)
			return
		}
		var elsewhere bool
		answer := &auditWriter{ResponseWriter: w}
		r = r.WithContext(context.WithValue(r.Context(), askedKey{}, &elsewhere))
		next.ServeHTTP(answer, r)
		if answer.status >= 400 && !elsewhere {
			record.Add(audit.Entry{Who: clientName(r.Context()), What: r.Method + " " + r.URL.EscapedPath(), Result: audit.Refused, Error: answer.problemDetail()})
		}
	})
}

// maxReason limits the part of a response that is stored to find the reason of a refusal.
const maxReason = 8 << 10

// auditWriter is a response writer that stores the status, and the beginning of a refusal.
type auditWriter struct {
	http.ResponseWriter
	status int
	body   []byte
}

func (a *auditWriter) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

func (a *auditWriter) Write(b []byte) (int, error) {
	if a.status >= 400 {
		a.body = append(a.body, b[:min(len(b), maxReason-len(a.body))]...)
	}
	return a.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController find the writer.
func (a *auditWriter) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// problemDetail returns the detail of the problem document.
func (a *auditWriter) problemDetail() string {
	var p huma.ErrorModel
	if json.Unmarshal(a.body, &p) != nil {
		return http.StatusText(a.status)
	}
	lines := []string{p.Detail}
	for _, e := range p.Errors {
		lines = append(lines, e.Error())
	}
	return strings.Join(lines, "; ")
}

// peerOf names the peer of a Unix socket: process, program and user.
func peerOf(c net.Conn) string {
	peer := peerCredentials(c)
	if peer == nil {
		return "an unknown process"
	}
	program, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", peer.Pid)) // empty if the process has ended
	if name := strings.TrimSpace(string(program)); name != "" {
		return fmt.Sprintf("process %d (%s) of user %d", peer.Pid, name, peer.Uid)
	}
	return fmt.Sprintf("process %d of user %d", peer.Pid, peer.Uid)
}

// peerCredentials returns the credentials of a Unix socket's peer, or nil.
func peerCredentials(c net.Conn) (peer *unix.Ucred) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil
	}
	if raw, err := u.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { peer, _ = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	}
	return peer
}

type auditInput struct {
	Limit int `query:"limit" minimum:"1" maximum:"10000" default:"100" doc:"at most so many, the newest"`
}

func (s *server) auditLog(_ context.Context, in *auditInput) (*body[[]audit.Entry], error) {
	list, err := s.opt.Audit.Last(in.Limit)
	return &body[[]audit.Entry]{append([]audit.Entry{}, list...)}, err
}
