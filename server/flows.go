// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// FlowFilter is embedded in inputs, which the framework reads by exported names only.
type FlowFilter struct {
	Protocol string `query:"protocol" doc:"tcp, udp, ..."`
	Client   string `query:"client" doc:"address or prefix of the original source"`
	Dest     string `query:"destination" doc:"address or prefix of the original destination"`
	Port     int    `query:"port" minimum:"0" maximum:"65535" doc:"original destination port"`
	Owner    string `query:"owner" doc:"service or NAT rule"`
	Backend  string `query:"backend"`
	State    string `query:"state" doc:"as in ESTABLISHED"`
	Datapath string `query:"datapath" doc:"nftables, ebpf, or kernel: tracked, but of no service or rule"`
}

// source is the datapath to read flows from. Connections of the kernel that belong to no rule
// ("kernel") are read by the nftables datapath.
func (in *FlowFilter) source() string {
	if in.Datapath == "kernel" {
		return "nftables"
	}
	return in.Datapath
}

type flowsInput struct {
	FlowFilter
	Limit int `query:"limit" minimum:"0" maximum:"100000" default:"1000"`
}

// flowsAnswer documents the answer of list-flows, which is written as the flows are read.
func flowsAnswer(g huma.API) func(*huma.Operation) {
	return func(o *huma.Operation) {
		schema := g.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[api.Flows](), true, "Flows")
		o.Responses = map[string]*huma.Response{"200": {Description: "OK", Content: map[string]*huma.MediaType{"application/json": {Schema: schema}}}}
	}
}

// flows writes the members of [api.Flows] as they are read. Their total is known at the end.
func (s *server) flows(_ context.Context, in *flowsInput) (*huma.StreamResponse, error) {
	return s.writeFlows(&in.FlowFilter, func(w *flowWriter) {
		w.header.Set("Content-Type", "application/json")
		w.raw(`{"flows":[`)
		total := 0
		err := w.read(func(f *flow.Flow) {
			if total++; total > in.Limit {
				return
			}
			if total > 1 {
				w.raw(",")
			}
			w.encode(flowOf(f))
		})
		if err != nil {
			w.fail(err)
			return
		}
		w.raw(fmt.Sprintf("],\"total\":%d}\n", total))
	})
}

// streamFlows writes a line for each flow.
func (s *server) streamFlows(_ context.Context, in *FlowFilter) (*huma.StreamResponse, error) {
	return s.writeFlows(in, func(w *flowWriter) {
		w.header.Set("Content-Type", "application/x-ndjson")
		end := api.FlowLine{End: &api.FlowEnd{}}
		err := w.read(func(f *flow.Flow) {
			end.End.Total++
			wire := flowOf(f)
			w.encode(api.FlowLine{Flow: &wire})
		})
		if err != nil {
			end.End.Error = err.Error()
		}
		w.encode(end)
	})
}

// flowPiece is the size in bytes of one write of flows to a client.
const flowPiece = 64 << 10

// flowWriter writes flows to a client while they are read, so that neither side stores the whole
// list.
type flowWriter struct {
	out    *bodyState
	header http.Header
	buffer *bufio.Writer
	lines  *json.Encoder
	lost   error // write error
	read   func(yield func(*flow.Flow)) error
}

// writeFlows returns a response with the body written by write. The number of such responses is
// limited, because each reads the kernel's table.
func (s *server) writeFlows(in *FlowFilter, write func(*flowWriter)) (*huma.StreamResponse, error) {
	match, err := in.matcher()
	if err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	select {
	case s.streams <- struct{}{}:
	default:
		return nil, huma.Error503ServiceUnavailable(fmt.Sprintf("%d lists of flows are being read: try again in a moment", maxStreams))
	}
	return &huma.StreamResponse{Body: func(answer huma.Context) {
		defer func() { <-s.streams }()
		out := &bodyState{ResponseWriter: answer.BodyWriter().(http.ResponseWriter)}
		w := &flowWriter{out: out, header: out.Header(), buffer: bufio.NewWriterSize(out, flowPiece)}
		w.lines = json.NewEncoder(w.buffer)
		w.read = func(yield func(*flow.Flow)) error {
			return s.opt.Engine.Flows(answer.Context(), in.source(), func(f flow.Flow) bool {
				if match(&f) {
					yield(&f)
				}
				return w.lost == nil
			})
		}
		write(w)
		_ = w.buffer.Flush() // fails if the client has closed the connection
	}}, nil
}

func (w *flowWriter) encode(v any) {
	if w.lost == nil {
		w.lost = w.lines.Encode(v)
	}
}

func (w *flowWriter) raw(text string) {
	if w.lost == nil {
		_, w.lost = w.buffer.WriteString(text)
	}
}

// fail answers with a problem. If a part of the answer was written already, it closes the connection
// instead, so that the client does not take the part for the whole.
func (w *flowWriter) fail(err error) {
	if w.out.started {
		panic(http.ErrAbortHandler)
	}
	w.buffer.Reset(w.out)
	writeProblem(w.out, http.StatusInternalServerError, err.Error())
}

// bodyState reports whether a part of the body was written.
type bodyState struct {
	http.ResponseWriter
	started bool
}

func (s *bodyState) Write(b []byte) (int, error) {
	s.started = true
	return s.ResponseWriter.Write(b)
}

func flowOf(f *flow.Flow) api.Flow {
	return api.Flow{
		Protocol: f.Original.Protocol.String(), Client: f.Original.Source, Dest: f.Original.Dest, Replier: f.Reply.Source, ReplyTo: f.Reply.Dest,
		State: f.State, Owner: f.Owner, Backend: f.Backend, Datapath: f.Datapath, Timeout: f.Timeout.Seconds(), Packets: f.Packets, Bytes: f.Bytes,
	}
}

// matcher compiles the filter once.
func (in *FlowFilter) matcher() (func(*flow.Flow) bool, error) {
	var protocol flow.Protocol
	var client, dest netip.Prefix
	var err error
	if in.Protocol != "" {
		if protocol, err = flow.ParseProtocol(in.Protocol); err != nil {
			return nil, err
		}
	}
	if client, err = prefix(in.Client); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	if dest, err = prefix(in.Dest); err != nil {
		return nil, fmt.Errorf("destination: %w", err)
	}
	if err = conntrack.CheckState(in.State); err != nil {
		return nil, err
	}
	return func(f *flow.Flow) bool {
		return (protocol == flow.Any || f.Original.Protocol == protocol) &&
			(!client.IsValid() || client.Contains(f.Original.Source.Addr())) &&
			(!dest.IsValid() || dest.Contains(f.Original.Dest.Addr())) &&
			(in.Port == 0 || int(f.Original.Dest.Port()) == in.Port) &&
			(in.Owner == "" || f.Owner == in.Owner) &&
			(in.Backend == "" || f.Backend == in.Backend) &&
			(in.State == "" || strings.EqualFold(f.State, in.State)) &&
			(in.Datapath == "" || f.Datapath == in.Datapath)
	}, nil
}

// prefix parses an address or a prefix; "" yields the invalid prefix.
func prefix(s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}
