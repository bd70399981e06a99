// SPDX-License-Identifier: Apache-2.0

// Package server implements the HTTP API: the REST handlers, from which the OpenAPI 3.1 document is
// generated, and the metrics page.
package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/discovery"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
)

// Daemon is the server's view of its process.
type Daemon interface {
	// Stop ends the process soon after it returned.
	Stop(keep bool)
}

// Options of a server.
type Options struct {
	Engine    *engine.Engine
	Control   Control
	Cluster   Cluster // nil: no cluster
	Daemon    Daemon
	Version   string
	File      string   // Configuration file that the daemon watches.
	Datapaths []string // Available, preferred first.
	Metrics   http.Handler
	Mappings  func() []datapath.Mapping // nil if no client can create mappings
	Events    *event.Log
	Audit     *audit.Log                // nil: nothing is recorded.
	Warnings  func() []string           // in addition to the engine's; nil: none
	Sources   func() []discovery.Status // of discovery; nil: none
}

// maxConfig is the maximum size of a configuration sent to the API, in bytes. 10,000 services with
// four backends take about 4 MiB.
const maxConfig = 64 << 20

// maxStreams is the maximum number of concurrent flow streams, each with a dump of the kernel's
// table.
const maxStreams = 16

// New returns the handler of the whole API.
func New(opt Options) http.Handler {
	mux := http.NewServeMux()
	build(mux, opt)
	if opt.Metrics != nil {
		mux.Handle("GET /metrics", opt.Metrics)
	}
	return auditRefused(withProblems(mux), opt.Audit)
}

// OpenAPI returns the OpenAPI 3.1 document of the API as YAML.
func OpenAPI(version string) ([]byte, error) {
	return build(http.NewServeMux(), Options{Version: version}).OpenAPI().YAML()
}

// build registers every handler on the mux.
func build(mux *http.ServeMux, opt Options) huma.API {
	cfg := huma.DefaultConfig("Sluice", opt.Version)
	cfg.Info.Description = "NAT gateway and layer-4 load balancer for Linux. Over TCP only GET, HEAD and POST /api/v1/plan are served, unless the daemon runs with --listen-changes."
	cfg.OpenAPIPath = "/openapi"
	cfg.DocsPath = ""
	cfg.CreateHooks = nil // answers carry no $schema member
	format := huma.Format{Marshal: huma.DefaultJSONFormat.Marshal, Unmarshal: unmarshal}
	cfg.Formats = map[string]huma.Format{"application/json": format, "json": format}
	cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token":       {Type: "http", Scheme: "bearer", Description: "over TCP, with --token-file"},
		"certificate": {Type: "mutualTLS", Description: "over TCP, with --client-ca"},
	}
	// The Unix socket requires no credentials: its permissions decide. A daemon with token and
	// certificate requires both.
	cfg.Security = []map[string][]string{{}, {"token": {}}, {"certificate": {}}, {"token": {}, "certificate": {}}}
	if opt.Events == nil {
		opt.Events = event.New(1)
	}
	s := &server{opt: opt, started: time.Now(), streams: make(chan struct{}, maxStreams)}
	hapi := humago.New(mux, cfg)
	addConfigSchemas(hapi.OpenAPI().Components.Schemas)
	group := huma.NewGroup(hapi, "/api/v1")
	group.UseMiddleware(refuseIfMatch(group))
	s.register(group)
	addCommonParts(hapi.OpenAPI())
	return hapi
}

// unmarshal parses a JSON body with memory proportional to its size.
func unmarshal(data []byte, v any) error {
	if err := config.Bounded(data); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// refuseIfMatch refuses If-Match for operations on resources without an ETag. Ignoring the header would
// make the change that the client wanted to prevent (RFC 9110 §13.1.1).
func refuseIfMatch(g huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		o := ctx.Operation()
		tagged := slices.ContainsFunc(o.Parameters, func(p *huma.Param) bool { return p.Name == "If-Match" })
		if ctx.Header("If-Match") != "" && !tagged && o.Method != http.MethodGet {
			_ = huma.WriteErr(g, ctx, http.StatusPreconditionFailed, fmt.Sprintf("%s %s has no ETag that If-Match could name: send the request without it", o.Method, o.Path))
			return
		}
		next(ctx)
	}
}

type server struct {
	opt     Options
	started time.Time
	tagged  atomic.Pointer[taggedConfig] // Last configuration that was requested.
	streams chan struct{}                // One element for each open stream.
}

type body[T any] struct{ Body T }

func (s *server) register(g huma.API) {
	huma.Get(g, "/status", s.status, describe("status", "The daemon at a glance"))
	huma.Get(g, "/services", s.services, describe("list-services", "Services with their backends and counters"))
	huma.Get(g, "/services/{service}", s.service, describe("get-service", "One service"))
	huma.Get(g, "/backends", s.backends, describe("list-backends", "Backends of all services"))
	huma.Get(g, "/nat", s.natRules, describe("list-nat", "NAT rules"))
	huma.Get(g, "/interfaces", s.interfaces, describe("list-interfaces", "Interfaces, and how the eBPF datapath meets their packets"))
	huma.Get(g, "/addresses", s.addresses, describe("list-addresses", "Addresses of services and pools, and who answers for them"))
	huma.Get(g, "/nodes", s.nodes, describe("list-nodes", "Gateways of the cluster, and their parts of the pools"))
	huma.Get(g, "/uplinks", s.uplinks, describe("list-uplinks", "Uplinks with their states"))
	huma.Get(g, "/announcements", s.announcements, describe("list-announcements", "Addresses that are announced to routers, or withdrawn, and why"))
	huma.Get(g, "/mappings", s.mappings, describe("list-mappings", "Mappings that inside hosts have asked for by PCP"))
	huma.Get(g, "/flows", s.flows, describe("list-flows", "Tracked connections of both datapaths"), flowsAnswer(g))
	huma.Get(g, "/flows/stream", s.streamFlows, describe("stream-flows", "All tracked connections, a JSON object on each line, the last one with their number"), ndjson)
	huma.Get(g, "/explain", s.explain, describe("explain", "What would happen to a packet, without sending it"))
	huma.Get(g, "/config", s.config, describe("get-config", "The configuration in force, as YAML"), asYAML)
	huma.Put(g, "/config", s.apply, describe("apply", "Put a configuration in force"), limitBody)
	huma.Post(g, "/plan", s.planConfig, describe("plan", "What a configuration would change"), limitBody)
	huma.Post(g, "/reload", s.reload, describe("reload", "Read the daemon's file again"))
	huma.Post(g, "/stop", s.stop, describe("stop", "End the daemon"))
	s.registerEvents(g)
	s.registerChanges(g)
	s.registerObjects(g)
	s.registerStates(g)
	s.registerCluster(g)
}

// warnings returns conditions that prevent rules from working, and the error of a refused
// configuration.
func (s *server) warnings(v engine.View) []string {
	if s.opt.Warnings == nil {
		return v.Warnings
	}
	return append(v.Warnings, s.opt.Warnings()...)
}

func describe(id, summary string) func(*huma.Operation) {
	return func(o *huma.Operation) { o.OperationID, o.Summary = id, summary }
}

// ndjson documents a response of JSON lines.
func ndjson(o *huma.Operation) {
	o.Responses = map[string]*huma.Response{"200": {Description: "One flow a line; the last line is {\"end\": {\"total\": N}}, with \"error\" when they are not all",
		Content: map[string]*huma.MediaType{"application/x-ndjson": {}}}}
}

// asYAML documents a response in YAML.
func asYAML(o *huma.Operation) {
	o.Responses = map[string]*huma.Response{"200": {Description: "The file, with all defaults", Headers: map[string]*huma.Param{"ETag": {Schema: &huma.Schema{Type: "string"}}},
		Content: map[string]*huma.MediaType{"application/yaml": {Schema: &huma.Schema{Type: "object"}}}}}
}

func limitBody(o *huma.Operation) { o.MaxBodyBytes = maxConfig }

func (s *server) status(context.Context, *struct{}) (*body[api.Status], error) {
	v := s.opt.Engine.View()
	st := api.Status{
		Version: s.opt.Version, PID: os.Getpid(), Started: s.started, Uptime: time.Since(s.started).Seconds(), File: s.opt.File,
		Revision: v.Applied.Revision, AppliedAt: v.Applied.At, Datapaths: s.opt.Datapaths, Warnings: s.warnings(v),
	}
	if v.Applied.Err != nil {
		st.Error = v.Applied.Err.Error()
	}
	if v.Config != nil {
		st.Services, st.NATRules, st.ETag = len(v.Config.Services), len(v.Config.NAT), s.etag(v.Config)
	}
	for _, sv := range v.Services {
		st.Backends += len(sv.Backends)
		for _, state := range sv.State {
			if state.String() == "up" {
				st.BackendsUp++
			}
		}
	}
	if d, ok := s.drains()[engine.Backend{}]; ok {
		st.Drain = drainOf(d)
	}
	st.NodeDrains, st.Uplinks = v.NodeDrains, uplinkList(v)
	return &body[api.Status]{st}, nil
}

type configInput struct {
	Name    string `query:"name" doc:"name of the file, for messages" default:"request"`
	IfMatch string `header:"If-Match" doc:"refuse unless the ETag of the configuration in force is among these; * is any"`
	RawBody []byte `contentType:"application/yaml"`
}

type applyInput struct {
	Name    string `query:"name" doc:"name of the file, for messages" default:"request"`
	Confirm int    `query:"confirm" minimum:"0" maximum:"86400" doc:"take the change back after this many seconds unless POST /config/confirm came; 0: never"`
	IfMatch string `header:"If-Match" doc:"refuse unless the ETag of the configuration in force is among these; * is any"`
	RawBody []byte `contentType:"application/yaml"`
}

// decode reads a configuration and turns its errors into a problem document.
func decode(in *configInput) (*config.Config, error) {
	cfg, err := config.Decode(in.Name, in.RawBody)
	if err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	return cfg, nil
}

func (s *server) apply(ctx context.Context, in *applyInput) (*body[api.Outcome], error) {
	cfg, err := decode(&configInput{Name: in.Name, RawBody: in.RawBody})
	if err != nil {
		return nil, err
	}
	var expected func(*config.Config) bool
	if in.IfMatch != "" {
		expected = func(inForce *config.Config) bool { return inForce != nil && matches(in.IfMatch, s.etag(inForce)) }
	}
	applied, err := s.opt.Control.Apply(ctx, requestAuthor(ctx, "apply "+in.Name), cfg, expected, time.Duration(in.Confirm)*time.Second)
	if err != nil {
		return nil, statusError(err)
	}
	return &body[api.Outcome]{s.outcome(applied)}, nil
}

// matches reports whether an If-Match header includes the tag: * matches any tag, else the header
// is a list (RFC 9110 §13.1.1).
func matches(header, tag string) bool {
	return slices.ContainsFunc(strings.Split(header, ","), func(one string) bool {
		one = strings.TrimSpace(one)
		return one == "*" || one == tag
	})
}

func (s *server) outcome(a engine.Applied) api.Outcome {
	v := s.opt.Engine.View()
	return api.Outcome{Revision: a.Revision, Changes: a.Changes, Places: listPlacements(v), Warnings: s.warnings(v)}
}

// outcomeOf is outcome for a change of the objects at these paths. Among services, it includes only
// the places of the changed ones.
func (s *server) outcomeOf(a engine.Applied, paths ...string) api.Outcome {
	services := map[string]bool{}
	for _, path := range paths {
		steps := config.Split(path)
		if steps[0] != "services" || len(steps) < 2 {
			return s.outcome(a)
		}
		services[steps[1]] = true
	}
	v := a.ViewOf(services)
	return api.Outcome{Revision: a.Revision, Changes: a.Changes, Places: listPlacements(v), Warnings: s.warnings(v)}
}

func (s *server) planConfig(ctx context.Context, in *configInput) (*body[api.Outcome], error) {
	cfg, err := decode(in)
	if err != nil {
		return nil, err
	}
	if inForce := s.opt.Engine.Config(); in.IfMatch != "" && (inForce == nil || !matches(in.IfMatch, s.etag(inForce))) {
		return nil, statusError(engine.ErrChanged)
	}
	f, err := s.opt.Engine.Forecast(ctx, cfg)
	if err != nil {
		return nil, huma.Error409Conflict(err.Error())
	}
	return &body[api.Outcome]{Outcome(f)}, nil
}

func (s *server) reload(ctx context.Context, _ *struct{}) (*body[api.Outcome], error) {
	applied, err := s.opt.Control.Reload(ctx, requestAuthor(ctx, "reload"))
	if err != nil {
		return nil, huma.Error409Conflict(err.Error())
	}
	return &body[api.Outcome]{s.outcome(applied)}, nil
}

func (s *server) stop(ctx context.Context, in *body[api.Stop]) (*struct{}, error) {
	what := "stop"
	if in.Body.Keep {
		what = "stop --keep"
	}
	s.opt.Audit.Add(audit.Entry{Who: requestAuthor(ctx, what).Who, What: what, Result: audit.Done})
	s.opt.Daemon.Stop(in.Body.Keep)
	return nil, nil
}

type configOutput struct {
	ContentType string `header:"Content-Type"`
	ETag        string `header:"ETag"`
	Body        []byte
}

func (s *server) config(context.Context, *struct{}) (*configOutput, error) {
	inForce := s.opt.Engine.Config()
	if inForce == nil {
		return nil, huma.Error404NotFound("no configuration is in force yet")
	}
	raw, err := config.Marshal(inForce)
	if err != nil {
		return nil, err
	}
	return &configOutput{ContentType: "application/yaml", ETag: s.etag(inForce), Body: raw}, nil
}
