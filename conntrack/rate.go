// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-lb/sluice/netdev"
)

// errEnough stops a dump when the sample is complete.
var errEnough = errors.New("enough")

// NewRate estimates a namespace's new connections per second from the kernel's events. It listens until it has
// received enough events, or for at most longest; 0 as enough sets no bound. The kernel no longer counts new
// connections.
func NewRate(ctx context.Context, ns netdev.Namespace, longest time.Duration, enough uint64) (float64, error) {
	l, err := Listen(ns, New)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	start, n := time.Now(), uint64(0)
	for err == nil {
		var lost uint32
		lost, err = l.Read(ctx, func(Group, *Entry) error {
			if n++; n == enough {
				return errEnough
			}
			return nil
		})
		n += uint64(lost)
	}
	if !errors.Is(err, errEnough) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		return 0, err
	}
	return float64(n) / time.Since(start).Seconds(), nil
}
