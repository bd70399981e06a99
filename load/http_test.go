// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

func TestHTTP(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "hello")
	}))
	defer s.Close()
	for name, spec := range map[string]HTTPSpec{
		"closed-loop": {Requests: 300, Connections: 10},
		"kept alive":  {Requests: 300, Connections: 10, KeepAlive: true},
		"open-loop":   {Requests: 100, Connections: 20, Rate: 2000},
	} {
		t.Run(name, func(t *testing.T) {
			spec.URL = s.URL
			r, err := RunHTTP(context.Background(), spec, nil)
			if err != nil {
				t.Fatal(err)
			}
			if r.Complete != uint64(spec.Requests) || r.Failed != 0 || r.Bytes != 5*r.Complete || r.Statuses[200] != spec.Requests {
				t.Errorf("%+v", r)
			}
			if r.Total.Count != r.Complete || r.Total.P50 == 0 {
				t.Errorf("times %+v", r.Total)
			}
			if connects := r.Connect.Count; spec.KeepAlive && connects > 20 || !spec.KeepAlive && connects != r.Complete {
				t.Errorf("%d connects", connects)
			}
		})
	}
}

func TestHTTPErrors(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		panic(http.ErrAbortHandler)
	}))
	gone := httptest.NewServer(nil)
	gone.Close()
	defer s.Close()
	for url, kind := range map[string]string{gone.URL: "connection refused", s.URL: "closed early"} {
		r, err := RunHTTP(context.Background(), HTTPSpec{URL: url, Requests: 3, Timeout: 5 * time.Second}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Failed != 3 || r.Errors[kind] != 3 {
			t.Errorf("%s: %+v", kind, r.Errors)
		}
	}
	for _, spec := range []HTTPSpec{{URL: s.URL}, {URL: "nothing", Requests: 1}} {
		if _, err := RunHTTP(context.Background(), spec, nil); err == nil {
			t.Errorf("%+v: no error", spec)
		}
	}
}
