// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// maxBody bounds the size of a document in bytes: a list of 100,000 networks takes about 3 MiB.
const maxBody = 16 << 20

// Options of an API.
type Options struct {
	// Source of the host's interfaces and routes.
	Network Network
	// Key returns the required value of the request header with that name.
	Key func() string
	// InForce returns the active configuration, or nil.
	InForce func() *config.Config
	// Change replaces the active configuration by the function's result.
	Change func(ctx context.Context, who, what string, make func(*config.Config) (*config.Config, error)) error
	// Refused is called for each client without the key; may be nil.
	Refused func(client, cause string)
	// Path is the file that stores the objects across restarts; "" disables it.
	Path string
	Log  *slog.Logger
}

// API is the handler of the whole API.
type API struct {
	opt Options

	mu       sync.Mutex // protects the following fields
	store    *store
	unserved []string // what the objects ask for that is not in force
	late     bool     // The objects changed, and the configuration did not follow yet.
	lost     string   // Why the objects of an earlier process are not known; "" if they are.
	unkept   string   // Why the file does not have the objects; "" if it has.
}

// New returns an API with the objects that an earlier one kept. Nothing of them is in force
// before [API.Start].
func New(opt Options) *API {
	a := &API{opt: opt, store: newStore(opt.Network)}
	a.read()
	return a
}

// Warnings returns which requests of the objects are not in force, and whether their file is damaged or
// cannot be written.
func (a *API) Warnings() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.Clone(a.unserved)
	for _, trouble := range []string{a.lost, a.unkept} {
		if trouble != "" {
			list = append(list, trouble)
		}
	}
	return list
}

// retry is the time between attempts to apply the objects.
const retry = 5 * time.Second

// Start applies the objects.
func (a *API) Start(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.applyObjects(ctx, "start")
}

// Run retries until the context ends. It looks up missing data of farms, such as the hardware address of a backend,
// and applies the objects if the configuration could not follow them.
func (a *API) Run(ctx context.Context) {
	tick := time.NewTicker(retry)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		a.mu.Lock()
		if a.store.refresh() || a.late {
			a.applyObjects(ctx, "what farms waited for")
		}
		a.mu.Unlock()
	}
}

// applyObjects puts the objects in force, also if they cannot be written: earlier objects are on disk.
func (a *API) applyObjects(ctx context.Context, what string) {
	if a.lost != "" { // an empty list of objects would end all services of the API
		return
	}
	before := a.unkept
	a.unkept = ""
	if err := a.write(); err != nil {
		if a.unkept = err.Error(); a.unkept != before {
			a.opt.Log.Warn(a.unkept)
		}
	}
	if err := a.enforceObjects(ctx, "nftlb API", what); err != nil && ctx.Err() == nil {
		a.opt.Log.Error("the configuration does not follow the objects of the nftlb API; trying again", "every", retry, "error", err)
	}
}

// ServeHTTP implements [http.Handler].
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if key := a.opt.Key(); key == "" || subtle.ConstantTimeCompare([]byte(key), []byte(r.Header.Get("Key"))) != 1 {
		if a.opt.Refused != nil {
			a.opt.Refused(r.RemoteAddr, "nftlb API: no key, or a wrong one, was sent")
		}
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if !slices.Contains([]string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}, r.Method) {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		answer := reply{status: http.StatusBadRequest, body: sentence("the document did not arrive")}
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			answer = reply{status: http.StatusRequestEntityTooLarge, body: sentence("the document is larger than 16 MiB")}
		}
		answer.write(w)
		return
	}
	a.answerRequest(r, body).write(w)
}

func (r reply) write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(r.status)
	_, _ = w.Write(r.body)
}

func (a *API) answerRequest(r *http.Request, body []byte) reply {
	a.mu.Lock()
	defer a.mu.Unlock()
	path, s := r.URL.EscapedPath(), a.store
	var answer reply
	switch r.Method {
	case http.MethodGet:
		answer = s.get(path)
		a.late = a.late || answer.found
		return answer
	case http.MethodPost, http.MethodPut:
		answer = s.postDocument(path, body)
	case http.MethodPatch:
		answer = s.patch(path, body)
	case http.MethodDelete:
		answer = s.delete(path, body)
	}
	a.lost = ""
	if err := a.apply(r.Context(), "nftlb client "+r.RemoteAddr, r.Method+" "+path); err != nil {
		a.opt.Log.Error("the objects of the nftlb API changed, but the configuration did not follow; trying again", "every", retry, "error", err)
		if answer.status == http.StatusOK {
			return reply{status: http.StatusInternalServerError, body: sentence("error generating rules. " + strings.ReplaceAll(err.Error(), "\n", ". "))}
		}
	}
	return answer
}
