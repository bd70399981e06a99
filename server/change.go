// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/engine"
)

// Control makes changes and stores them; see [control.Control].
type Control interface {
	Reload(context.Context, control.Author) (engine.Applied, error)
	Apply(ctx context.Context, by control.Author, cfg *config.Config, expected func(*config.Config) bool, trial time.Duration) (engine.Applied, error)
	Confirm(context.Context, control.Author) error
	Change(ctx context.Context, by control.Author, make func(*config.Config) (*config.Config, error)) (engine.Applied, error)
	SetState(ctx context.Context, by control.Author, service, backend string, to control.Override, expected func(*config.Config) bool) error
	SetNode(ctx context.Context, by control.Author, drain bool) error
	Drains() map[engine.Backend]control.Drain
	Revert(ctx context.Context, by control.Author, revision uint64) (engine.Applied, error)
	RevertAll(context.Context, control.Author) (engine.Applied, error)
	Save(control.Author) error
	Changes() control.Changes
}

// clientKey is the context key of a request's client.
type clientKey struct{}

// requestAuthor returns the author of a request, with a description of the change.
func requestAuthor(ctx context.Context, what string) control.Author {
	markRecorded(ctx)
	return control.Author{Who: clientName(ctx), What: what}
}

// clientName returns the client of a request.
func clientName(ctx context.Context) string {
	if who, _ := ctx.Value(clientKey{}).(string); who != "" {
		return who
	}
	return "unknown"
}

// withPeer is the ConnContext of the socket. It stores the peer of the connection.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if counted, ok := c.(*countedConn); ok {
		ctx = context.WithValue(ctx, clientKey{}, peerOf(counted.Conn))
	}
	return ctx
}

// withClient stores the client of a request over TCP: the subject of its certificate, the name of
// its token, and its address.
func withClient(r *http.Request, token string) *http.Request {
	who := r.RemoteAddr
	switch subject := certificateOf(r); {
	case subject != "" && token != "":
		who = subject + ", " + token + " at " + who
	case subject != "" || token != "":
		who = subject + token + " at " + who
	}
	return r.WithContext(context.WithValue(r.Context(), clientKey{}, who))
}

// certificateOf returns the subject of the client's certificate, or "".
func certificateOf(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return ""
	}
	return r.TLS.PeerCertificates[0].Subject.String()
}

func (s *server) registerChanges(g huma.API) {
	huma.Get(g, "/config/changes", s.changes, describe("get-changes", "What was changed at run time, against the daemon's file, and the last revisions"))
	huma.Get(g, "/audit", s.auditLog, describe("get-audit", "Who asked for which change, and what came of it; the oldest first"))
	huma.Post(g, "/config/confirm", s.confirm, describe("confirm", "Keep the change that is on trial"))
	huma.Post(g, "/config/revert", s.revert, describe("revert", "Go back to an earlier revision, or to the daemon's file"))
	huma.Post(g, "/config/save", s.save, describe("save", "Write the configuration in force into the daemon's file"))
}

func (s *server) changes(context.Context, *struct{}) (*body[api.ConfigChanges], error) {
	v := Changes(s.opt.Control.Changes())
	v.Discovered = s.discoveredBackends()
	return &body[api.ConfigChanges]{v}, nil
}

// Changes returns changes made at run time in the form of the API, without discovered backends.
func Changes(c control.Changes) api.ConfigChanges {
	v := api.ConfigChanges{File: c.File, Revision: c.Revision, Edits: append([]config.Edit{}, c.Edits...), States: []api.OperatorState{}, History: []api.ConfigRevision{}, Discovered: []api.DiscoveredBackend{}}
	if c.Trial != nil {
		v.Trial = &api.Trial{Until: c.Trial.Until, Back: c.Trial.Back}
	}
	for _, st := range c.States {
		v.States = append(v.States, api.OperatorState{Service: st.Service, Backend: st.Backend, Node: st.Node, State: st.State, Until: st.Until, Then: st.Then, Text: st.String()})
	}
	for _, r := range c.History {
		v.History = append(v.History, api.ConfigRevision{Revision: r.Number, At: r.At, Who: r.Who, What: r.What, Edits: r.Edits()})
	}
	return v
}

// discoveredBackends returns the discovered backends in force.
func (s *server) discoveredBackends() []api.DiscoveredBackend {
	list := []api.DiscoveredBackend{}
	if s.opt.Sources == nil {
		return list
	}
	found := s.opt.Engine.Found()
	for _, source := range s.opt.Sources() {
		for _, b := range found[source.Service] {
			list = append(list, api.DiscoveredBackend{Service: source.Service, Backend: b.Name, Address: b.Address, Port: b.Port, Weight: b.Weight, From: source.Origin, Since: source.Since})
		}
	}
	return list
}

func (s *server) confirm(ctx context.Context, _ *struct{}) (*struct{}, error) {
	if err := s.opt.Control.Confirm(ctx, requestAuthor(ctx, "confirm")); err != nil {
		return nil, statusError(err)
	}
	return nil, nil
}

func (s *server) revert(ctx context.Context, in *body[api.Revert]) (*body[api.Outcome], error) {
	var applied engine.Applied
	var err error
	switch to := in.Body; {
	case to.All == (to.Revision != 0):
		return nil, huma.Error422UnprocessableEntity("say which revision to go back to, or all for the daemon's file: one of the two")
	case to.All:
		applied, err = s.opt.Control.RevertAll(ctx, requestAuthor(ctx, "revert --all"))
	default:
		applied, err = s.opt.Control.Revert(ctx, requestAuthor(ctx, "revert to an earlier revision"), to.Revision)
	}
	if err != nil {
		return nil, statusError(err)
	}
	return &body[api.Outcome]{s.outcome(applied)}, nil
}

func (s *server) save(ctx context.Context, _ *struct{}) (*struct{}, error) {
	if err := s.opt.Control.Save(requestAuthor(ctx, "save")); err != nil {
		return nil, statusError(err)
	}
	return nil, nil
}

// invalidValues returns a problem document that lists each invalid value.
func invalidValues(errs config.Errors) error {
	var details []error
	for _, e := range errs {
		where := "body"
		if e.Path != "" {
			where += "." + e.Path
		}
		details = append(details, &huma.ErrorDetail{Location: where, Message: e.Error()})
	}
	return huma.Error422UnprocessableEntity("the configuration would not be valid", details...)
}

// statusError maps errors of a change to HTTP.
func statusError(err error) error {
	var invalid config.Errors
	switch {
	case errors.As(err, &invalid):
		return invalidValues(invalid)
	case errors.Is(err, control.ErrState):
		return huma.Error422UnprocessableEntity(err.Error())
	case errors.Is(err, engine.ErrNotFound), errors.Is(err, fs.ErrNotExist), errors.Is(err, config.ErrNoObject):
		return huma.Error404NotFound(err.Error())
	case errors.Is(err, config.ErrExists):
		return huma.Error409Conflict(err.Error())
	case errors.Is(err, engine.ErrChanged):
		return huma.Error412PreconditionFailed("the configuration in force was changed by somebody else: read it again, then send yours with its new ETag")
	}
	return huma.Error409Conflict(err.Error())
}
