// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// Listed is an entry in the form of 'sluice conns --list --json'. Source and Destination are the endpoints in packets
// of the initiator. ReplySource and ReplyDestination are the endpoints in packets of the responder before translation.
type Listed struct {
	Namespace        string         `json:"namespace"`
	Protocol         flow.Protocol  `json:"protocol"`
	Source           netip.AddrPort `json:"source"`
	Destination      netip.AddrPort `json:"destination"`
	ReplySource      netip.AddrPort `json:"reply_source"`
	ReplyDestination netip.AddrPort `json:"reply_destination"`
	State            string         `json:"state"`
	Assured          bool           `json:"assured"`
	Offloaded        bool           `json:"offloaded,omitempty"`
	Timeout          float64        `json:"timeout_seconds"`
	Mark             uint32         `json:"mark,omitempty"`
	Zone             uint16         `json:"zone,omitempty"`
	Packets          *[2]uint64     `json:"packets,omitempty"` // original, reply
	Bytes            *[2]uint64     `json:"bytes,omitempty"`
}

// Listed returns the listed form of an entry of a namespace, or of the source with that name.
func (e *Entry) Listed(namespace string) Listed {
	f := e.Flow()
	l := Listed{Namespace: namespace, Protocol: f.Original.Protocol, Source: f.Original.Source, Destination: f.Original.Dest,
		ReplySource: f.Reply.Source, ReplyDestination: f.Reply.Dest, State: e.StateName(), Assured: f.Assured, Offloaded: f.Offloaded,
		Timeout: f.Timeout.Seconds(), Mark: f.Mark, Zone: f.Zone}
	if f.Counted {
		l.Packets, l.Bytes = &f.Packets, &f.Bytes
	}
	return l
}

// EachNamespace calls fn for every namespace of list. A nil list means all namespaces of the host: then a namespace
// that ended or may not be entered does not end the loop, and unseen describes in sentences which are missing.
func EachNamespace(list []netdev.Namespace, fn func(netdev.Namespace) error) (unseen []string, err error) {
	all, hidden := list == nil, 0
	if all {
		list, hidden = netdev.Namespaces()
	}
	var failed []error
	for _, ns := range list {
		err := fn(ns)
		switch {
		case all && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist)):
			failed = append(failed, err)
		case err != nil:
			return nil, err
		}
	}
	if len(failed) > 0 && len(failed) == len(list) {
		return nil, failed[0]
	}
	return Unseen(hidden, failed), nil
}

// CountIn counts the entries of a namespace that match f. With remove it also removes them; f must not be empty then.
func CountIn(ctx context.Context, ns netdev.Namespace, f *Filter, remove bool) (n int, err error) {
	c, err := OpenIn(ns)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if remove {
		return c.DeleteAll(ctx, f)
	}
	err = c.Dump(ctx, f, func(*Entry) error { n++; return nil })
	return n, err
}

// ListIn calls visit for the entries of a namespace that match f. An interrupted read is no error, because the list is
// a sample of a changing table. The entry is reused: visit must not keep the pointer.
func ListIn(ctx context.Context, ns netdev.Namespace, f *Filter, visit func(*Entry) error) error {
	c, err := OpenIn(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	if err = c.Dump(ctx, f, visit); errors.Is(err, ErrInterrupted) {
		return nil
	}
	return err
}
