// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"time"
)

// errEnough ends a sample.
var errEnough = errors.New("enough")

// NewRate estimates the new connections a second of a namespace from the kernel's
// events, which are listened to until enough of them came, 0 for no bound, and no
// longer than that. Counters do not tell the rate: the kernel stopped to count.
func NewRate(ctx context.Context, ns Namespace, longest time.Duration, enough uint64) (float64, error) {
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
		lost, err = l.Read(ctx, func(Event, *Entry) error {
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
