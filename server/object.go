// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
)

// kind is a type of configuration objects that can be changed individually.
type kind struct {
	name string       // in operation ids
	list string       // Path of the collection below /api/v1.
	item string       // And of one object.
	form *huma.Schema // of one object
	all  *huma.Schema // of the collection
}

var prefixes = &huma.Schema{Type: "array", Items: &huma.Schema{Type: "string", Pattern: `^[0-9a-fA-F:.]+(/[0-9]{1,3})?$`}}

var kinds = []kind{
	{"service", "/services", "/services/{service}", refTo("Service"), &huma.Schema{Type: "array", Items: refTo("Service")}},
	{"backend", "/services/{service}/backends", "/services/{service}/backends/{backend}", refTo("Backend"), &huma.Schema{Type: "array", Items: refTo("Backend")}},
	{"nat-rule", "/nat", "/nat/{rule}", refTo("NATRule"), &huma.Schema{Type: "array", Items: refTo("NATRule")}},
	{"set", "/firewall/sets", "/firewall/sets/{set}", prefixes, &huma.Schema{Type: "object", AdditionalProperties: prefixes}},
}

// objectInput is a request about the object named by its path.
type objectInput struct {
	DryRun  bool   `query:"dry-run" doc:"change nothing, and answer what would change, as POST /plan does"`
	IfMatch string `header:"If-Match" doc:"refuse unless the object's ETag is among these; * is any that exists"`

	path string // path of the object in the configuration
}

// Resolve implements huma.Resolver.
func (in *objectInput) Resolve(ctx huma.Context) []error {
	in.path = pathOf(ctx)
	return nil
}

// objectWithBody is an objectInput with the object as body. The library finds no fields in
// unexported embedded structs.
type objectWithBody struct {
	DryRun  bool   `query:"dry-run" doc:"change nothing, and answer what would change, as POST /plan does"`
	IfMatch string `header:"If-Match" doc:"refuse unless the object's ETag is among these; * is any that exists"`
	RawBody []byte `contentType:"application/json"`

	path string
}

// Resolve implements huma.Resolver.
func (in *objectWithBody) Resolve(ctx huma.Context) []error {
	in.path = pathOf(ctx)
	return nil
}

func (in *objectWithBody) object() *objectInput {
	return &objectInput{DryRun: in.DryRun, IfMatch: in.IfMatch, path: in.path}
}

// pathOf converts the path of the URL to a path in the configuration.
func pathOf(ctx huma.Context) string {
	var steps []string
	for part := range strings.SplitSeq(strings.TrimPrefix(strings.TrimPrefix(ctx.Operation().Path, "/api/v1/config"), "/api/v1"), "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			part = ctx.Param(strings.TrimSuffix(name, "}"))
		}
		if part != "" {
			steps = append(steps, part)
		}
	}
	return config.Join(steps...)
}

// changedBody is the response to a change of one object.
type changedBody struct {
	Status   int
	Location string `header:"Location" doc:"where the new object is"`
	ETag     string `header:"ETag" doc:"of the object, for If-Match"`
	Body     api.Outcome
}

// object is an object of the configuration, as JSON.
type object struct {
	ContentType string `header:"Content-Type"`
	ETag        string `header:"ETag"`
	Body        []byte
}

func (s *server) registerObjects(g huma.API) {
	for _, k := range kinds {
		label := strings.ReplaceAll(k.name, "-", " ")
		huma.Get(g, "/config"+k.list, s.getObject, k.operation("list-config-"+k.name+"s", "The "+label+"s of the configuration in force", false), answers(k.all))
		huma.Get(g, "/config"+k.item, s.getObject, k.operation("get-config-"+k.name, "One "+label+" of the configuration in force", false), answers(k.form))
		if k.name != "set" {
			huma.Post(g, k.list, s.addObject, k.operation("add-"+k.name, "Add a "+label, true), documentCreated)
		}
		huma.Put(g, k.item, s.putObject, k.operation("put-"+k.name, "Add a "+label+", or replace it", true), documentCreated)
		if k.name != "set" {
			huma.Patch(g, k.item, s.patchObject, k.operation("patch-"+k.name, "Change keys of a "+label+" by a JSON merge patch (RFC 7396)", true), mergePatch)
		}
		huma.Delete(g, k.item, s.removeObject, k.operation("remove-"+k.name, "Remove a "+label, false))
	}
	sets := kinds[len(kinds)-1]
	sets.item = "/firewall/sets/{set}/elements"
	huma.Post(g, sets.item, s.addElements, sets.operation("add-elements", "Add elements to a set", true))
	element := kind{item: "/firewall/sets/{set}/elements/{element}"}
	huma.Delete(g, element.item, s.removeElement, element.operation("remove-element", "Remove an element of a set", false))
	huma.Post(g, "/changes", s.batch, describe("change", "Several changes that hold or fail as a whole"), limitBody)
}

// operation documents a request: the parts of its path, and the form of its body.
func (k kind) operation(id, summary string, body bool) func(*huma.Operation) {
	return func(o *huma.Operation) {
		o.OperationID, o.Summary = id, summary
		for part := range strings.SplitSeq(o.Path, "/") {
			if name, ok := strings.CutPrefix(part, "{"); ok {
				o.Parameters = append(o.Parameters, &huma.Param{Name: strings.TrimSuffix(name, "}"), In: "path", Required: true, Schema: &huma.Schema{Type: "string"}})
			}
		}
		if !body {
			return
		}
		limitBody(o)
		o.SkipValidateBody = true // the configuration decoder validates with better messages
		o.RequestBody = inWords(k.form)
	}
}

// inWords documents a body in JSON or YAML with the keys of the configuration file.
func inWords(form *huma.Schema) *huma.RequestBody {
	return &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: form}, "application/yaml": {Schema: form}}}
}

// mergePatch documents a body with some keys of an object.
func mergePatch(o *huma.Operation) {
	o.RequestBody = inWords(&huma.Schema{Type: "object", AdditionalProperties: true, Description: "keys of the object with their new values; null takes one away"})
}

// answers documents a response with an object of the configuration.
func answers(form *huma.Schema) func(*huma.Operation) {
	return func(o *huma.Operation) {
		o.Responses = map[string]*huma.Response{"200": {Description: "As in the configuration file, with all defaults", Headers: map[string]*huma.Param{"ETag": {Schema: &huma.Schema{Type: "string"}}},
			Content: map[string]*huma.MediaType{"application/json": {Schema: form}}}}
	}
}

// documentCreated documents the response to the creation of an object.
func documentCreated(o *huma.Operation) {
	o.Responses = map[string]*huma.Response{"201": {Description: "The object is new"}}
}

// etagOf is the entity tag of an object, by its YAML in one line.
func etagOf(yaml string) string {
	sum := sha256.Sum256([]byte(yaml))
	return `"` + hex.EncodeToString(sum[:12]) + `"`
}

func (s *server) getObject(_ context.Context, in *objectInput) (*object, error) {
	inForce := s.opt.Engine.Config()
	if inForce == nil {
		return nil, huma.Error404NotFound("no configuration is in force yet")
	}
	raw, yaml, err := inForce.Object(in.path)
	if err != nil {
		return nil, statusError(err)
	}
	if string(raw) == "null" { // an empty list
		raw = []byte("[]")
		if in.path == "firewall/sets" {
			raw = []byte("{}")
		}
	}
	return &object{ContentType: "application/json", ETag: etagOf(yaml), Body: raw}, nil
}

func (s *server) addObject(ctx context.Context, in *objectWithBody) (*changedBody, error) {
	at := ""
	out, err := s.change(ctx, in.object(), "add", func(c *config.Config) (next *config.Config, err error) {
		next, at, err = c.Add(in.path, "", in.RawBody)
		return next, err
	}, func() string { return at })
	if err == nil && !in.DryRun {
		out.Status, out.Location = http.StatusCreated, locationOf(at)
	}
	return out, err
}

func locationOf(path string) string {
	steps := config.Split(path)
	for i, step := range steps {
		steps[i] = url.PathEscape(step)
	}
	return "/api/v1/" + strings.Join(steps, "/")
}

func (s *server) putObject(ctx context.Context, in *objectWithBody) (*changedBody, error) {
	isNew := false
	out, err := s.change(ctx, in.object(), "put", func(c *config.Config) (*config.Config, error) {
		_, missing := c.Text(in.path)
		isNew = missing != nil
		return c.Put(in.path, in.RawBody)
	}, nil)
	if err == nil && isNew && !in.DryRun {
		out.Status, out.Location = http.StatusCreated, locationOf(in.path)
	}
	return out, err
}

func (s *server) patchObject(ctx context.Context, in *objectWithBody) (*changedBody, error) {
	return s.change(ctx, in.object(), "patch", func(c *config.Config) (*config.Config, error) { return c.Patch(in.path, in.RawBody) }, nil)
}

func (s *server) removeObject(ctx context.Context, in *objectInput) (*changedBody, error) {
	return s.change(ctx, in, "remove", func(c *config.Config) (*config.Config, error) { return c.Remove(in.path) }, nil)
}

func (s *server) addElements(ctx context.Context, in *objectWithBody) (*changedBody, error) {
	in.path = strings.TrimSuffix(in.path, "/elements")
	return s.change(ctx, in.object(), "add elements to", func(c *config.Config) (*config.Config, error) {
		if _, err := c.Text(in.path); err != nil {
			return nil, err
		}
		return changeElements(c, "add-elements", in.path, in.RawBody)
	}, nil)
}

func (s *server) removeElement(ctx context.Context, in *objectInput) (*changedBody, error) {
	steps := config.Split(in.path)
	in.path = config.Join(steps[:3]...)
	return s.change(ctx, in, "remove element "+steps[4]+" of", func(c *config.Config) (*config.Config, error) {
		return c.Elements(steps[2], nil, []string{steps[4]})
	}, nil)
}

// change makes a change of one object, or returns its effect in a dry run. at overrides the path of
// the resulting object if it differs from the path of the request.
func (s *server) change(ctx context.Context, in *objectInput, verb string, make func(*config.Config) (*config.Config, error), at func() string) (*changedBody, error) {
	checked := func(c *config.Config) (*config.Config, error) {
		if in.IfMatch != "" {
			yaml, err := c.Text(in.path)
			if err != nil || !matches(in.IfMatch, etagOf(yaml)) {
				return nil, engine.ErrChanged
			}
		}
		return make(c)
	}
	if in.DryRun {
		out, err := s.wouldChange(ctx, checked)
		if err != nil {
			return nil, err
		}
		return &changedBody{Status: http.StatusOK, Body: *out}, nil
	}
	applied, err := s.opt.Control.Change(ctx, requestAuthor(ctx, verb+" "+in.path), checked)
	if err != nil {
		return nil, statusError(err)
	}
	path := in.path
	if at != nil {
		path = at()
	}
	out := &changedBody{Status: http.StatusOK, Body: s.outcomeOf(applied, path)}
	if yaml, err := applied.Given.Text(path); err == nil {
		out.ETag = etagOf(yaml)
	}
	return out, nil
}

func (s *server) wouldChange(ctx context.Context, make func(*config.Config) (*config.Config, error)) (*api.Outcome, error) {
	inForce := s.opt.Engine.Config()
	if inForce == nil {
		return nil, huma.Error409Conflict("no configuration is in force yet")
	}
	next, err := make(inForce)
	if err != nil {
		return nil, statusError(err)
	}
	f, err := s.opt.Engine.Forecast(ctx, next)
	if err != nil {
		return nil, huma.Error409Conflict(err.Error())
	}
	out := Outcome(f)
	return &out, nil
}

type batchInput struct {
	DryRun  bool   `query:"dry-run" doc:"change nothing, and answer what would change"`
	IfMatch string `header:"If-Match" doc:"refuse unless the ETag of the configuration in force is among these; * is any"`
	Body    []api.ObjectChange
}

// batch applies a list of changes as one change: all of them or none.
func (s *server) batch(ctx context.Context, in *batchInput) (*body[api.Outcome], error) {
	all := func(c *config.Config) (*config.Config, error) {
		if in.IfMatch != "" && !matches(in.IfMatch, tagOf(c)) { // c may be a draft, which has no tag in the cache
			return nil, engine.ErrChanged
		}
		if len(in.Body) == 1 && !strings.HasSuffix(in.Body[0].Op, "-elements") { // the operation may need two edits
			return applyChange(c, in.Body[0])
		}
		draft := c.Draft()
		for i, change := range in.Body {
			if _, err := applyChange(draft, change); err != nil && len(in.Body) == 1 {
				return nil, err
			} else if err != nil {
				return nil, fmt.Errorf("change %d: %w", i+1, err)
			}
		}
		draft.Finish()
		return draft, nil
	}
	if in.DryRun {
		out, err := s.wouldChange(ctx, all)
		if err != nil {
			return nil, err
		}
		return &body[api.Outcome]{*out}, nil
	}
	what := fmt.Sprintf("%d changes", len(in.Body))
	if len(in.Body) == 1 {
		what = in.Body[0].Op + " " + in.Body[0].Path
	}
	applied, err := s.opt.Control.Change(ctx, requestAuthor(ctx, what), all)
	if err != nil {
		return nil, statusError(err)
	}
	paths := make([]string, len(in.Body))
	for i, change := range in.Body {
		paths[i] = change.Path
	}
	return &body[api.Outcome]{s.outcomeOf(applied, paths...)}, nil
}

func applyChange(c *config.Config, change api.ObjectChange) (*config.Config, error) {
	value, err := json.Marshal(change.Value)
	if err != nil {
		return nil, err
	}
	switch change.Op {
	case "add":
		next, _, err := c.Add(change.Path, "", value)
		return next, err
	case "put":
		return c.Put(change.Path, value)
	case "patch":
		return c.Patch(change.Path, value)
	case "remove":
		return c.Remove(change.Path)
	}
	return changeElements(c, change.Op, change.Path, value)
}

// changeElements adds elements to a set, or removes them. A set that is added to is made.
func changeElements(c *config.Config, op, path string, value []byte) (*config.Config, error) {
	steps := config.Split(path)
	if len(steps) != 3 || steps[0] != "firewall" || steps[1] != "sets" {
		return nil, fmt.Errorf("%s: not the path of a set, as firewall/sets/banned: %w", path, config.ErrNoObject)
	}
	var elements []string
	if err := json.Unmarshal(value, &elements); err != nil {
		return nil, config.Errors{{Object: path, Cause: "not a list of prefixes and addresses", Hint: `write ["198.51.100.0/24"]`}}
	}
	if op == "remove-elements" {
		return c.Elements(steps[2], nil, elements)
	}
	if _, err := c.Text(path); err != nil {
		if c, err = c.Put(path, []byte("[]")); err != nil {
			return nil, err
		}
	}
	return c.Elements(steps[2], elements, nil)
}

var _, _ huma.Resolver = (*objectInput)(nil), (*objectWithBody)(nil)
