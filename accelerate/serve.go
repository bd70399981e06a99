// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotRunning reports that no accelerator runs in the namespace.
var ErrNotRunning = errors.New("no acceleration is running in this network namespace: start it with 'sluice accelerate'")

// socketName is the file of the socket in the state directory.
const socketName = "accelerate.sock"

// answerTime limits how long the end of an accelerator waits for its last answers.
const answerTime = time.Second

// Serve opens an accelerator, answers on a socket in the state directory, and runs until ctx ends or a client stops
// it. ready is called when flows can be learned.
func Serve(ctx context.Context, directory string, o Options, ready func(*Accelerator)) (err error) {
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	release, err := lock(filepath.Join(directory, "accelerate.lock"))
	if err != nil {
		return err
	}
	defer release()
	a, err := Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	path := filepath.Join(directory, socketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // of a killed process; this one holds the lock
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	defer listener.Close() // removes the socket
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := &http.Server{Handler: a.handler(cancel), ReadHeaderTimeout: 5 * time.Second}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
		defer cancel()
		_ = server.Shutdown(ctx) // waits for the answer to the client that stops it
		_ = server.Close()
	}()
	go func() { _ = server.Serve(listener) }()
	ready(a)
	return a.Run(ctx)
}

// lock takes the lock of a file, which a killed process leaves behind without its lock.
func lock(path string) (release func(), err error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s: an acceleration is running already: end it with 'sluice accelerate stop'", path)
			}
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		// The previous holder may have removed the file before this process locked it.
		mine, err := f.Stat()
		there, gone := os.Lstat(path)
		if err == nil && gone == nil && os.SameFile(mine, there) {
			return func() {
				_ = os.Remove(path)
				_ = f.Close()
			}, nil
		}
		_ = f.Close()
		if err != nil || gone != nil && !errors.Is(gone, os.ErrNotExist) {
			return nil, fmt.Errorf("%s: %w", path, errors.Join(err, gone))
		}
	}
}

func (a *Accelerator) handler(stop func()) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		limit, err := strconv.Atoi(r.FormValue("limit"))
		if err != nil || limit < 0 {
			http.Error(w, "limit is not a number", http.StatusBadRequest)
			return
		}
		s, err := a.Status(limit)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(s)
	})
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
		stop()
	})
	return mux
}

// ask sends a request to the accelerator of a state directory.
func ask(ctx context.Context, directory, method, path string, answer any) error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(directory, socketName))
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, method, "http://accelerate"+path, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return ErrNotRunning
	case err != nil:
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return fmt.Errorf("the accelerator answers %s", response.Status)
	}
	if answer == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(answer)
}

// StatusOf asks the accelerator of a state directory for its state and at most limit flows.
func StatusOf(ctx context.Context, directory string, limit int) (*Status, error) {
	s := &Status{}
	return s, ask(ctx, directory, http.MethodGet, fmt.Sprintf("/status?limit=%d", limit), s)
}

// Stop ends the accelerator of a state directory, and returns when its programs are removed.
func Stop(ctx context.Context, directory string) error {
	if err := ask(ctx, directory, http.MethodPost, "/stop", nil); err != nil {
		return err
	}
	for {
		release, err := lock(filepath.Join(directory, "accelerate.lock"))
		if err == nil {
			release()
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.New("the accelerator accepted the stop but still runs")
		case <-time.After(20 * time.Millisecond):
		}
	}
}
