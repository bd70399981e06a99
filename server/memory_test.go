// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"
)

// heap returns the number of bytes in heap objects.
func heap() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// growth returns the maximum growth of the heap while f runs. Garbage is collected early, so that the result
// approximates the memory in use.
func growth(f func()) uint64 {
	defer debug.SetGCPercent(debug.SetGCPercent(10))
	runtime.GC()
	before, most := heap(), uint64(0)
	done := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				most = max(most, heap())
				time.Sleep(200 * time.Microsecond)
			}
		}
	})
	f()
	close(done)
	all.Wait()
	return max(most, before) - before
}

// upTo repeats a part up to a size.
func upTo(size int, before, part, after string) string {
	return before + strings.Repeat(part, (size-len(before)-len(after))/len(part)) + after
}

// dense are bodies with more values than allowed for their size, and with just as many as allowed. All are YAML,
// some are JSON.
func dense(size int) map[string]string {
	return map[string]string{
		"list of numbers":    upTo(size, `{"services": [`, "1,", "1]}"),
		"list of objects":    upTo(size, `{"services": [`, "{},         ", "1]}"),
		"plain list":         upTo(size, "[", "{},         ", "1]"),
		"list of changes":    upTo(size, "[", `{"op":"put","path":"services/a"},`, "1]"),
		"value of a change":  upTo(size, `[{"op":"put","path":"services/a","value":[`, "[],         ", "1]}]"),
		"long keys":          upTo(size, "{", "aaaaaaaaa,", `"b":1}`),
		"list of pairs":      upTo(size, "[", "a: b,       ", "1]"),
		"list of addresses":  upTo(size, "[", `"10.0.0.1",`, `"10.0.0.1"]`),
		"brackets":           upTo(size, "", "[", ""),
		"brackets, few":      strings.Repeat("[", 8000) + strings.Repeat(" ", size-8000),
		"block":              upTo(size, "services:\n", "- name: a\n  mode: b\n", ""),
		"questions":          upTo(size, "", "? ? ? ?         \n", ""),
		"aliases of objects": upTo(size, "services:\n- &a {listen: [{address: 192.0.2.1, ports: [1, 2, 3, 4, 5, 6, 7, 8, 9]}]}\n", "- *a        \n", ""),
	}
}

// TestMemoryOfRequests sends dense bodies of 1 MiB to every operation with a body. The heap grows by at most 64
// MiB.
func TestMemoryOfRequests(t *testing.T) {
	const most = 64 << 20
	s := forOperations(t)
	bodies := dense(1 << 20)
	for _, op := range operations(t) {
		if op.media == "" || op.id == "stop" {
			continue
		}
		t.Run(op.id, func(t *testing.T) {
			if testing.Short() && op.id != "plan" {
				t.Skip("each operation takes seconds")
			}
			worst, of := uint64(0), ""
			for name, body := range bodies {
				r := httptest.NewRequest(op.method, op.path, strings.NewReader(body))
				r.Header.Set("Content-Type", op.media)
				grown := growth(func() { s.Config.Handler.ServeHTTP(&nowhere{}, r) })
				if grown > worst {
					worst, of = grown, name
				}
			}
			t.Logf("%d MiB by %s", worst>>20, of)
			if worst > most {
				t.Errorf("%s: a body of 1 MiB (%s) takes %d MiB", op.id, of, worst>>20)
			}
		})
	}
}

// nowhere discards a response.
type nowhere struct{ header http.Header }

func (n *nowhere) Header() http.Header {
	if n.header == nil {
		n.header = http.Header{}
	}
	return n.header
}
func (*nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (*nowhere) WriteHeader(int)             {}
