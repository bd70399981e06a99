// SPDX-License-Identifier: Apache-2.0

// Package host is what the machines of a lab run: small servers that answer with their name and
// the client address they saw, and clients that count who answered, what failed and when. All of
// it runs in this process, on sockets that were opened inside the namespaces of the lab.
package host

import (
	"errors"
	"net"
	"strings"
	"sync"
)

// Answer is what a server says: who it is and who it believes to talk to.
type Answer struct {
	Name   string
	Client string // address and port as the server saw them
}

func (a Answer) String() string { return a.Name + " " + a.Client }

// parseAnswer reads the form that [Answer.String] writes.
func parseAnswer(s string) (Answer, error) {
	name, client, ok := strings.Cut(strings.TrimSpace(s), " ")
	if !ok || name == "" {
		return Answer{}, errors.New("not an answer of a lab server: " + strings.TrimSpace(s))
	}
	return Answer{Name: name, Client: client}, nil
}

// connections remembers the open connections of a server, so that stopping it resets them at
// once, as the end of a process does.
type connections struct {
	mu     sync.Mutex // protects open and closed
	open   map[net.Conn]bool
	closed bool
}

// add reports false, and closes c, when the server has stopped.
func (s *connections) add(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return false
	}
	if s.open == nil {
		s.open = make(map[net.Conn]bool)
	}
	s.open[c] = true
	return true
}

func (s *connections) remove(c net.Conn) {
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	c.Close()
}

func (s *connections) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.open {
		c.Close()
	}
	s.open = nil
}
