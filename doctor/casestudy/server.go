// SPDX-License-Identifier: Apache-2.0

package casestudy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
)

// nginxConfig replies to every request at once, from one worker. The directory belongs to root. The
// paths below are set because nginx gives the named files to the worker's user, which needs none.
const nginxConfig = `daemon off;
pid %[1]s/pid;
error_log %[1]s/error.log;
worker_processes 1;
worker_rlimit_nofile 65535;
events { worker_connections 20000; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server {
		listen %[2]s:80 backlog=65535;
		listen %[2]s:%[3]s backlog=65535;
		location / { return 200 "sluice\n"; }
	}
}
`

// nginx runs a real nginx in the server's namespace and waits until it answers.
func (s *study) nginx(ctx context.Context) (stop func(), err error) {
	s.report.Server = "nginx"
	dir, err := os.MkdirTemp("", "sluice-nginx-")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, nginxConfig, dir, faults.Server, backendPort), 0o644); err != nil {
		return nil, err
	}
	var log bytes.Buffer
	cmd := s.lab.Node("server").Command(ctx, "nginx", "-c", config, "-e", filepath.Join(dir, "error.log"))
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // its worker ends with it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("case study: nginx: %w", err)
	}
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		os.RemoveAll(dir)
	}
	if err := s.answers(ctx, faults.Server+":80", log.String); err != nil {
		stop()
		return nil, fmt.Errorf("case study: nginx: %w", err)
	}
	return stop, nil
}

// answers waits until a server takes connections of the client.
func (s *study) answers(ctx context.Context, address string, log func() string) error {
	for deadline := time.Now().Add(time.Minute); ; {
		c, err := s.lab.Node("client").Dial(ctx, &net.Dialer{Timeout: time.Second}, "tcp", address)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("no answer of %s: %w: %s", address, err, log())
		}
		time.Sleep(10 * time.Millisecond) // between two looks
	}
}

// plainServer replaces nginx.
func (s *study) plainServer() (stop func(), err error) {
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "sluice") }),
		ReadHeaderTimeout: time.Minute,
	}
	for _, port := range []string{"80", backendPort} {
		l, err := s.lab.Node("server").Listen(faults.Server + ":" + port)
		if err != nil {
			return nil, errors.Join(err, server.Close())
		}
		go func() { _ = server.Serve(l) }()
	}
	return func() { server.Close() }, nil
}
