// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
)

// DefaultResponse is the default size in bytes of an HTTP response, headers included.
const DefaultResponse = 210

// maxResponse fits one segment of an IPv6 packet of 1,500 bytes.
const maxResponse = 1500 - ipv6Len - 20

// maxRequest is REQUEST_MAX of bpf/load/tcp.h.
const maxRequest = 256

// requestFor returns a client's request. Its length is a multiple of 8. It equals the length of the response if
// possible: the server end reuses the frame of the request, and a gateway may have left no room behind it. To keep
// the connection open, the client changes the byte after "Connection: ". HTTP ignores an unknown option there and
// keeps the connection (RFC 9112 §9.3).
func requestFor(response int) string {
	const head, tail = "GET / HTTP/1.1\r\nConnection: close\r\nHost: sluice.example\r\nAccept: */*\r\nUser-Agent: sluice", "\r\n\r\n"
	size := min(max(response, len(head)+len(tail))+7, maxRequest) / 8 * 8
	return head + strings.Repeat("-", size-len(head)-len(tail)) + tail
}

// responseHead returns the status line and headers of a response of the given size in bytes. Its length is a multiple
// of 8.
func responseHead(size int) (string, error) {
	if size == 0 {
		size = DefaultResponse
	}
	head := func(pad, body int) string {
		return fmt.Sprintf("HTTP/1.1 200 OK\r\nServer: sluice%s\r\nContent-Length: %4d\r\n\r\n", strings.Repeat("-", pad), body)
	}
	pad := (8 - len(head(0, 0))%8) % 8
	h := head(pad, size-len(head(pad, 0)))
	if size < len(h) || size > maxResponse {
		return "", fmt.Errorf("flows: response of %d bytes: from %d to %d bytes are possible (one segment)", size, len(h), maxResponse)
	}
	return h, nil
}

// Server is the server end of connections. It answers every TCP packet to any address and is stateless.
type Server struct {
	objects *flowsObjects
	links   []link.Link
}

// ServerOptions configures the answers of the server end.
type ServerOptions struct {
	// ResponseSize of the whole HTTP response in bytes; 0 means 210.
	ResponseSize int
	// ReplyBy is the interface that sends all answers, for direct server return; empty means the interface that
	// received the packet.
	ReplyBy string
}

// NewServer loads the server end and attaches it to an interface.
func NewServer(netns Namespace, iface string, o ServerOptions) (*Server, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("flows: memory limit: %w", err)
	}
	head, err := responseHead(o.ResponseSize)
	if err != nil {
		return nil, err
	}
	reply := 0
	if o.ReplyBy != "" {
		if reply, err = ifindexOf(netns, o.ReplyBy); err != nil {
			return nil, err
		}
	}
	size := o.ResponseSize
	if size == 0 {
		size = DefaultResponse
	}
	s := new(Server)
	if s.objects, err = loadFlowEnd(flowsFlowPlan{ResponseLen: uint32(size)}, []byte(head), reply, nil, 1); err != nil {
		return nil, err
	}
	l, err := attachXDP(netns, iface, s.objects.LoadServer)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.links = append(s.links, l)
	return s, nil
}

// Close detaches and unloads.
func (s *Server) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	s.links = nil
	return errors.Join(append(errs, s.objects.Close())...)
}
