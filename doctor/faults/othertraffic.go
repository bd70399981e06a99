// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// OtherTraffic are connections that the fault does not concern: new ones through the router in both
// directions and to the router itself, and a permanent one. They show whether a remedy breaks
// working traffic.
type OtherTraffic struct {
	lab  *lab.Lab
	held net.Conn // from client to server; nil where none could be made
}

// echoPort is where the nodes echo; no condition has rules for it.
const echoPort = ":424" // outside the range of connection ports

// patience is the maximum wait for a reply. A lost SYN is repeated after a second.
const patience = 1500 * time.Millisecond

// way is one that new connections take.
type way struct{ network, from, to string }

func (w way) String() string { return w.network + " " + w.from + " to " + w.to }

var ways = []way{{"tcp", "client", Server}, {"udp", "client", Server}, {"tcp", "server", Client}, {"tcp", "client", Gateway}, {"tcp", "gateway", Server}}

// StartOtherTraffic runs a TCP and a UDP echo server on each node until ctx ends, and opens one
// connection that stays open all the time.
func StartOtherTraffic(ctx context.Context, l *lab.Lab) (*OtherTraffic, error) {
	for _, node := range []string{"client", "gateway", "server"} {
		tcp, err := l.Node(node).Listen(echoPort)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", node, err)
		}
		udp, err := l.Node(node).ListenPacket(echoPort)
		if err != nil {
			tcp.Close()
			return nil, fmt.Errorf("%s: %w", node, err)
		}
		context.AfterFunc(ctx, func() { tcp.Close(); udp.Close() })
		go echoStreams(tcp)
		go echoPackets(udp)
	}
	b := &OtherTraffic{lab: l}
	if held, err := l.Node("client").Dial(ctx, &net.Dialer{Timeout: patience}, "tcp", Server+echoPort); err == nil {
		context.AfterFunc(ctx, func() { held.Close() })
		if b.held = held; echoed(held) != nil {
			b.held = nil
		}
	}
	return b, nil
}

func echoStreams(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(c, c)
			c.Close()
		}()
	}
}

func echoPackets(c net.PacketConn) {
	b := make([]byte, 64)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		_, _ = c.WriteTo(b[:n], from)
	}
}

// echoed sends a byte and waits for it.
func echoed(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// Working names the bystanders that are answered.
func (b *OtherTraffic) Working(ctx context.Context) []string {
	answers := make(chan string, len(ways)+1)
	for _, w := range ways {
		go func() {
			c, err := b.lab.Node(w.from).Dial(ctx, &net.Dialer{Timeout: patience}, w.network, w.to+echoPort)
			if err == nil {
				err = echoed(c)
				c.Close()
			}
			answers <- map[bool]string{true: w.String()}[err == nil]
		}()
	}
	go func() {
		answers <- map[bool]string{true: "the connection that stays"}[b.held != nil && echoed(b.held) == nil]
	}()
	var working []string
	for range cap(answers) {
		if name := <-answers; name != "" {
			working = append(working, name)
		}
	}
	slices.Sort(working)
	return working
}

// Stopped is nil when all that worked does so still.
func (b *OtherTraffic) Stopped(ctx context.Context, worked []string) error {
	now := b.Working(ctx)
	stopped := slices.DeleteFunc(slices.Clone(worked), func(name string) bool { return slices.Contains(now, name) })
	if len(stopped) == 0 {
		return nil
	}
	return fmt.Errorf("no answer any more: %s", strings.Join(stopped, ", "))
}
