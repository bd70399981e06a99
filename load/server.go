// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
)

// DefaultResponse is the size in bytes of an HTTP response, headers included,
// where nothing else is said.
const DefaultResponse = 210

// maxResponse is what fits one segment of an IPv6 packet of 1,500 bytes.
const maxResponse = 1500 - ipv6Len - 20

// maxRequest is REQUEST_MAX of load_tcp.h.
const maxRequest = 256

// requestFor returns what a client asks; its length is a multiple of 8. It is as
// long as the response where that is possible: the frame of a request becomes
// that of the response, and a gateway may have left no room behind it. The byte
// after "Connection: " is changed where the connection stays open: a word that
// HTTP does not know there means just that (RFC 9112 §9.3).
func requestFor(response int) string {
	const head, tail = "GET / HTTP/1.1\r\nConnection: close\r\nHost: sluice.example\r\nAccept: */*\r\nUser-Agent: sluice", "\r\n\r\n"
	size := min(max(response, len(head)+len(tail))+7, maxRequest) / 8 * 8
	return head + strings.Repeat("-", size-len(head)-len(tail)) + tail
}

// responseHead returns the status line and headers of a response of a size in
// bytes; its length is a multiple of 8.
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

// Server is the server end of connections: it answers every TCP packet to any
// address and keeps nothing.
type Server struct {
	objects *flowsObjects
	links   []link.Link
}

// ServerOptions says how the server end answers.
type ServerOptions struct {
	// ResponseSize of the whole HTTP response in bytes; 0 means 210.
	ResponseSize int
	// ReplyBy is the interface that all answers leave by, for direct server
	// return; empty means the one that the packet came from.
	ReplyBy string
}

// NewServer loads the server end and attaches it to an interface.
func NewServer(place Place, iface string, o ServerOptions) (*Server, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("flows: memory limit: %w", err)
	}
	head, err := responseHead(o.ResponseSize)
	if err != nil {
		return nil, err
	}
	reply := 0
	if o.ReplyBy != "" {
		if reply, err = ifindexOf(place, o.ReplyBy); err != nil {
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
	l, err := attachXDP(place, iface, s.objects.LoadServer)
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
