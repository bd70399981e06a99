// SPDX-License-Identifier: Apache-2.0

// Package host implements the hosts of a lab. Its small servers answer with their name and the client address that
// they saw. Its clients count answers by server, failures and times. All run in this process, on sockets opened
// inside the lab's namespaces.
package host

import (
	"errors"
	"net"
	"strings"
	"sync"
)

// Answer is a server's answer: its name and the client's address.
type Answer struct {
	Name   string
	Client string // address and port as received by the server
}

func (a Answer) String() string { return a.Name + " " + a.Client }

// parseAnswer parses the output of [Answer.String].
func parseAnswer(s string) (Answer, error) {
	name, client, ok := strings.Cut(strings.TrimSpace(s), " ")
	if !ok || name == "" {
		return Answer{}, errors.New("not an answer of a lab server: " + strings.TrimSpace(s))
	}
	return Answer{Name: name, Client: client}, nil
}

// connections holds the open connections of a server. Stopping the server resets them immediately, as the exit of a
// process does.
type connections struct {
	mu     sync.Mutex // protects open and closed
	open   map[net.Conn]bool
	closed bool
}

// add reports false, and closes c, if the server has stopped.
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
