// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
)

// maxEventStreams limits the concurrent event streams; eventPiece is the number of events read from
// the list at once.
const (
	maxEventStreams = 128
	eventPiece      = 64
)

type eventsInput struct {
	Kind   []string `query:"kind" enum:"apply,backend,announcement,uplink,table,ports,drops,warning,flow" doc:"only these kinds; flow needs one of the filters from protocol on, and is told to those alone who ask for it"`
	Since  uint64   `query:"since" doc:"begin with what came after this ID; 0: with the oldest event that is kept. Without it: with what comes from now on"`
	Follow bool     `query:"follow" default:"true" doc:"false: end with the newest event, and begin with the oldest one where since is not given"`
	FlowFilter
	Last uint64 `header:"Last-Event-ID" doc:"as since, which it goes before; sent by clients that connect again"`

	from uint64
}

// Resolve implements huma.Resolver.
func (in *eventsInput) Resolve(ctx huma.Context) []error {
	switch {
	case ctx.Header("Last-Event-ID") != "":
		in.from = in.Last
	case ctx.Query("since") != "" || !in.Follow:
		in.from = in.Since
	default:
		in.from = math.MaxUint64
	}
	return nil
}

func (s *server) registerEvents(g huma.API) {
	huma.Register(g, huma.Operation{
		OperationID: "stream-events", Method: http.MethodGet, Path: "/events",
		Summary: "What happens in the gateway, as server-sent events",
		Description: "The first message has the kind begin and the ID that the stream begins after. A client that connects again sends the last ID that it got as Last-Event-ID. " +
			"The daemon keeps the last 8192 events: a client that is slower than that gets a message of the kind missed with their number, and one that reads nothing for 5 s is cut off.",
		Middlewares: huma.Middlewares{s.eventPlace(g)},
		Responses: map[string]*huma.Response{"200": {Description: "Messages whose data is an event",
			Content: map[string]*huma.MediaType{"text/event-stream": {Schema: g.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[event.Event](), true, "Event")}}}},
	}, s.events)
}

// eventPlace limits the event streams and refuses further clients.
func (s *server) eventPlace(g huma.API) func(huma.Context, func(huma.Context)) {
	places := make(chan struct{}, maxEventStreams)
	return func(ctx huma.Context, next func(huma.Context)) {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			next(ctx)
		default:
			_ = huma.WriteErr(g, ctx, http.StatusServiceUnavailable, fmt.Sprintf("%d clients follow the events: try again in a moment", maxEventStreams))
		}
	}
}

func (s *server) events(_ context.Context, in *eventsInput) (*huma.StreamResponse, error) {
	flows, err := s.flowWatch(in)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(answer huma.Context) {
		answer.SetHeader("Content-Type", "text/event-stream")
		answer.SetHeader("Cache-Control", "no-store")
		w := answer.BodyWriter().(http.ResponseWriter)
		stream := &eventStream{w: w, control: http.NewResponseController(w), kinds: in.Kind, engine: s.opt.Engine, flows: flows}
		if flows != nil {
			defer func() { <-s.streams }()
		}
		_ = stream.run(answer.Context(), s.opt.Events, in) // a disconnected client gets no error
	}}, nil
}

// eventStream is the event stream of one client.
type eventStream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	kinds   []string // an empty list means all kinds
	engine  *engine.Engine
	flows   *flowWatch // nil: no flow events
}

// flowWatch returns the flow subscription requested by the client, or nil. It counts against the
// limit of concurrent flow streams.
func (s *server) flowWatch(in *eventsInput) (*flowWatch, error) {
	if !slices.Contains(in.Kind, string(event.Flow)) {
		return nil, nil
	}
	if in.FlowFilter == (FlowFilter{}) {
		return nil, huma.Error422UnprocessableEntity("flows of interest: say which, as by client=198.51.100.7 or port=443")
	}
	match, err := in.matcher()
	if err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	select {
	case s.streams <- struct{}{}:
	default:
		return nil, huma.Error503ServiceUnavailable(fmt.Sprintf("%d streams of flows are being read: try again in a moment", maxStreams))
	}
	return &flowWatch{match: match, source: in.source()}, nil
}

// eventPatience is the maximum wait for a client to read. eventIdle is the interval of empty lines,
// which show the client and proxies that the connection is alive.
const (
	eventPatience = 5 * time.Second
	eventIdle     = 30 * time.Second
)

func (s *eventStream) run(ctx context.Context, log *event.Log, in *eventsInput) error {
	from := in.from
	if from == math.MaxUint64 {
		from = log.Last()
	}
	var first []byte
	strange := !log.Knows(from)
	if strange {
		from = 0
	}
	first = append(first, event.Event{ID: from, At: time.Now(), Kind: event.Begin, Text: "events from here on"}.Message()...)
	if strange && in.from != 0 {
		first = append(first, event.Event{ID: from, At: time.Now(), Kind: event.Missed, Text: "the daemon has begun anew: events between may be missing"}.Message()...)
	}
	if err := s.send(first); err != nil {
		return err
	}
	var look time.Time // time of the next scan of the flows
	again := time.NewTimer(0)
	defer again.Stop()
	idle := time.NewTicker(eventIdle)
	defer idle.Stop()
	for anew := strange; ; anew = false { // the number of events before the daemon's start is unknown
		events, missed, added := log.After(from, eventPiece)
		if len(events) > 0 {
			from = events[len(events)-1].ID
		}
		if anew {
			missed = 0
		}
		if err := s.send(s.messages(events, missed)); err != nil {
			return err
		}
		if len(events) == eventPiece {
			continue
		}
		if s.flows != nil && !time.Now().Before(look) {
			wait, err := s.sendFlows(ctx, from)
			if err != nil {
				return err
			}
			look = time.Now().Add(wait)
			again.Reset(wait)
		}
		if !in.Follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-idle.C:
			if err := s.send([]byte(":\n\n")); err != nil {
				return err
			}
		case <-again.C:
		case <-added:
		}
	}
}

// sendFlows sends the flows that began or ended since the last call, and returns the time of the
// next call. These events carry the ID of the preceding event, so that a client that reconnects
// misses no listed event.
func (s *eventStream) sendFlows(ctx context.Context, last uint64) (time.Duration, error) {
	events, wait, err := s.flows.scanFlows(ctx, s.engine)
	if err != nil {
		return 0, err
	}
	var messages []byte
	for _, e := range events {
		e.ID = last
		messages = append(messages, e.Message()...)
	}
	return wait, s.send(messages)
}

// messages joins the events of the selected kinds.
func (s *eventStream) messages(events []event.Sent, missed uint64) (out []byte) {
	if missed > 0 {
		out = event.Event{ID: events[0].ID - 1, At: time.Now(), Kind: event.Missed, Missed: missed, Text: fmt.Sprintf("%d events were missed", missed)}.Message()
	}
	for _, e := range events {
		if len(s.kinds) == 0 || slices.Contains(s.kinds, string(e.Kind)) {
			out = append(out, e.Bytes...)
		}
	}
	return out
}

// send writes to the client, with a time limit.
func (s *eventStream) send(messages []byte) error {
	if len(messages) == 0 {
		return nil
	}
	_ = s.control.SetWriteDeadline(time.Now().Add(eventPatience)) // fails on a closed connection, as Write does
	if _, err := s.w.Write(messages); err != nil {
		return err
	}
	return s.control.Flush()
}

var _ huma.Resolver = (*eventsInput)(nil)
