// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
)

// closed is a host with one namespace. Its first readings succeed, the others fail with err.
type closed struct {
	Reader
	readings int
	err      error
}

func (c *closed) Namespaces() ([]netdev.Namespace, int) {
	return []netdev.Namespace{{Name: "blue", Inode: 7}}, 0
}
func (c *closed) Partial() bool                         { return true }
func (c *closed) Counters(context.Context) HostCounters { return HostCounters{} }
func (c *closed) Rules(context.Context, netdev.Namespace) (*firewall.Ruleset, error) {
	return nil, c.err
}
func (c *closed) Table(context.Context, netdev.Namespace, *NamespaceReading) (*conntrack.Summary, *Entries, error) {
	return nil, nil, c.err
}
func (c *closed) Namespace(context.Context, netdev.Namespace, *Sockets) (NamespaceReading, error) {
	if c.readings--; c.readings < 0 {
		return NamespaceReading{}, c.err
	}
	return NamespaceReading{}, nil
}

// TestTakeNothing: if no namespace can be read, Take returns an error and no sample.
func TestTakeNothing(t *testing.T) {
	for name, c := range map[string]*closed{
		"not permitted":      {readings: 0, err: fs.ErrPermission},
		"gone":               {readings: 0, err: fs.ErrNotExist},
		"gone in the window": {readings: 1, err: fs.ErrNotExist},
	} {
		s, err := Take(t.Context(), c, Options{Window: time.Millisecond, NoDrops: true})
		if s != nil || err == nil || c.err == fs.ErrPermission && !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
}

func (*closed) FollowUp(*Namespace) {}

func (*closed) Silent(context.Context, netdev.Namespace, []netip.Addr) []hold.Silent {
	return nil
}
