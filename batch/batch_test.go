// SPDX-License-Identifier: Apache-2.0

package batch

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// TestRequestsAreCombined: requests that arrive during an operation are handled by one later operation, each exactly
// once, and Do returns after the operation that handled its request.
func TestRequestsAreCombined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New[int]()
		release := make(chan struct{})
		var mu sync.Mutex // protects operations and handled
		var operations [][]int
		handled := map[int]bool{}
		do := func(i int) {
			q.Do(i, func(take func() []int) {
				requests := take()
				<-release
				mu.Lock()
				defer mu.Unlock()
				for _, r := range requests {
					handled[r] = true
				}
				if len(requests) > 0 {
					operations = append(operations, requests)
				}
			})
			mu.Lock()
			defer mu.Unlock()
			if !handled[i] {
				t.Errorf("Do returned before request %d was handled", i)
			}
		}
		go do(0)
		synctest.Wait()
		for i := 1; i <= 100; i++ {
			go do(i)
		}
		synctest.Wait()
		if n := q.Len(); n != 100 {
			t.Errorf("%d requests wait during the first operation, want 100", n)
		}
		close(release)
		synctest.Wait()
		if len(operations) != 2 || !slices.Equal(operations[0], []int{0}) || len(operations[1]) != 100 {
			t.Errorf("operations: %v, want request 0 alone and then the other 100", operations)
		}
	})
}
